"""Whatever interrupts or breaks a call, the next one finds an empty, working engine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from runner import LLM
from runner.engine import Engine
from runner.interrupts import Interrupts
from runner.needle import weights_path
from runner.outputs import TextStream

from .interrupts import PARAMS, PROMPTS, interrupt


@pytest.fixture(scope="module")
def served() -> Iterator[LLM]:
    with LLM(weights_path(), "cpu", "1MiB", "1MiB", max_batched_tokens=48, max_running=3) as llm:
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_an_interrupt_at_any_bytecode_leaves_a_working_engine(served: LLM) -> None:
    """`python -m tests.served.interrupts` is the long run."""
    found = interrupt(served, PROMPTS, times=12, seed=0)
    assert found["interrupted"] >= 6


@pytest.mark.parametrize(
    ("where", "name"),
    [(TextStream, "finish"), (Engine, "_take"), (Engine, "_report"), (Engine, "_forward")],
)
@pytest.mark.parametrize("problem", [KeyboardInterrupt, RuntimeError])
def test_an_error_anywhere_leaves_a_working_engine(
    served: LLM, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, problem: type[BaseException]
) -> None:
    """An exception between commit and the last report made the drop of all requests spin for ever."""
    expected = tokens(served)
    old = getattr(where, name)

    def once(*args: Any) -> Any:
        monkeypatch.setattr(where, name, old)
        raise problem

    monkeypatch.setattr(where, name, once)
    with pytest.raises(problem):
        served.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert not served.engine.has_requests()
    assert tokens(served) == expected
    assert served.cache.audit() == []


def test_what_somebody_else_left_is_dropped_by_the_next_call(served: LLM) -> None:
    """A step under way and requests that nobody waits for: as if the drop itself had been interrupted."""
    expected = tokens(served)
    for request, params in [(served._request(prompt, PARAMS), PARAMS) for prompt in PROMPTS]:
        served.engine.add(request, params)
    served.scheduler.schedule()
    assert tokens(served) == expected


def test_a_signal_that_raises_takes_effect_at_once_in_a_forward(served: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, after = served.model.forward, []

    def pressed(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        logits = forward(*args)
        after.append("the forward went on")
        return logits

    monkeypatch.setattr(served.model, "forward", pressed)
    with pytest.raises(KeyboardInterrupt):
        served.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert after == []


# --- signals --------------------------------------------------------------------------------------


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """Numbers of the signals that a handler of the test has seen; the second of two raises."""
    seen = list[int]()

    def handler(number: int, _: Any) -> None:
        seen.append(number)
        if len(seen) == 2:
            raise TimeoutError("alarm")

    before = signal.signal(signal.SIGALRM, handler)
    yield seen
    signal.signal(signal.SIGALRM, before)


def test_signals_wait_until_they_are_allowed_and_none_is_lost(alarms: list[int]) -> None:
    interrupts, handler = Interrupts(), signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError), interrupts.held():
        signal.raise_signal(signal.SIGALRM)
        assert alarms == []
        with interrupts.allowed():
            assert len(alarms) == 1
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
        assert len(alarms) == 1
        with pytest.raises(TimeoutError), interrupts.allowed():
            raise AssertionError("a signal that waits comes first")
        assert len(alarms) == 2
        signal.raise_signal(signal.SIGALRM)
        with interrupts.allowed():
            assert len(alarms) == 4, "both that had waited"
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            raise AssertionError("a signal that waits comes first")
        alarms[:] = [0]
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_handler_that_is_put_there_meanwhile_stays(alarms: list[int]) -> None:
    interrupts = Interrupts()
    with interrupts.held():
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN


def test_other_threads_hold_nothing() -> None:
    interrupts, handlers = Interrupts(), []

    def call() -> None:
        with interrupts.held(), interrupts.allowed():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_times_count_from_the_call(served: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted from when the turn came: calls of four threads all looked as short as the last."""
    with served._turn:
        waiting = list[Any]()
        call = threading.Thread(target=lambda: waiting.extend(served.generate(PROMPTS, PARAMS, use_tqdm=False)))
        call.start()
        call.join(0.3)
    call.join()
    assert all(output.latency_s > 0.3 and output.ttft_s > 0.3 for output in waiting)
    assert len(waiting) == len(PROMPTS)
