"""A request whose content was pushed out waits for room to spare, while others run."""

from __future__ import annotations

import numpy as np
import pytest

from core.driving import prompt, scheduled
from kvtier import FullAttention, SlidingWindow
from kvtier.coordinator import room
from kvtier.testing import canary_spec

FULL = canary_spec({"full": (FullAttention(), 4)})
BOTH = canary_spec({"full": (FullAttention(), 4), "near": (SlidingWindow(8), 4)})


@pytest.fixture
def served(make_serving):
    """ "lost" was served, and its content has gone; "runs" runs, in a pool of twenty blocks."""
    serving = make_serving(FULL, 20)
    serving.serve("before", prompt(0, 25), 1)
    serving.serve("other", prompt(1, 76), 1)
    serving.add("runs", prompt(2, 37), 12)
    serving.step()
    return serving


def test_it_waits_until_others_have_ended(served):
    served.add("lost", prompt(0, 25), 1)
    assert scheduled(served.step()) == {"runs": 1}
    assert served.scheduler.why_waiting()["lost"] == "full: needs 12, has 10"
    served.run()
    assert served.finished["lost"].finish_reason == "length"
    assert served.finished["runs"].preemptions == 0


def test_one_that_has_lost_nothing_does_not_wait(served):
    served.add("new", prompt(3, 25), 1)
    assert scheduled(served.step()) == {"runs": 1, "new": 25}
    served.run()


def test_one_that_comes_before_those_that_run_does_not_wait(served):
    served.add("lost", prompt(0, 25), 1, priority=-1)
    assert "lost" in scheduled(served.step())
    served.run()


def test_nobody_waits_if_nobody_runs(make_serving):
    serving = make_serving(FULL, 20)
    serving.serve("before", prompt(0, 70), 1)
    serving.serve("other", prompt(1, 76), 1)
    serving.add("lost", prompt(0, 70), 1)
    assert "lost" in scheduled(serving.step()), "18 blocks and a margin of 5 are more than there are"


@pytest.mark.usefixtures("unaudited")
def test_more_conversations_than_fit_find_more(make_serving, monkeypatch):
    """All of them are open all the time: each goes on as soon as its answer has ended."""

    def found(margin: int) -> int:
        monkeypatch.setattr(room, "MARGIN", margin)
        serving = make_serving(BOTH, {"full": 110, "near": 40}, scheduler={"max_running": 10, "audit_every": 100})
        texts, turn, tokens = [prompt(k, 36) for k in range(10)], dict.fromkeys(range(10), 0), 0
        for k in range(10):
            serving.add(f"{k} 0", texts[k], 4)
        while serving.scheduler.has_work():
            serving.step()
            for name in [name for name in serving.finished if name.endswith(f" {turn[int(name[0])]}")]:
                k, done = int(name[0]), serving.finished[name]
                tokens += sum(done.cached_tokens.values())
                texts[k] = [*texts[k], *done.token_ids, *prompt(100 * k + turn[k], 3)]
                turn[k] += 1
                if turn[k] < 6:
                    serving.add(f"{k} {turn[k]}", texts[k], 4)
        assert np.all(np.array([*turn.values()]) == 6)
        return tokens

    assert found(room.MARGIN) > 1.2 * found(0)
