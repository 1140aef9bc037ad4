"""Whatever interrupts or breaks a call, the next one finds an empty, working engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from runner import LLM, EngineDead, SamplingParams
from runner.engine.answers import Answer, Answers
from runner.engine.streams import ThreadMail
from runner.needle import weights_path

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


@pytest.mark.parametrize("problem", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(("where", "name"), [(Answer, "advance"), (Answers, "output"), (ThreadMail, "get")])
def test_an_error_anywhere_leaves_a_working_engine(
    served: LLM, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, problem: type[BaseException]
) -> None:
    expected = tokens(served)
    old = getattr(where, name)

    def once(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(where, name, old)
        raise problem

    monkeypatch.setattr(where, name, once)
    with pytest.raises(problem):
        served.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert tokens(served) == expected
    served.settle()
    assert not served.engine.has_requests()
    assert served.audit() == []


def test_a_forward_that_raises_ends_its_own_requests_with_it(served: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, forward = tokens(served), served.model.forward

    def once(*args: Any) -> Any:
        monkeypatch.setattr(served.model, "forward", forward)
        raise MemoryError("no room")

    monkeypatch.setattr(served.model, "forward", once)
    with pytest.raises(MemoryError, match="no room"):
        served.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert tokens(served) == expected


def test_what_nobody_holds_any_more_is_aborted(served: LLM) -> None:
    """As if the abort in ``generate`` had been interrupted too."""
    given, mail = served.inputs.read(PROMPTS[0]), ThreadMail()
    params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
    answers = served._submit(given, *served._requests(given, params, None), mail, 0.0)
    served.thread.call(lambda: None).result()
    assert served.engine.has_requests()
    request_id, before = answers.request_id, served.engine.generated_tokens
    del answers
    served.settle()
    assert request_id not in served.scheduler.request_ids
    assert served.engine.generated_tokens - before < 1500, "it went on to its end"


def test_an_engine_that_dies_says_so_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(weights_path(), "cpu", "1MiB", 0, max_batched_tokens=48, max_running=3) as llm:
        monkeypatch.setattr(llm.scheduler, "commit", lambda *_: 1 / 0)
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_calls_of_several_threads_are_served_together(served: LLM) -> None:
    expected, found = tokens(served), []
    threads = [threading.Thread(target=lambda: found.append(tokens(served))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_times_count_from_the_call(served: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted from when the engine's turn came: calls of four threads all looked as short as the last."""
    earlier = SimpleNamespace(perf_counter=lambda: time.perf_counter() - 1000.0)
    monkeypatch.setattr("runner.api.llm.time", earlier)  # the clock of the call
    outputs = served.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all(output.latency_s >= output.ttft_s > 1000.0 for output in outputs)


def test_a_stream_that_is_told_once_more_after_its_end_is_passed_over(
    served: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread sets an end, and its consumer may see that before it is told of it."""
    get, again = ThreadMail.get, []

    def twice(mail: ThreadMail, timeout_s: float) -> Any:
        stream = again.pop() if again else get(mail, timeout_s)
        if stream is not None and stream.end is not None and stream not in seen:
            seen.add(stream)
            again.append(stream)
        return stream

    seen: set[Any] = set()
    monkeypatch.setattr(ThreadMail, "get", twice)
    assert len(tokens(served)) == len(PROMPTS)
