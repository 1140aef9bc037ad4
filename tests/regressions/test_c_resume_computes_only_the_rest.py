"""Defect c: a preempted sequence that hits the prefix cache on resume is scheduled for too many tokens."""

from __future__ import annotations

import pytest
from core.driving import prompt, scheduled

from kvtier import ChunkedLocal, FullAttention, SlidingWindow


def kinds(bt: int):
    return {"full": (FullAttention(), bt), "win": (SlidingWindow(bt + 5), bt), "chunk": (ChunkedLocal(2 * bt), bt)}


@pytest.mark.parametrize("groups", [{"full": (FullAttention(), 256)}, kinds(256)])
def test_c_465_tokens_of_which_256_are_cached_are_scheduled_as_209(make_serving, groups):
    """464 prompt tokens and one of text; then the forward fails, which puts the request back as if preempted."""
    serving = make_serving(groups, 8, scheduler={"max_batched_tokens": 1024})
    serving.add("A", prompt(0, 464), 4)
    serving.step()
    assert scheduled(serving.cancelled()) == {"A": 1}
    step, ids = serving.begin()
    assert scheduled(step) == {"A": 209}
    assert step.positions.tolist() == list(range(256, 465))
    serving.end(step, ids)
    serving.run()


@pytest.mark.parametrize("groups", [{"full": (FullAttention(), 256)}, kinds(256)])
def test_c_a_prompt_of_465_tokens_cancelled_after_its_first_256(make_serving, groups):
    serving = make_serving(groups, 8, scheduler={"max_batched_tokens": 256})
    serving.add("A", prompt(0, 465), 2)
    assert scheduled(serving.step()) == {"A": 256}
    assert scheduled(serving.cancelled()) == {"A": 209}
    step, ids = serving.begin()
    assert scheduled(step) == {"A": 209}
    serving.end(step, ids)
    assert serving.run()["A"].preemptions == 1


@pytest.mark.parametrize("bt", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 65])
def test_c_a_resumed_request_computes_all_but_its_hit_for_any_length_and_block(make_serving, bt, length):
    serving = make_serving(kinds(bt), 160, scheduler={"max_batched_tokens": 256})
    serving.add("A", prompt(length, length), 3)
    serving.step()
    serving.cancelled()
    step, ids = serving.begin()
    known = length + 1
    hit = (known - 1) // bt * bt
    assert scheduled(step) == {"A": known - hit}
    serving.end(step, ids)
    serving.run()


def test_c_a_victim_of_a_real_preemption_resumes_after_its_hit(make_serving):
    serving = make_serving({"full": (FullAttention(), 256)}, 3, scheduler={"max_batched_tokens": 1024})
    serving.add("A", prompt(0, 464), 4)
    serving.step()
    serving.add("urgent", prompt(1, 300), 1, priority=-1)
    assert scheduled(serving.step()) == {"urgent": 300}
    step, ids = serving.begin()
    assert scheduled(step) == {"A": 209}
    serving.end(step, ids)
    assert serving.run()["A"].preemptions == 1
