"""Which boundaries are wanted again: what is cold when its request moves on, and when."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.coordinator.wanted import DOUBT, RARELY, RECENT, Wanted


def boundary(n: int) -> np.ndarray:
    return np.array([n, ~n], np.int64).view(np.uint64)


def test_hits_that_are_not_repeated_go_cold_once_there_are_enough_of_them():
    wanted, enough = Wanted(), DOUBT
    assert [wanted.hit(boundary(n)) for n in range(enough + 2)] == [False] * enough + [True] * 2
    assert not wanted.hit(boundary(enough + 1)), "a hit that is repeated"


def test_hits_that_are_repeated_stay_hot():
    wanted = Wanted()
    for n in range(RECENT):
        assert not wanted.hit(boundary(n))
        assert not wanted.hit(boundary(n))


def test_a_boundary_where_prompts_part_is_wanted_by_others():
    wanted = Wanted()
    for n in range(RECENT):
        wanted.hit(boundary(n))
    wanted.share(boundary(RECENT))
    assert not wanted.hit(boundary(RECENT))
    assert wanted.hit(boundary(RECENT + 1))


def test_what_is_rare_follows_the_last_hits():
    """Old hits count for less and less: after long repetition it takes a while, but no longer than the memory."""
    wanted = Wanted()
    for n in range(20):
        for _ in range(RECENT):
            wanted.hit(boundary(n))
    cold = [wanted.hit(boundary(1000 + n)) for n in range(2 * RARELY * RECENT)]
    assert not cold[0]
    assert all(cold[RARELY * RECENT :])


def test_only_the_last_boundaries_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvtier.coordinator.wanted.MOST", 8)
    wanted = Wanted()
    for n in range(RECENT):
        wanted.hit(boundary(n))
    assert wanted.hit(boundary(0)), "forgotten long ago"
    assert not wanted.hit(boundary(0))
    assert len(wanted._hits) == 8
