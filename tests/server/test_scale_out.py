"""The figures of ``make scale-out``, from turns made by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.scale_out.__main__ import _agree, _figures
from benchmarks.scale_out.talk import Talks, Turn

TURN: dict[str, Any] = {"prompt_tokens": 100, "cached_tokens": 0, "could_be_cached": 0, "answer": "", "seconds": 1.0}


def turn(conversation: int, number: int, engine: str, began_s: float, home: str | None = None, **more: Any) -> Turn:
    return Turn(**(TURN | {"conversation": conversation, "number": number, "engine": engine, "home": home} | more),
                began_s=began_s, failures=0)  # fmt: skip


def test_a_turn_is_at_home_where_the_turn_before_was_served_and_nowhere_else() -> None:
    turns = [
        turn(0, 1, "a", 0.0),
        turn(1, 1, "b", 0.0),
        turn(0, 2, "a", 2.0, "a", could_be_cached=96, cached_tokens=96),
        turn(1, 2, "a", 4.0, "b", could_be_cached=96),  # nobody else was being served
        turn(0, 3, "b", 4.5, "a", could_be_cached=192),  # conversation 1 was being served at home
        turn(1, 3, "a", 9.0, "a", could_be_cached=192, cached_tokens=192),
    ]
    found = _figures(turns, Talks("http://nowhere"))
    assert (found["turns"], found["later_turns"], found["at_home"]) == (6, 4, 0.5)
    assert (found["away_from_load"], found["away_otherwise"]) == (1, 1)
    assert found["cached_share"] == 0.5
    assert found["first_turns"] == {"a": 1, "b": 1}


def test_answers_that_the_engines_metrics_do_not_confirm_are_seen() -> None:
    turns = [turn(0, 1, "a", 0.0), turn(0, 2, "a", 2.0, "a", cached_tokens=96)]
    told = {"a": {"requests": 2.0, "prompt_tokens": 200.0, "cached_tokens": 96.0},
            "b": {"requests": 0.0, "prompt_tokens": 0.0, "cached_tokens": 0.0}}  # fmt: skip
    assert _agree(turns, told)["metrics_agree"]
    for name, wrong in (("requests", 3.0), ("prompt_tokens", 300.0), ("cached_tokens", 80.0)):
        assert not _agree(turns, told | {"a": told["a"] | {name: wrong}})["metrics_agree"]
