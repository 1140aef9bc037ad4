"""Defect d: off by one at exact block multiples. Preempted there and resumed, the text is that of a run in one go."""

from __future__ import annotations

import pytest
from breadth import covering, sample
from core.driving import prompt, scheduled

from kvtier import ChunkedLocal, FullAttention, SlidingWindow

BT = 4
LENGTHS = [BT - 1, BT, BT + 1, 2 * BT - 1, 2 * BT, 2 * BT + 1]
GROUPS = {
    "full": {"full": (FullAttention(), BT)},
    "window": {"win": (SlidingWindow(BT + 1), BT)},
    "window of a block": {"win": (SlidingWindow(BT), BT)},
    "chunk": {"chunk": (ChunkedLocal(BT), BT)},
    "all": {"full": (FullAttention(), BT), "win": (SlidingWindow(6), BT), "chunk": (ChunkedLocal(2 * BT), BT)},
    "unequal blocks": {"full": (FullAttention(), BT), "win": (SlidingWindow(5), BT // 2)},
}
NEW_TOKENS = 7
PLACES = covering(GROUPS, [1, 4], LENGTHS, quick=[("all", 4, n) for n in LENGTHS])


def preempt_at(serving, length: int, generated: int, flood: int) -> None:
    """Runs request A up to ``length`` known tokens, ``generated`` of them its own, and preempts it there.

    The intruder's prompt fills all pools, so nothing of A is left on the device.
    """
    start = max(1, length - generated)
    serving.add("A", prompt(length, start), length - start + NEW_TOKENS)
    serving.steps_until(lambda: serving.is_running("A") and serving.known("A") == length)
    serving.add("intruder", prompt(99, flood), 1, priority=-1)
    while "intruder" not in serving.finished:
        serving.step()


@pytest.mark.parametrize(("groups", "generated", "length"), PLACES)
def test_d_preempted_at_a_block_multiple_and_recomputed(make_serving, groups, length, generated):
    serving = make_serving(GROUPS[groups], 8 if "unequal" not in groups else {"full": 8, "win": 8}, store="off")
    preempt_at(serving, length, generated, 8 * BT)
    done = serving.run()["A"]
    assert done.preemptions >= ("full" in GROUPS[groups])


@pytest.mark.parametrize(("groups", "generated", "length"), PLACES)
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_d_preempted_at_a_block_multiple_and_loaded_from_the_host(make_serving, groups, length, generated, store):
    serving = make_serving(GROUPS[groups], 8, 64, hold=[], store=store, verify="full")
    preempt_at(serving, length, generated, 8 * BT)
    done = serving.run()["A"]
    if groups in ("full", "all"):
        assert done.preemptions >= 1
        hit = (length - 1) // BT * BT
        moved = serving.cache.stats().transfers.loaded_blocks
        assert (moved > 0) == (hit > 0), "what was stored is loaded, not recomputed"


@pytest.mark.parametrize(("groups", "generated", "length"), PLACES)
def test_d_preempted_at_a_block_multiple_and_resumed_from_the_device(make_serving, groups, length, generated):
    serving = make_serving(GROUPS[groups], 16)
    start = max(1, length - generated)
    serving.add("A", prompt(length, start), length - start + NEW_TOKENS)
    serving.steps_until(lambda: serving.known("A") == length)
    serving.cancelled()
    step, ids = serving.begin()
    unit = serving.spec.hit_tokens
    assert scheduled(step) == {"A": length - (length - 1) // unit * unit}
    serving.end(step, ids)
    serving.run()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", LENGTHS)
def test_d_a_fully_cached_prompt_still_computes_a_token_and_writes_no_shared_block(make_serving, groups, length):
    serving = make_serving(GROUPS[groups], 16)
    serving.serve("first", prompt(1, length), 5)
    serving.add("again", prompt(1, length), 5)
    step, ids = serving.begin()
    unit = serving.spec.hit_tokens
    assert scheduled(step) == {"again": length - (length - 1) // unit * unit}
    serving.end(step, ids)
    serving.run()


@pytest.mark.parametrize("total", [2 * BT, 4 * BT])
def test_d_a_block_that_the_last_sampled_token_would_fill_is_not_published(make_serving, total):
    """The KV of a request's last token is never computed, so its block must not be found."""
    serving = make_serving(GROUPS["all"], 16)
    first = prompt(5, total - 3)
    text = serving.serve("first", first, 3).token_ids
    again = serving.serve("again", [*first, *text, 1], 3)
    assert sum(again.cached_tokens.values()) == total - BT


@pytest.mark.parametrize("budget", sample([1, 2, 3, 4, 5, 7, 8], [1, 3, 8]))
def test_d_chunks_of_prompt_may_end_anywhere(make_serving, budget):
    for length in (7, 8, 9, 15, 16, 17):
        serving = make_serving(GROUPS["all"], 16, scheduler={"max_batched_tokens": budget})
        serving.serve("A", prompt(length, length), 6)
