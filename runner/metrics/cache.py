"""A cache's counts (``CacheStats``) as metric families: vLLM's names if they mean the same, else kvtier's.

docs/reference/metrics.md lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier import CacheStats
from kvtier.machine.stats import LatencyStats, RemoteStats
from runner.metrics.families import Distribution, Families, Labels

PLACES = ("empty", "cached", "fenced", "held", "quarantined", "lent")
DEFERRED = ("transfer", "twin")
"""The reasons to wait of requests that others may pass; vLLM's term."""
_OF_ENDS = ("hits", "missed", "pays")
"""Fields of ``EndStats``."""
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's; powers of two."""


def add_cache(families: Families, stats: CacheStats) -> None:
    """Adds all of them."""
    _add_requests(families, stats)
    _add_tokens(families, stats)
    _add_ends(families, stats)
    _add_pools(families, stats)
    _add_transfers(families, stats)
    if stats.remote is not None:
        add_remote(families, stats.remote)


def _one(value: float) -> dict[Labels, float]:
    return {(): value}


def _by(values: Mapping[str, float]) -> dict[Labels, float]:
    return {(name,): value for name, value in values.items()}


def _add_requests(families: Families, stats: CacheStats) -> None:
    requests, waiting, sent_back = stats.requests, stats.waiting, stats.sent_back
    families.gauge("vllm:num_requests_running", "Requests that run.", _one(requests["running"]))
    families.gauge("vllm:num_requests_waiting", "Requests that wait.", _one(requests["waiting"]))
    deferred = sum(waiting[why] for why in DEFERRED)
    families.gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait for room (capacity), or for content that is on its way (deferred).",
        _by({"capacity": sum(waiting.values()) - deferred, "deferred": deferred}),
        "reason",
    )
    families.gauge("kvtier:waiting_requests", "Requests that wait, by what for.", _by(waiting), "reason")
    families.counter("kvtier:waits", "Requests that began to wait, by what for.", _by(stats.waits), "reason")
    families.counter("kvtier:finished_requests", "Requests that the cache ended.", _by(stats.finished), "reason")
    preemptions = sum(sent_back[why] for why in ("blocks", "rows", "cancel"))
    families.counter("vllm:num_preemptions", "Preemptions.", _one(preemptions))
    families.counter("kvtier:sent_back", "Requests that had a row and wait again.", _by(sent_back), "why")
    families.counter(
        "kvtier:preempted_for",
        "Preemptions since blocks were short, by the group that lacked the most bytes.",
        _by(stats.preempted_for),
        "group",
    )
    short: dict[Labels, float] = {(who, group): n for who, of in stats.shortages.items() for group, n in of.items()}
    families.counter("kvtier:shortages", 'Answers "not now", by who lacked which blocks.', short, "who", "group")


def _add_tokens(families: Families, stats: CacheStats) -> None:
    prefix = stats.prefix_tokens
    tiers = {tier: n for tier, n in prefix.items() if tier != "queried"}
    found = sum(tiers.values())
    outside, computed = found - prefix["device"], prefix["queried"] - found
    sources = {"local_cache_hit": prefix["device"], "external_kv_transfer": outside}
    families.counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", _one(prefix["queried"]))
    families.counter(
        "vllm:prompt_tokens_by_source",
        "The same, by where their K and V came from: computed, the device, the host tier.",
        _by({"local_compute": computed, **sources}),
        "source",
    )
    families.counter("vllm:prompt_tokens_cached", "Those of them that either tier had.", _one(found))
    families.counter("vllm:prefix_cache_queries", "Tokens that the device was asked for.", _one(prefix["queried"]))
    families.counter("vllm:prefix_cache_hits", "Those that it had.", _one(prefix["device"]))
    asked = prefix["queried"] - prefix["device"] if stats.host else 0
    families.counter("vllm:external_prefix_cache_queries", "Tokens that the host tier was asked for.", _one(asked))
    families.counter("vllm:external_prefix_cache_hits", "Those that it had.", _one(outside))
    families.counter(
        "kvtier:prefix_tokens",
        "Prompt tokens at the first admission of requests, by source.",
        _by({**tiers, "computed": computed}),
        "source",
    )
    families.counter(
        "kvtier:finished_prompt_tokens",
        "Prompt tokens of finished requests, by source.",
        _by(stats.prompt_tokens),
        "source",
    )
    families.counter("vllm:generation_tokens", "Tokens generated.", _one(stats.generated_tokens))
    families.histogram("vllm:iteration_tokens_total", "Tokens of a step.", {(): _step_tokens(stats)})
    families.counter("kvtier:computed_tokens", "Tokens of all steps.", _one(stats.computed_tokens))
    families.counter("kvtier:cancelled_steps", "Steps whose forward failed.", _one(stats.cancelled_steps))


def _add_ends(families: Families, stats: CacheStats) -> None:
    hits, missed, pays = ({name: getattr(end, of) for name, end in stats.ends.items()} for of in _OF_ENDS)
    families.counter("kvtier:end_hits", "Requests whose hit ended at such an end.", _by(hits), "end")
    families.counter(
        "kvtier:end_misses", "Requests whose hit would have, had its windows been there.", _by(missed), "end"
    )
    families.gauge("kvtier:end_pays", "1 while windows are kept at such ends, else 0.", _by(pays), "end")


def _step_tokens(stats: CacheStats) -> Distribution:
    """Histogram of the tokens of steps, with vLLM's bounds."""
    tokens = Distribution(STEP_BOUNDS, total=float(stats.computed_tokens))
    for i, n in enumerate(stats.step_sizes):
        tokens.add(2**i, n)
    tokens.total = float(stats.computed_tokens)
    return tokens


def _add_pools(families: Families, stats: CacheStats) -> None:
    used = sum((pool.held + pool.quarantined) * pool.block_bytes for pool in stats.device.values())
    room = stats.device_bytes - sum(pool.block_bytes for pool in stats.device.values())
    families.gauge(
        "vllm:kv_cache_usage_perc", "Share of the device tier that requests hold, 0 to 1.", _one(min(1.0, used / room))
    )
    tiers = {"device": stats.device, "host": stats.host}

    def each(name: str) -> dict[Labels, float]:
        return {(t, g): getattr(pool, name) for t, pools in tiers.items() for g, pool in pools.items()}

    places = {(*key, place): n for place in PLACES for key, n in each(place).items()}
    both = ("tier", "group")
    families.gauge("kvtier:blocks", "Blocks, by where they are.", places, *both, "place")
    families.gauge("kvtier:usable_blocks", "Blocks in all places.", each("usable"), *both)
    families.gauge("kvtier:peak_held_blocks", "The most that were held at a time.", each("peak_held"), *both)
    families.gauge("kvtier:block_bytes", "Bytes of a block.", each("block_bytes"), *both)
    families.gauge("kvtier:capacity_tokens", "Tokens that the usable blocks hold.", each("capacity_tokens"), *both)
    families.counter("kvtier:evicted_blocks", "Cached blocks handed out.", each("evicted"), *both)
    families.gauge(
        "kvtier:context_tokens",
        "Tokens of one context that fits alone.",
        _by({"device": stats.device_capacity_tokens, "host": stats.host_capacity_tokens}),
        "tier",
    )
    sizes = {"device": stats.device_bytes, "host": stats.host_bytes}
    families.gauge("kvtier:arena_bytes", "Bytes of the tier.", _by(sizes), "tier")


def _add_transfers(families: Families, stats: CacheStats) -> None:
    t = stats.transfers

    def counted(name: str, text: str, store: float, load: float) -> None:
        families.counter(name, text, _by({"store": store, "load": load}), "direction")

    counted("kvtier:transfers", "Transfers that ended.", t.stores, t.loads)
    counted("kvtier:transferred_blocks", "Blocks that arrived whole.", t.stored_blocks, t.loaded_blocks)
    counted("kvtier:transferred_bytes", "Their bytes.", t.stored_bytes, t.loaded_bytes)
    counted("kvtier:failed_transfers", "Transfers that failed, wholly or in part.", t.failed_stores, t.failed_loads)
    counted("kvtier:failed_blocks", "Blocks that did not arrive whole.", t.failed_store_blocks, t.failed_load_blocks)
    families.counter("kvtier:overdue_transfers", "Transfers given up after deadline_s.", _one(t.expired))
    families.counter("kvtier:verified_blocks", "Loaded blocks whose checksum was right.", _one(t.verified_blocks))
    families.counter("kvtier:damaged_blocks", "Loaded blocks whose checksum was wrong.", _one(t.corrupt_blocks))
    families.counter("kvtier:dropped_blocks", "Blocks that were not stored.", _one(t.dropped_blocks))
    families.gauge("kvtier:live_transfers", "Transfers planned or under way.", _one(t.live))
    families.gauge("kvtier:stores_hang", "1 while stores do not end in time, else 0.", _one(stats.stores_hang))
    took: dict[Labels, Distribution] = {
        ("store",): _latency(stats.store_latency),
        ("load",): _latency(stats.load_latency),
    }
    families.histogram("kvtier:transfer_seconds", "From a transfer's submission to its end.", took, "direction")


def add_remote(families: Families, remote: RemoteStats) -> None:
    """Adds the metrics of the remote tier."""

    def by_way(name: str, text: str, spill: float, fetch: float) -> None:
        families.counter(name, text, {(remote.kind, "spill"): spill, (remote.kind, "fetch"): fetch}, "backend", "way")

    by_way("kvtier:remote_objects", "Objects that arrived whole.", remote.spilled_objects, remote.fetched_objects)
    by_way("kvtier:remote_bytes", "Their bytes of blocks.", remote.spilled_bytes, remote.fetched_bytes)
    by_way("kvtier:remote_failed_objects", "Objects that went wrong.", remote.failed_spills, remote.failed_fetches)
    kind = (remote.kind,)
    for name, text, value in (
        ("looks", "Questions for a request's prefix.", remote.looks),
        ("late_looks", "Of them, those that a request has waited for in vain.", remote.late_looks),
        ("missed_objects", "Objects that had gone before they were read.", remote.missed_objects),
        ("refused_objects", "Objects that the remote tier did not take.", remote.refused_objects),
        ("overdue_calls", "Calls given up after deadline_s.", remote.expired),
        ("superseded_texts", "Texts not spilled: their conversations went on.", remote.superseded_texts),
        ("dropped_objects", "Objects not spilled: the host had not all of their blocks.", remote.dropped_objects),
        ("dropped_texts", "Texts not spilled: too many waited, or the remote tier failed.", remote.dropped_texts),
        ("not_worth", "Fetches left out: to compute is faster.", remote.not_worth),
        ("no_room", "Fetches left out: the host had no room.", remote.no_room),
    ):
        families.counter(f"kvtier:remote_{name}", text, {kind: value}, "backend")
    looked: dict[Labels, float] = {(remote.kind, "hit"): remote.found_names, (remote.kind, "miss"): remote.absent_names}
    families.counter("kvtier:remote_looked_objects", "Objects that questions named.", looked, "backend", "result")
    damaged: dict[Labels, float] = {(remote.kind, kind): n for kind, n in remote.damages.items()}
    families.counter(
        "kvtier:remote_damaged_objects", "Objects that were not what they should be.", damaged, "backend", "reason"
    )
    reasons: dict[Labels, float] = {(remote.kind, reason): n for reason, n in remote.reasons.items()}
    families.counter("kvtier:remote_failures", "Failures and refusals, by reason.", reasons, "backend", "reason")
    families.gauge("kvtier:remote_on", "0 once the cache was reset.", {kind: remote.is_on}, "backend")
    is_alone: dict[Labels, float] = {kind: remote.breaker_open}
    families.gauge("kvtier:remote_breaker_open", "1 while the remote tier is left alone.", is_alone, "backend")
    families.gauge("kvtier:remote_live_moves", "Spills and fetches under way.", {kind: remote.live}, "backend")
    took: dict[Labels, Distribution] = {
        (remote.kind, "look"): _latency(remote.look_latency),
        (remote.kind, "spill"): _latency(remote.spill_latency),
        (remote.kind, "fetch"): _latency(remote.fetch_latency),
    }
    families.histogram("kvtier:remote_seconds", "Of calls.", took, "backend", "call")


def _latency(of: LatencyStats) -> Distribution:
    return Distribution(of.bounds_s, of.counts, of.sum_s)
