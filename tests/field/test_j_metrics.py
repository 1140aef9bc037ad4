"""Section J of docs/FIELD-BUGS.md: metrics that lie. Named after the row, the tracker and its number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import inside
import pytest
from core.driving import LOAD, prompt

from kvtier import ChunkedLocal, FullAttention, RequestTooLarge, SlidingWindow
from kvtier.testing import Faults, SimulatedEngine

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
GAUGES = {"live", "empty", "cached", "fenced", "held", "quarantined", "waiting", "running"}


def sources(serving) -> dict[str, int]:
    return dict(serving.cache.stats().prompt_tokens)


def added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a snapshot, with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{path}.{name}")
    elif isinstance(value, (int, float)):
        yield path, value


def test_j1_vllm_28585_a_hit_whose_load_takes_many_steps_is_counted_once(make_serving):
    serving = make_serving(GROUPS, 24, 64, hold=[])
    serving.serve("before", prompt(0, 25), 1)
    inside.pools(serving.cache).forget_all()
    before = sources(serving)
    serving.engine.hold = {LOAD}
    serving.add("hit", prompt(0, 25), 1)
    for _ in range(5):
        assert serving.step().num_tokens == 0
    assert sources(serving) == before, "nothing is counted while it waits"
    serving.engine.release()
    serving.run()
    now = added(before, sources(serving))
    assert now == {"device": 0, "host": 24, "computed": 1}
    assert now["host"] / (25 - 1) == 1.0, "all that can be hit was hit"
    assert serving.cache.stats().transfers.loaded_blocks == len(serving.engine.submitted[-1].groups)


def test_j2_vllm_30522_host_lookups_do_not_count_what_the_device_had(make_serving):
    """1000 tokens, 600 on the device, 200 in the host tier: the host was asked for 400 and had 200."""
    serving = make_serving({"full": (FullAttention(), 20)}, 60, 60, hold=[], scheduler={"max_batched_tokens": 1024})
    tokens = prompt(0, 1000)
    serving.serve("800 in the host", tokens[:800], 1)
    inside.pools(serving.cache).forget_all()
    serving.serve("600 on the device", tokens[:600], 1)
    before = sources(serving)
    done = serving.serve("query", tokens, 1)
    assert done.cached_tokens == {"device": 600, "host": 200}
    now = added(before, sources(serving))
    assert now == {"device": 600, "host": 200, "computed": 200}
    assert now["host"] + now["computed"] == 400


@pytest.mark.parametrize("end", ["aborted while it waits", "refused"])
def test_j3_vllm_57596_requests_that_never_ask_the_cache_are_no_misses(make_serving, end):
    """kvtier has no way to skip the cache; these are the requests that never come to ask it."""
    serving = make_serving(FULL, 8, 16, hold=[], scheduler={"max_running": 1})
    serving.serve("before", prompt(0, 9), 1)
    before = sources(serving)
    if end == "refused":
        with pytest.raises(RequestTooLarge, match="needs"):
            serving.add("never", prompt(1, 100), 1)
        expected = {"device": 0, "host": 0, "computed": 0}
    else:
        serving.add("runs", prompt(2, 9), 4)
        serving.step()
        serving.add("never", prompt(3, 9), 1)
        serving.step()
        serving.scheduler.abort("never")
        expected = {"device": 0, "host": 0, "computed": 9}
    serving.run()
    assert added(before, sources(serving)) == expected


def test_j4_vllm_36533_no_counter_falls_through_preemption_reload_and_a_failed_load(make_serving):
    serving = make_serving(FULL, 8, 64, hold=[])
    last: dict[str, float] = {}

    def check() -> None:
        now = {
            path: value
            for path, value in numbers(serving.cache.stats().to_dict())
            if path.rsplit(".", 1)[1] not in GAUGES and not path.startswith(".waiting.")
        }
        assert all(now[path] >= value for path, value in last.items())
        last.update(now)

    serving.add("victim", prompt(0, 17), 8)
    serving.step()
    serving.add("urgent", prompt(1, 25), 1, priority=-1)
    serving.steps_until(lambda: "urgent" in serving.finished)
    check()
    serving.engine.hold = {LOAD}
    inside.pools(serving.cache).forget_all()
    while not serving.engine.live:
        serving.step()
        check()
    serving.engine.end(error="no link")
    serving.engine.release()
    while serving.scheduler.has_work():
        serving.step()
        check()
    stats = serving.cache.stats()
    assert (stats.requests["preemptions"], stats.transfers.failed_loads) == (1, 1)
    assert serving.run()["victim"].finish_reason == "length"


def test_j5_vllm_53902_residency_is_shown_when_nothing_is_being_copied(make_serving):
    """A usage gauge that shows pins is 0 here; what is resident, and what would fit in tokens, is plain to see."""
    serving = make_serving(FULL, 8, 20, hold=[])
    serving.serve("A", prompt(0, 25), 1)
    stats = serving.cache.stats()
    assert stats.transfers.live == 0
    assert (stats.host["full"].held, stats.host["full"].cached, stats.host["full"].empty) == (0, 6, 14)
    assert (stats.host_capacity_tokens, stats.device_capacity_tokens) == (80, 32)


@pytest.mark.parametrize("host", [None, 64], ids=["without a host tier", "with a host tier"])
def test_j6_inference_sim_1699_sources_mean_the_same_with_and_without_a_host_tier(make_serving, host):
    """The denominator is the prompt in both; on a device that is large enough the numbers are the same."""
    serving = make_serving(GROUPS, 64, host)
    lengths = [25, 25, 9, 31, 25]
    for k, n in enumerate(lengths):
        serving.serve(str(k), prompt(n, n), 2)
    now = sources(serving)
    assert sum(now.values()) == sum(lengths)
    assert now == {"device": 48, "host": 0, "computed": sum(lengths) - 48}


@pytest.mark.parametrize("seed", range(3))
def test_j7_lmcache_987_no_number_is_ever_negative(make_serving, seed):
    """Copies that fail, tear, and never end, tiny pools, aborts and a reset: all numbers, in every step."""
    faults = Faults(fail=0.2, tear=0.2, lose=0.1, max_delay_s=8.0)
    engine = lambda memory: SimulatedEngine(memory, seed, faults)  # noqa: E731
    serving = make_serving(
        GROUPS,
        {"full": 9, "win": 4, "chunk": 4},
        7,
        copy_engine=engine,
        deadline_s=6.0,
        store=["eager", "lazy"][seed % 2],
    )
    for k in range(40):
        if k < 30 and k % 2:
            serving.add(str(k), prompt(k % 5, 5 + k % 20), 1 + k % 7)
        if k % 9 == 0:
            serving.scheduler.abort(str(k - 2))
        if k == 20:
            serving.cache.reset()
        serving.step()
        assert all(value >= 0 for _, value in numbers(serving.cache.stats().to_dict()))
    while serving.scheduler.has_work() or serving.cache.stats().transfers.live:
        serving.engine.end_lost()
        serving.step()
    serving.run()
    for done in serving.finished.values():
        assert min(done.cached_tokens.values()) >= 0
