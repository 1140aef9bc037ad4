"""What a world's counters and events must say, whatever has happened to it (I25)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvtier import EventKind, FinishedRequest, KVCache, KVEvents, Request
from kvtier.machine.journal import Admitted, Copied, Ended, PushedOut, Runs, SentBack, Waits
from kvtier.pools.block_pool import BlockPools, Col, Mark

JOURNAL = 2**17
"""Events that a world's journal keeps."""

Key = tuple[str, str, bytes]
"""A tier, a group, a block's name."""


def counters(cache: KVCache) -> dict[str, int]:
    """All of a cache's numbers that never fall."""
    stats = cache.stats()
    found = {f"transfers.{name}": n for name, n in vars(stats.transfers).items() if name != "live"}
    found |= {f"prompt tokens.{source}": n for source, n in stats.prompt_tokens.items()}
    found |= {f"requests.{name}": stats.requests[name] for name in ("finished", "preemptions")}
    found |= {f"ends.{name}.{of}": getattr(end, of) for name, end in stats.ends.items() for of in ("hits", "missed")}
    for tier, pools in (("device", stats.device), ("host", stats.host)):
        for group, pool in pools.items():
            found |= {f"{tier} {group}.{name}": getattr(pool, name) for name in ("evicted", "peak_held")}
    return found


def findable(cache: KVCache) -> set[Key]:
    """Read off the blocks themselves."""
    coordinator, host = cache.core.coordinator, cache.core.host
    tiers: list[tuple[str, BlockPools | None]] = [("device", coordinator.pools), ("host", host)]
    found = set()
    for tier, pools in tiers:
        if pools is not None:
            bases = pools.arrays.meta[:, Col.BASE]
            for i in (pools.arrays.mark == Mark.READY).nonzero()[0]:
                group = cache.spec.names[int(bases.searchsorted(i, side="right")) - 1]
                found.add((tier, group, pools.arrays.key[i].tobytes()))
    return found


def check_journal(cache: KVCache) -> None:
    """A journal that has forgotten nothing tells the same as the counters."""
    events, stats, counts = cache.journal.since(), cache.stats(), cache.core.coordinator.counts
    told = {of: [event.fact for event in events if type(event.fact) is of] for of in (Waits, SentBack, Ended, Copied)}
    assert Counter(fact.reason for fact in told[Waits]) == Counter(counts.waits)
    assert Counter(fact.why for fact in told[SentBack]) == Counter(counts.sent_back)
    assert Counter(fact.group for fact in told[SentBack] if fact.group) == Counter(counts.preempted_for)
    assert Counter(fact.reason for fact in told[Ended]) == Counter(counts.finished)
    evicted: Counter[tuple[str, str]] = Counter()
    for event in events:
        if isinstance(event.fact, PushedOut):
            evicted += Counter({(event.fact.tier, group): n for group, n in event.fact.blocks.items()})
    tiers = {"device": stats.device, "host": stats.host}
    assert evicted == Counter({(t, g): pool.evicted for t, pools in tiers.items() for g, pool in pools.items()})
    loads = [fact for fact in told[Copied] if fact.direction == "load"]
    bad = sum(fact.bad_blocks for fact in loads if "not ended after" not in fact.error)
    assert bad <= stats.transfers.failed_load_blocks
    assert sum("not ended after" in fact.error for fact in told[Copied]) == stats.transfers.expired
    first: dict[str, Admitted] = {}
    hits = [Counter[str](), Counter[str]()]
    for event in events:
        if isinstance(event.fact, Admitted):
            first[event.request_id] = event.fact
        elif isinstance(event.fact, Runs) and event.request_id in first and event.request_id not in hits[1]:
            hits[1][event.request_id] = 1
            start = 0
            for end, tier in first[event.request_id].sources:
                hits[0][tier] += end - start
                start = end
        elif isinstance(event.fact, Ended):
            hits[1].pop(event.request_id, None)  # its name may come again
    assert hits[0] == Counter({tier: n for tier, n in counts.prefix_tokens._asdict().items() if tier != "queried"})


class Listener:
    """A router's view of one cache: what it has been told."""

    def __init__(self, cache: KVCache) -> None:
        self.events = KVEvents(cache)
        self.found: set[Key] = set()

    def poll(self) -> None:
        """An event says only what is news to whoever has heard all before it."""
        for event in self.events.poll():
            assert event.keys.dtype == np.uint64, event
            assert event.keys.shape == (len(event.keys), 2), event
            news = {(event.tier, event.group, key.tobytes()) for key in event.keys}
            assert len(news) == len(event.keys) > 0, event
            if event.kind is EventKind.STORED:
                assert not news & self.found, event
                self.found |= news
            else:
                assert news <= self.found, event
                self.found -= news


class Metrics:
    """Somebody who reads one cache's counters and hears its events, from the beginning."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._counters = counters(cache)
        self._listener = Listener(cache)
        self._reported = 0
        self._hits = dict.fromkeys(cache.core.coordinator.tiers, 0)  # tokens that the reports name
        self._prompts = [0, 0]  # tokens of prompts that were certainly admitted, and of all

    def read(self) -> None:
        """No counter has fallen."""
        before, self._counters = self._counters, counters(self._cache)
        fallen = {name: (before[name], n) for name, n in self._counters.items() if n < before[name]}
        assert not fallen, f"counters fell: {fallen}"

    def listen(self) -> None:
        """Whoever has heard all events knows what can be found."""
        self._listener.poll()
        assert self._listener.found == findable(self._cache), "the events so far leave something else"

    def read_journal(self) -> None:
        """The events add up to the counters, as far as none is forgotten."""
        if self._cache.journal.count <= JOURNAL:
            check_journal(self._cache)

    def report(self, request: Request, done: FinishedRequest) -> None:
        """Each prompt token of a request that was admitted has one source, and is counted under it."""
        length, hits = len(request.prompt_token_ids), sum(done.cached_tokens.values())
        assert min(done.cached_tokens.values()) >= 0, done
        assert hits < length, done
        self._reported += 1
        for tier, n in done.cached_tokens.items():
            self._hits[tier] += n
        self._prompts[0] += length if done.token_ids else 0
        self._prompts[1] += length

    def settle(self) -> None:
        """All requests are reported: the sources add up to their prompts."""
        now = counters(self._cache)
        assert now["requests.finished"] == self._reported
        for tier, n in self._hits.items():
            assert now[f"prompt tokens.{tier}"] == n, (tier, n, now)
        total = sum(n for name, n in now.items() if name.startswith("prompt tokens."))
        assert self._prompts[0] <= total <= self._prompts[1], (now, self._prompts)
        self.listen()
        self.read_journal()
