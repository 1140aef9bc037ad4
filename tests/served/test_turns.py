"""Requests that share an event loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from runner import answers as answers_module
from runner.answers import Answer, Answers
from runner.logprobs import TokenLogprobs
from runner.sampling import SamplingParams
from runner.turns import LONGEST_S, RESTS, SHORT_S, Turn
from runner.words import Words


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
    request: Any = SimpleNamespace(request_id="a", eos_token_ids=())
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
