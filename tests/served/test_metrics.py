"""``/metrics``: sums that add up after a workload, names that documents and dashboards know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
from core.driving import LOAD, prompt
from prometheus_client.parser import text_string_to_metric_families

from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.remote.counts import RemoteCounts
from runner.metrics.cache import add_remote
from runner.metrics.families import Families
from runner.metrics.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
Scrape = dict[tuple[str, ...], float]


def scrape(metrics: Metrics) -> Scrape:
    """Values by name and labels other than those that all have, in the order of their names."""
    found: Scrape = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if ":" in sample.name:
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0"), sample
                key = (sample.name, *(labels[name] for name in sorted(labels)))
                assert key not in found, key
                found[key] = sample.value
    return found


def rising(metrics: Metrics) -> set[str]:
    """Names of the samples that may only rise."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {s.name for family in families if family.type in ("counter", "histogram") for s in family.samples}


def total(scraped: Scrape, name: str) -> float:
    """Over all labels."""
    values = [value for key, value in scraped.items() if key[0] == name]
    assert values, name
    return sum(values)


def labelled(scraped: Scrape, name: str) -> dict[str, float]:
    """By the only label; without those that are 0."""
    return {key[1]: value for key, value in scraped.items() if key[0] == name and value}


@pytest.fixture
def served(make_serving: Any) -> tuple[Any, Metrics]:
    serving = make_serving(GROUPS, {"full": 24, "win": 12, "chunk": 12}, 64, hold=[], verify="full")
    return serving, Metrics(SimpleNamespace(cache=serving.cache), "tiny")


def workload(serving: Any, metrics: Metrics) -> Iterator[None]:
    """Requests that hit neither tier, both, and the device alone; one is aborted, one step taken back."""
    for k, n in enumerate([25, 25, 40, 9, 33, 25]):
        serving.add(f"r{k}", prompt(n, n), 3, priority=-k)
        metrics.on_arrival(n, max_tokens=3)
        serving.step()
        yield
    serving.scheduler.abort("r2")
    serving.run()
    inside.pools(serving.cache).forget_all()
    serving.add("host", prompt(33, 33), 4)
    metrics.on_arrival(33)
    serving.step()
    serving.cancelled()
    yield
    serving.run()
    serving.add("device", prompt(33, 33), 4)
    metrics.on_arrival(33)
    serving.run()
    yield


def test_a_workload_adds_up_and_no_counter_falls(served: tuple[Any, Metrics]) -> None:
    serving, metrics = served
    counters, last = rising(metrics), scrape(metrics)

    def look() -> None:
        nonlocal last
        now = scrape(metrics)
        assert now.keys() == last.keys(), "series come and go"
        assert [key for key, value in last.items() if key[0] in counters and now[key] < value] == []
        last = now

    for _ in workload(serving, metrics):
        look()
    for done in serving.finished.values():
        n = len(serving.requests[done.request_id].prompt_token_ids)
        metrics.on_finish(n, [(done.finish_reason, len(done.token_ids))], 2.0, 0.5, done.queue_s)
    look()
    lengths = [len(request.prompt_token_ids) for request in serving.requests.values()]
    tokens = sum(len(done.token_ids) for done in serving.finished.values())
    assert last["vllm:prompt_tokens_total",] == last["kvtier:arrived_prompt_tokens_total",] == sum(lengths)
    sources = labelled(last, "kvtier:prefix_tokens_total")
    assert sources.keys() == {"device", "host", "computed"}
    assert sum(sources.values()) == sum(lengths)
    assert len(set(sources.values())) == 3, "or a mix-up would not be seen"
    assert sources == labelled(last, "kvtier:finished_prompt_tokens_total")
    assert last["vllm:prefix_cache_hits_total",] == sources["device"]
    assert last["vllm:external_prefix_cache_hits_total",] == sources["host"]
    assert last["vllm:prompt_tokens_cached_total",] == sources["device"] + sources["host"]
    assert last["vllm:generation_tokens_total",] == last["vllm:request_generation_tokens_sum",] == tokens
    ended = {"length": len(lengths) - 1, "abort": 1}
    assert labelled(last, "vllm:request_success_total") == labelled(last, "kvtier:finished_requests_total") == ended
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
        assert last[f"vllm:{name}_count",] == last[f"vllm:{name}_bucket", "+Inf"] == len(lengths)
    stored = sum(len(t.groups) for t in serving.engine.submitted if t.direction is not LOAD)
    assert last["kvtier:transferred_blocks_total", "store"] == stored > 0
    assert last["kvtier:transfers_total", "store"] == last["kvtier:transfer_seconds_count", "store"]
    assert last["kvtier:verified_blocks_total",] == last["kvtier:transferred_blocks_total", "load"] > 0
    assert last["vllm:num_preemptions_total",] == sum(done.preemptions for done in serving.finished.values())
    assert last["vllm:iteration_tokens_total_sum",] == last["kvtier:computed_tokens_total",] > sources["computed"]
    for name, of in serving.cache.stats().ends.items():
        ends = [last[f"kvtier:end_{what}", name] for what in ("hits_total", "misses_total", "pays")]
        assert ends == [of.hits, of.missed, of.pays], name
    assert sum(labelled(last, "kvtier:end_hits_total").values()) > 0
    assert total(last, "vllm:num_requests_running") == total(last, "kvtier:waiting_requests") == 0


def test_the_tiers_are_shown_by_group_and_place(served: tuple[Any, Metrics]) -> None:
    serving, metrics = served
    serving.serve("before", prompt(0, 25), 1)
    serving.add("runs", prompt(1, 25), 4)
    serving.step()
    now, stats = scrape(metrics), serving.cache.stats()
    for tier, pools in (("device", stats.device), ("host", stats.host)):
        for group, pool in pools.items():
            for place in ("empty", "cached", "fenced", "held", "quarantined", "lent"):
                assert now["kvtier:blocks", group, place, tier] == getattr(pool, place)
            assert now["kvtier:capacity_tokens", group, tier] == 4 * pool.usable
    held = sum(pool.held * pool.block_bytes for pool in stats.device.values())
    size = sum(pool.usable * pool.block_bytes for pool in stats.device.values())
    assert now["vllm:kv_cache_usage_perc",] == pytest.approx(held / size)
    assert (now["vllm:num_requests_running",], now["vllm:num_requests_waiting",]) == (1, 0)
    serving.run()


def test_a_delta_counts_each_of_its_tokens(served: tuple[Any, Metrics]) -> None:
    _, metrics = served
    metrics.on_first_token(0.03)
    metrics.on_tokens(4, 0.1)
    metrics.on_tokens(0, 3.0)
    metrics.on_refusal("overloaded")
    metrics.on_finish(7, [("stop", 5), ("length", 3)], latency_s=1.03, ttft_s=0.03)
    now = scrape(metrics)
    between = "vllm:inter_token_latency_seconds"
    assert (now[f"{between}_count",], now[f"{between}_sum",]) == (4, pytest.approx(0.1))
    assert (now[f"{between}_bucket", "0.01"], now[f"{between}_bucket", "0.025"]) == (0, 4)
    assert now["vllm:time_to_first_token_seconds_bucket", "0.04"] == 1
    assert now["vllm:request_time_per_output_token_seconds_sum",] == pytest.approx(0.25)
    assert now["vllm:request_max_num_generation_tokens_sum",] == 5
    assert labelled(now, "vllm:request_success_total") == {"stop": 1, "length": 1}
    assert labelled(now, "kvtier:refused_requests_total") == {"overloaded": 1}
    assert now["vllm:request_queue_time_seconds_count",] == 0


def test_documents_and_dashboards_name_what_there_is(served: tuple[Any, Metrics]) -> None:
    _, metrics = served
    types = {f.name: f.type for f in text_string_to_metric_families(metrics.render().decode()) if ":" in f.name}
    counts, store = RemoteCounts(reasons={"TimeoutError": 1}), Families("needle")
    add_remote(store, counts.stats("file", True, False, 0))
    types |= {family.name: family.type for family in store.made}
    exposed = {name + ("_total" if kind == "counter" else ""): kind for name, kind in types.items()}
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+:\w+)[^`]*` \| (\w+) \|", page, re.M)
    assert dict(rows) == exposed
    assert len(rows) == len(exposed), "a metric is described twice"

    samples = {key[0] for key in scrape(metrics)} | {sample.name for family in store.made for sample in family.samples}
    board = json.loads((DOCS / "grafana" / "kvtier.json").read_text(encoding="utf-8"))
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", [])]
    queries += [v["definition"] for v in board["templating"]["list"] if "definition" in v]
    shown = {name for query in queries for name in re.findall(r"(?:vllm|kvtier):\w+", query)}
    assert shown <= samples, shown - samples
    assert len(shown) > 30
    for page in ("OPERATIONS.md", "QUICKSTART.md", "deploy/alerts.yml"):
        told = {*re.findall(r"(?:vllm|kvtier):\w+", (DOCS / page).read_text(encoding="utf-8"))}
        assert told - samples - set(exposed) == set(), page
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_a_closed_cache_still_tells(served: tuple[Any, Metrics]) -> None:
    """A server is scraped while it shuts down."""
    serving, metrics = served
    serving.serve("before", prompt(0, 25), 1)
    before = scrape(metrics)
    serving.cache.close()
    assert scrape(metrics) == before
