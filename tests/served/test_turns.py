"""Requests that share an event loop."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runner.api import turns
from runner.api.turns import LONGEST_S, RESTS, SHORT_S, OnTheSide, Turn
from runner.engine import answers as answers_module
from runner.engine.answers import Answer, Answers
from runner.engine.words import Words
from runner.sampling.logprobs import TokenLogprobs
from runner.sampling.params import SamplingParams


def test_who_takes_long_rests_afterwards() -> None:
    now = [0.0]
    turn = Turn(clock=lambda: now[0])
    for took_s, rest_s in ((0.5 * SHORT_S, 0.0), (0.01, RESTS * 0.01), (10.0, LONGEST_S), (0.0, 0.0)):
        with turn:
            now[0] += took_s
        assert abs(turn.rest_s - rest_s) < 1e-9


def test_a_token_is_decoded_once() -> None:
    asked: list[list[int]] = []

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            asked.append(ids)
            return f"<{ids[0]}>"

    words = Words(Tokenizer())
    assert [words.of(token) for token in (3, 5, 3, 3)] == ["<3>", "<5>", "<3>", "<3>"]
    assert asked == [[3], [5]]
    assert Words(None).of(3) is None


def test_a_turn_has_a_bound_and_answers_take_turns() -> None:
    """64 answers with 20 logprobs, of which 50 tokens have come: not all of that at once."""
    decoded: list[int] = []

    class Tokenizer:
        def decode(self, ids: list[int], **_: Any) -> str:
            decoded.extend(ids)
            return "x"

    params = SamplingParams(logprobs=20)
    request: Any = SimpleNamespace(request_id="a", eos_token_ids=(), tokens=np.arange(3))
    state: Any = SimpleNamespace(params=params)
    mail: Any = None
    rows = [Answer(i, request, state, mail, Words(Tokenizer()), None) for i in range(64)]
    for row in rows:
        row.stream.logprobs += [TokenLogprobs(np.arange(21), np.zeros(21), 1) for _ in range(50)]
        row.stream.tokens += list(range(50))
    answers = Answers("a", None, np.arange(3), rows, 0.0)
    thread: Any = None
    seen, turns = set[int](), 0
    while answers.has_more:
        before = sum(row.num_tokens for row in rows)
        seen |= {row.index for row in answers.advance(thread)}
        turns += 1
        assert 0 < (sum(row.num_tokens for row in rows) - before) * 21 <= answers_module.TURN_ENTRIES
        assert turns != 64 or len(seen) > 1, "one does not keep the others waiting"
    assert seen == set(range(64)) and all(row.num_tokens == 50 for row in rows)
    assert all(len(row.output(delta=True).logprobs or ()) == 50 for row in rows)


def test_logprobs_of_a_long_prompt_are_read_in_many_turns() -> None:
    """Of 20,000 tokens with 20 each: they took the loop for four seconds."""
    params, thread, mail = SamplingParams(prompt_logprobs=20), Any, Any
    request: Any = SimpleNamespace(request_id="a", eos_token_ids=(), tokens=np.arange(2000))
    state: Any = SimpleNamespace(params=params)
    row = Answer(0, request, state, mail, Words(None), None)
    row.stream.prompt_logprobs += [TokenLogprobs(np.arange(21), np.zeros(21), 1) for _ in range(1999)]
    row.stream.tokens.append(5)
    answers = Answers("a", None, np.arange(2000), [row], 0.0)
    turns = 0
    while row.prompt_logprobs() is None:
        assert answers.has_more and not answers.advance(thread)
        turns += 1
    assert turns >= 1999 * 21 // answers_module.TURN_ENTRIES
    assert [one and len(one) for one in row.prompt_logprobs() or ()] == [None] + [21] * 1999
    assert answers.advance(thread) == [row] and not answers.has_more


def test_calls_on_the_side_come_one_at_a_time_and_rest_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight who ask again and again take a fifth of the interpreter, not all of it."""
    clock, at_once, spans = [0.0], [0], list[tuple[float, float]]()
    monkeypatch.setattr(turns.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(turns, "Turn", lambda: Turn(clock=lambda: clock[0]))
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        clock[0] += seconds
        await sleep(0)

    monkeypatch.setattr(turns.asyncio, "sleep", slept)

    def work() -> int:
        at_once[0] += 1
        assert at_once[0] == 1
        spans.append((clock[0], clock[0] + 0.01))
        clock[0] += 0.01
        at_once[0] -= 1
        return len(spans)

    async def ask(side: OnTheSide) -> list[int]:
        return [await side.run(work) for _ in range(5)]

    async def main() -> list[list[int]]:
        side = OnTheSide()
        return await asyncio.gather(*(ask(side) for _ in range(8)))

    answers = asyncio.run(main())
    assert sorted(one for those in answers for one in those) == list(range(1, 41))
    assert all(after[0] - before[1] >= RESTS * 0.01 - 1e-9 for before, after in itertools.pairwise(spans))


def test_a_call_on_the_side_may_raise_and_the_next_goes_on() -> None:
    async def main() -> int:
        side = OnTheSide()
        with pytest.raises(ZeroDivisionError):
            await side.run(lambda: 1 // 0)
        return await side.run(lambda: 7)

    assert asyncio.run(main()) == 7
