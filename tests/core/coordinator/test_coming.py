"""Waiting requests: what they will hit stays warm."""

from __future__ import annotations

import pytest

from core.driving import Serving, prompt
from kvtier import CacheManager, FullAttention, Request, SlidingWindow
from kvtier.coordinator import coming
from kvtier.coordinator.sequence import Sequence
from kvtier.coordinator.step import Step
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)})


def found_after_others(serving: Serving) -> int:
    """Tokens that a request finds of its own text, if it waits while more than fits comes and goes."""
    text = prompt(0, 40)
    serving.serve("first", text, 1)
    serving.add("runs", prompt(1, 30), 40)
    serving.steps_until(lambda: serving.known("runs") > 30)
    for k in range(3):
        serving.add(f"before it {k}", prompt(2 + k, 40), 1)
    serving.add("waits", text, 1)
    serving.run()
    return sum(serving.finished["waits"].cached_tokens.values())


@pytest.mark.parametrize("host", [None, {"full": 34, "near": 40}])
def test_what_is_admitted_before_it_does_not_push_it_out(make_serving, monkeypatch, host) -> None:
    def found() -> int:
        room = {"full": 34, "near": 40}
        tiers = [room] if host is None else [{"full": 24, "near": 16}, host]
        return found_after_others(make_serving(SPEC, *tiers, scheduler={"max_running": 1}, hold=[]))

    assert found() == 36
    monkeypatch.setattr(coming.Coming, "_touch", lambda self, requests: None)
    assert found() < 36


def test_a_long_queue_costs_a_step_a_bounded_number_of_looks(make_serving, monkeypatch) -> None:
    monkeypatch.setattr(coming, "MOST_TOKENS", 100)
    serving = make_serving(SPEC, {"full": 100, "near": 40}, scheduler={"max_running": 1})
    serving.add("runs", prompt(1, 30), 40)
    serving.steps_until(lambda: serving.known("runs") > 30)
    for k in range(20):
        serving.add(f"{k}", prompt(0, 40), 1)
    serving.step()
    assert [seq.is_warm for seq in serving.scheduler.waiting] == [True] * 3 + [False] * 17


def test_what_other_sequences_of_an_engine_take_does_not_push_it_out(make_cache, monkeypatch) -> None:
    """The engine schedules by itself: a sequence that is open waits."""

    def found() -> int:
        cache = make_cache(SPEC, {"full": 34, "near": 40})
        manager, text = CacheManager(cache, 64, 2), prompt(0, 40)
        served(manager, manager.open(Request("first", text, 1)))
        waits = manager.open(Request("waits", text, 1))
        for k in range(5):
            served(manager, manager.open(Request(f"before it {k}", prompt(2 + k, 40), 1)))
        hit = manager.match(waits).num_tokens
        for sequence in list(manager._sequences.values()):
            manager.close(sequence, "abort")
        cache.close()
        return hit

    assert found() == 36
    monkeypatch.setattr(coming.Coming, "_touch", lambda self, requests: None)
    assert found() < 36


def served(manager: CacheManager, sequence: Sequence) -> None:
    assert manager.start(sequence) is None
    step = manager.plan([(sequence, sequence.num_tokens)])
    assert isinstance(step, Step), step
    assert len(manager.commit(step, [1])) == 1
