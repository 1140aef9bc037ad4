"""Requests that share an event loop."""

from __future__ import annotations

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
