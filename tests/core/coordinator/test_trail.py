"""What a prompt that finds less is told of the texts before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvtier import CacheSpec, FullAttention, GroupSpec, SlidingWindow
from kvtier.coordinator import trail
from kvtier.coordinator.match import Match
from kvtier.coordinator.trail import Mark, Trail
from kvtier.geometry.keys import KeyArray
from kvtier.machine.journal import Gap

SPEC = CacheSpec(
    [
        GroupSpec("full", FullAttention(), 1, 1, 16, block_tokens=8, dtype="bfloat16"),
        GroupSpec("near", SlidingWindow(8), 1, 1, 16, block_tokens=4, dtype="bfloat16"),
    ]
)
NOTHING = Match(0, 0, *np.zeros((2, 2), np.int64), *np.zeros((2, 0), np.int32), False)


def keys(tokens: list[int]) -> KeyArray:
    """Names of the beginnings of a text, one each 4 tokens."""
    return np.array([[len(tokens[:n]), hash(tuple(tokens[:n])) % 2**64] for n in range(4, len(tokens) + 1, 4)],
                    np.uint64).reshape(-1, 2)  # fmt: skip


def hit(tokens: int, full: int, group: str = "near") -> Match:
    return replace(NOTHING, num_tokens=tokens, full_tokens=full, limited_by=group)


def text(number: int, tokens: int) -> list[int]:
    return [1000 * number + k for k in range(tokens)]


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_who_goes_on_from_a_marked_end_is_told_that_it_was_there(units: int, there: int, more: int) -> None:
    known, there = Trail(SPEC), min(there, units - 1)
    known.mark(keys(text(0, 8 * units)), 8 * units, Mark(7, "answer", True))
    asked = text(0, 8 * units) + text(1, 8 * more + 1)
    found = known.gaps(keys(asked), len(asked), hit(8 * there, 8 * there, "full"))
    gone, *parted = found
    assert gone == Gap(8 * there, 8 * units, "pushed_out", "full", "answer", 7)
    assert parted == ([Gap(8 * units, 8 * (units + more), "parted", "", "", 0)] if more else [])


@given(st.integers(0, 20), st.integers(1, 20))
def test_what_nobody_has_sent_is_no_loss(there: int, more: int) -> None:
    known = Trail(SPEC)
    known.mark(keys(text(0, 8 * there)), 8 * there, Mark(7, "prompt", True))
    asked = text(0, 8 * there) + text(1, 8 * more + 3)
    gaps = known.gaps(keys(asked), len(asked), hit(8 * there, 8 * there, "full"))
    assert gaps == (Gap(8 * there, 8 * (there + more), "parted", "", "", 0),)


@pytest.mark.parametrize(
    ("mark", "why", "ended"),
    [
        (Mark(3, "answer", False), "not_kept", "answer"),
        (Mark(3, "answer", True), "pushed_out", "answer"),
        (Mark(3, "parting", True), "pushed_out", "parting"),
        (None, "not_kept", ""),
    ],
)
def test_what_full_attention_has_was_kept_or_not(mark: Mark | None, why: str, ended: str) -> None:
    known, asked = Trail(SPEC), text(0, 41)
    if mark is not None:
        known.mark(keys(asked), 24, mark)
    gone, parted = known.gaps(keys(asked), 41, hit(8, 24))
    assert gone == Gap(8, 24, why, "near", ended, 3 if mark else 0)
    assert parted == Gap(24, 40, "parted", "", "", 0)


def test_a_whole_hit_leaves_no_gap() -> None:
    known, asked = Trail(SPEC), text(0, 24)
    known.mark(keys(asked), 24, Mark(1, "prompt", True))
    assert known.gaps(keys(asked), 24, hit(16, 16, "")) == (), "the last token is always computed"
    assert known.gaps(keys(text(0, 5)), 5, NOTHING) == ()


def test_of_two_losses_each_has_its_group() -> None:
    known, asked = Trail(SPEC), text(0, 41)
    known.mark(keys(asked), 16, Mark(2, "prompt", True))
    known.mark(keys(asked), 40, Mark(4, "answer", True))
    assert known.gaps(keys(asked), 41, hit(8, 16)) == (
        Gap(8, 16, "pushed_out", "near", "prompt", 2),
        Gap(16, 40, "pushed_out", "full", "answer", 4),
    )


def test_where_what_is_left_of_a_text_ends_is_no_end() -> None:
    known, asked = Trail(SPEC), text(0, 41)
    known.mark(keys(asked), 40, Mark(4, "answer", True))
    assert known.gaps(keys(asked), 41, hit(8, 16)) == (Gap(8, 40, "pushed_out", "full", "answer", 4),)


def test_an_end_that_was_kept_stays_one_though_a_later_end_there_is_not() -> None:
    known, asked = Trail(SPEC), text(0, 41)
    known.mark(keys(asked), 16, Mark(2, "prompt", True))
    known.mark(keys(asked), 16, Mark(5, "answer", False))
    known.mark(keys(asked), 24, Mark(6, "answer", False))  # passes it
    gone, _ = known.gaps(keys(text(0, 17) + text(1, 8)), 25, hit(8, 16))
    assert gone == Gap(8, 16, "pushed_out", "near", "prompt", 6)


def test_a_text_that_passes_an_end_does_not_hide_it() -> None:
    known, asked = Trail(SPEC), text(0, 41)
    known.mark(keys(asked), 16, Mark(2, "answer", False))
    known.mark(keys(asked), 24, Mark(6, "prompt", True))
    gone, _ = known.gaps(keys(text(0, 17) + text(1, 8)), 25, hit(8, 16))
    assert gone == Gap(8, 16, "not_kept", "near", "answer", 6)


def test_the_marks_that_were_made_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "MOST", 8)
    known = Trail(SPEC)
    for n in range(50):
        known.mark(keys(text(n, 8)), 8, Mark(n, "prompt", True))
    whys = [known.gaps(keys(text(n, 9)), 9, NOTHING)[0].why for n in range(50)]
    assert whys == ["parted"] * 42 + ["pushed_out"] * 8
    known.clear()
    assert known.gaps(keys(text(49, 9)), 9, NOTHING)[0].why == "parted"
