"""What shared arenas are for, on real models' shapes: nearly all of the memory in use, and the right content kept.

The same measurements as ``python -m benchmarks.capacity``, smaller; its figures are in docs/PERFORMANCE.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from breadth import covering, sample, sized

from benchmarks.capacity.measure import LENGTHS, TALKS, Talk, churn, fill, full_only, hit_rate
from benchmarks.models import MODELS
from kvtier import CacheSpec, KVCache, Request, Scheduler

pytestmark = pytest.mark.usefixtures("unaudited")  # pools of 100,000 blocks, tens of thousands of steps

HYBRIDS = ("gpt-oss-120b", "Gemma-3-27B", "Gemma-4-31B", "Llama-4-Scout")
ARENA_BYTES = 100 * 10**9
SHORTER = {"answers of 500": replace(TALKS["answers of 500"], conversations=12)}
"""Nearly all of its steps generate tokens one by one."""
COMING = sized(40, 120)
"""Requests that come and go."""


def spec_of(name: str) -> CacheSpec:
    return CacheSpec.from_config(MODELS[name]())


@pytest.mark.parametrize("name", sample([*HYBRIDS, "Llama-3.1-8B"], HYBRIDS[3:]))
def test_of_an_arena_at_least_98_percent_can_be_in_use_at_90k_tokens(name: str) -> None:
    assert fill(spec_of(name), ARENA_BYTES, 90_112) >= 0.98


@pytest.mark.parametrize("name", sample(HYBRIDS, HYBRIDS[:1]))
def test_and_averaged_over_contexts_of_2k_to_128k(name: str) -> None:
    assert np.mean([fill(spec_of(name), ARENA_BYTES, n) for n in sized(LENGTHS[::3], LENGTHS)]) >= 0.98


@pytest.mark.parametrize(("name", "shortest", "most_wasted"), covering(HYBRIDS, [(90_112, 0.005), (2_048, 0.02)]))
def test_little_is_wasted_while_requests_come_and_go(name: str, shortest: int, most_wasted: float) -> None:
    run = churn(spec_of(name), ARENA_BYTES, shortest, 90_112, COMING)
    assert run.requests == COMING
    assert 0 < run.wasted <= most_wasted
    assert run.reachable > 0.9, "requests wait for room that is there"


@pytest.mark.parametrize(
    ("name", "talk", "in_host", "store"), covering(HYBRIDS, TALKS, [(False, "eager"), (True, "eager"), (True, "lazy")])
)
def test_a_hybrid_finds_as_much_again_as_if_all_layers_were_full(
    name: str, talk: str, in_host: bool, store: str
) -> None:
    """Nearly all, that is: what full layers alone find is between this and 1, as the next test sees."""
    assert hit_rate(spec_of(name), 0.95, SHORTER.get(talk, TALKS[talk]), in_host, store) > 0.99


@pytest.mark.parametrize("talk", TALKS)
def test_if_all_layers_are_full_nearly_everything_is_found_again(talk: str) -> None:
    assert hit_rate(full_only(spec_of("gpt-oss-120b")), 0.95, SHORTER.get(talk, TALKS[talk])) > 0.99


@pytest.mark.parametrize("name", HYBRIDS)
def test_four_conversations_at_a_quarter_of_the_arena_all_hit_on_their_second_turn(name: str) -> None:
    spec = spec_of(name)
    talk = Talk(conversations=4, turns=2)
    assert hit_rate(spec, 0.25, talk) == hit_rate(full_only(spec), 0.25, talk) > 0.99


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_request_that_needs_nearly_the_whole_arena_runs_in_one_that_is_full_of_other_content(name: str) -> None:
    """First many short texts, so that windows and chunks have most slabs; then one long text; then short ones again."""
    spec = spec_of(name)
    with KVCache(spec, device="meta", device_bytes=ARENA_BYTES // 10) as cache:
        scheduler = Scheduler(cache, 8192, 64)
        longest = cache.stats().device_capacity_tokens
        lengths = [1_000] * 60 + [longest - 8_192] + [1_000] * 60
        for i, n in enumerate(lengths):
            scheduler.add(Request(f"{i}", np.full(n, i, np.int32), 2))
        while scheduler.has_work():
            step = scheduler.schedule()
            for done in scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64)):
                assert done.finish_reason == "length", done
        assert cache.stats().requests["preemptions"] == 0
        assert cache.audit() == []
