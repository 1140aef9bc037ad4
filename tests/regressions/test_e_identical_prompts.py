"""Defect e: identical prompts in one step make duplicate blocks, or one overwrites the other's key."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from core.driving import prompt, scheduled

from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.pools.block_pool import Mark
from kvtier.testing import expected_tokens

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
UNEQUAL = {"full": (FullAttention(), 8), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 2)}


def keyed_blocks(serving) -> list[tuple[int, bytes]]:
    """(group, key) of every findable device block."""
    a, out = inside.pools(serving.cache).arrays, []
    for g in range(len(serving.spec.groups)):
        base, rows = int(a.meta[g, 0]), int(a.meta[g, 1])
        out += [(g, a.key[i].tobytes()) for i in range(base, base + rows) if a.mark[i] == Mark.READY]
    return out


@pytest.mark.parametrize("groups", [GROUPS, UNEQUAL])
@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("length", [9, 16, 17, 24, 30])
def test_e_identical_prompts_in_one_step_are_computed_once(make_serving, groups, copies, length):
    serving = make_serving(groups, 64)
    for k in range(copies):
        serving.add(f"twin {k}", prompt(0, length), 6)
    assert scheduled(serving.step()) == {"twin 0": length}
    serving.run()
    unit = serving.spec.hit_tokens
    for k in range(1, copies):
        assert serving.finished[f"twin {k}"].cached_tokens == {"device": (length - 1) // unit * unit, "host": 0}
    keys = keyed_blocks(serving)
    assert len(keys) == len(set(keys))


def test_e_prompts_too_short_for_a_shared_block_run_together(make_serving):
    serving = make_serving(GROUPS, 64)
    serving.add("A", prompt(0, 4), 3)
    serving.add("B", prompt(0, 4), 3)
    assert scheduled(serving.step()) == {"A": 4, "B": 4}
    serving.run()


def test_e_a_waiting_twin_holds_nothing_and_others_pass_it(make_serving):
    serving = make_serving(GROUPS, 64, scheduler={"max_batched_tokens": 16, "max_running": 2})
    serving.add("A", prompt(0, 24), 2)
    serving.add("twin", prompt(0, 24), 2)
    serving.add("other", prompt(1, 4), 2)
    assert scheduled(serving.step()) == {"A": 16}
    assert scheduled(serving.step()) == {"A": 8, "other": 4}
    assert not serving.is_running("twin")
    assert "'A'" in serving.scheduler.why_waiting()["twin"]
    serving.run()
    assert serving.finished["twin"].cached_tokens["device"] == 20


@pytest.mark.parametrize("common", [8, 9, 12, 16, 20])
@pytest.mark.parametrize("budget", [6, 64])
def test_e_prompts_that_part_midway_share_what_they_have_in_common(make_serving, common, budget):
    serving = make_serving(GROUPS, 64, scheduler={"max_batched_tokens": budget})
    stem = prompt(0, common)
    serving.add("A", [*stem, *prompt(1, 13)], 4)
    serving.add("B", [*stem, *prompt(2, 13)], 4)
    serving.add("C", [*stem, *prompt(3, 13)], 4)
    serving.run()
    for name in "BC":
        assert serving.finished[name].cached_tokens["device"] == common // 4 * 4


def test_e_running_twins_merge_into_one_block(make_serving):
    """B's prompt is what A is generating: both compute the same block, and the later one gives way."""
    serving = make_serving(GROUPS, 64)
    start = prompt(0, 6)
    text = expected_tokens(serving.spec, start, 14)
    serving.add("A", start, 30)
    serving.steps_until(lambda: serving.known("A") == 8)
    serving.add("B", [*start, *text], 30)
    serving.step()
    serving.steps_until(lambda: serving.known("A") >= 18)
    table, rows = inside.coordinator(serving.cache).tables.table(0), [s.row for s in serving.scheduler.running]
    assert table[rows[0], :4].tolist() == table[rows[1], :4].tolist()
    assert np.all(table[rows[0], :4] > 0)
    serving.run()
    keys = keyed_blocks(serving)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("how", ["abort", "finish", "cancel"])
def test_e_a_twin_goes_on_when_the_one_it_waits_for_ends(make_serving, how):
    serving = make_serving(GROUPS, 64, scheduler={"max_batched_tokens": 8})
    serving.add("A", prompt(0, 30), 3)
    serving.add("twin", prompt(0, 30), 3)
    serving.step()
    if how == "cancel":
        serving.cancelled()
    else:
        assert getattr(serving.scheduler, how)("A")
    serving.run()
    assert serving.finished["twin"].finish_reason == "length"
    assert serving.finished["twin"].cached_tokens["device"] >= 8


def test_e_a_copy_of_an_evicted_twin_is_never_left_dangling(make_serving):
    serving = make_serving(GROUPS, {"full": 8, "win": 8, "chunk": 8})
    for k in range(6):
        serving.add(f"twin {k}", prompt(0, 13), 5)
        serving.add(f"other {k}", prompt(k + 1, 17), 5)
    serving.run()


def test_e_a_high_priority_request_does_not_wait_for_a_low_priority_twin_that_others_keep_from_running(make_serving):
    """The first in service order always advances, also where its prefix is in the hands of the last."""
    serving = make_serving(GROUPS, 200, scheduler={"max_batched_tokens": 8})
    serving.add("last", prompt(0, 40), 1, priority=9)
    serving.step()
    for k in range(4):
        serving.add(f"between {k}", prompt(10 + k, 60), 1, priority=5)
    serving.add("first", prompt(0, 40), 1, priority=0)
    for _ in range(12):
        serving.step()
    assert "first" in serving.finished
    serving.run()


def test_e_a_stored_block_is_not_stored_again_by_a_twin(make_serving):
    serving = make_serving(GROUPS, 64, 128)
    for k in range(3):
        serving.add(f"twin {k}", prompt(0, 17), 3)
    serving.run()
    host = serving.cache.stats().host
    assert serving.cache.stats().transfers.stored_blocks == sum(pool.cached for pool in host.values())
