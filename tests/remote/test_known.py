"""Names that are known to be stored, as somebody hears of them who may never listen."""

from __future__ import annotations

import random

import inside
import pytest

from kvtier.remote.known import Known
from kvtier.remote.objects import Name

MOST = 16


def name(i: int) -> Name:
    return "t", i.to_bytes(16, "big")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    monkeypatch.setattr("kvtier.remote.known.MOST_KNOWN", MOST)
    return Known(lambda: 0.0)


def stored(known: Known, i: int) -> None:
    known.add(name(i))
    known.confirm(name(i))


@pytest.mark.parametrize("heard_before", [False, True])
def test_a_listener_that_never_takes_its_changes_costs_no_more_than_what_is_known(
    known: Known, heard_before: bool
) -> None:
    changes = known.listen()
    for i in range(MOST):
        stored(known, i)
    believed = changes.take() if heard_before else {}
    for i in range(MOST, 100 * MOST):
        stored(known, i)
    assert inside.untold(changes) == (2 if heard_before else 1) * MOST
    believed |= changes.take()
    there = [name(i) for i in range(99 * MOST, 100 * MOST)]
    assert [each for each, is_there in believed.items() if is_there] == there
    assert heard_before or list(believed) == there


def test_changes_leave_exactly_what_is_known_however_seldom_they_are_taken(known: Known) -> None:
    rnd, changes, believed = random.Random(5), known.listen(), set[Name]()
    for _ in range(2000):
        i = rnd.randrange(2 * MOST)
        rnd.choice([lambda: known.add(name(i)), lambda: stored(known, i), lambda: known.forget(name(i))])()  # noqa: B023
        if rnd.random() < 0.1:
            for each, is_there in changes.take().items():
                (believed.add if is_there else believed.remove)(each)
            assert believed == inside.told_objects(known)
