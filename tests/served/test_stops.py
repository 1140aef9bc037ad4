"""Stop strings in texts that grow, against plain searching."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier import InvalidRequest
from runner import SamplingParams
from runner.engine.stops import START, StopStrings
from runner.sampling.params import MOST_STOP_LETTERS


def first_end(text: str, strings: list[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends; of several the longest."""
    for end in range(1, len(text) + 1):
        if here := [string for string in strings if text[:end].endswith(string)]:
            return end, max(here, key=len)
    return None


def begun(text: str, strings: list[str]) -> int:
    """Letters at the end that a stop string begins with, and goes on from."""
    starts = {string[:k] for string in strings for k in range(1, len(string))}
    return max((k for k in range(1, len(text) + 1) if text[-k:] in starts), default=0)


def test_the_first_string_to_be_complete_ends_the_text() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        strings = ["".join(rng.choice(["a", "b"], rng.integers(1, 5))) for _ in range(rng.integers(1, 5))]
        stops, place, text = StopStrings(strings), START, ""
        for size in rng.integers(0, 4, 6).tolist():
            piece = "".join(rng.choice(["a", "b", "c"], size, p=[0.45, 0.45, 0.1]))
            place, read, found = stops.follow(place, piece, search=True)
            text += piece[:read]
            if found is not None:
                break
            assert stops.held[place] == begun(text, strings), (strings, text)
        assert first_end(text, strings) == (None if found is None else (len(text), found)), (strings, text)


def test_what_is_not_searched_is_not_found_but_may_be_a_beginning() -> None:
    stops = StopStrings(["ab", "bc"])
    place, read, found = stops.follow(START, "xab", search=False)
    assert (read, found, stops.held[place]) == (3, None, 1)
    assert stops.follow(place, "c", search=True)[1:] == (1, "bc")


class Counted(list):
    """Counts what is looked at."""

    looks = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("strings", [["ab" * 32 + str(i % 10) + str(i // 10) for i in range(60)], ["ab" * 2000 + "!"]])
def test_a_letter_costs_the_same_however_much_there_is_to_look_for(strings: list[str]) -> None:
    stops, place = StopStrings(strings), START
    stops._next = looked = Counted(stops._next)
    for _ in range(3000):
        place, _, found = stops.follow(place, "ab", search=True)
        assert found is None and stops.held[place]
    assert looked.looks <= 5 * 6000


def test_all_stop_strings_together_have_a_bound() -> None:
    SamplingParams(stop=["a" * (MOST_STOP_LETTERS - 1), "b"])
    with pytest.raises(InvalidRequest, match="stop must have at most 4,096 letters in all, got 4097"):
        SamplingParams(stop=["a" * MOST_STOP_LETTERS, "b"])
