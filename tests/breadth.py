"""How much the tests try: ``make test`` a part of each kind, ``make test-all`` (``KVTIER_TESTS=all``) the whole.

A test that is left to ``make test-all`` has the mark ``breadth``; `conftest.py` leaves it out and counts it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

LANES = ("quick", "all")
LANE = os.environ.get("KVTIER_TESTS", "quick")
if LANE not in LANES:
    raise pytest.UsageError(f"KVTIER_TESTS is {LANE!r}; it can be {' or '.join(LANES)}")

breadth = pytest.mark.breadth
"""On a test or a parameter: only ``make test-all`` runs it."""


def sized(quick: T, everything: T) -> T:
    """A number of examples, steps or tokens, by lane."""
    return everything if LANE == "all" else quick


AUDITED_WHOLLY = 4
AUDITED_THEN = sized(16, 1)
"""Of a cache's schedules, commits and cancels: the first ones, and each sixteenth one after them. Between them
``make test`` checks the counters alone, ``make test-all`` everything."""


def sample(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters: ``values``, of which those that are not in ``quick`` have the mark.

    A value that is a tuple stands for several parameters.
    """
    found = list(values)
    missing = [value for value in quick if value not in found]
    assert not missing, f"no such values: {missing}"
    return [pytest.param(*_row(value), marks=() if value in quick else breadth) for value in found]


def covering(*each: Iterable[Any], quick: Collection[tuple[Any, ...]] = ()) -> list[Any]:
    """Parameters: all combinations, one value of each argument; those without the mark have every value once at least.

    A value that is a tuple stands for several parameters. ``quick``: more combinations without the mark.
    """
    columns = [list(values) for values in each]
    longest = max(len(column) for column in columns)
    unmarked = {tuple(i % len(column) for column in columns) for i in range(longest)}
    found = []
    for places in itertools.product(*(range(len(column)) for column in columns)):
        values = tuple(column[place] for column, place in zip(columns, places, strict=True))
        row = itertools.chain.from_iterable(map(_row, values))
        found.append(pytest.param(*row, marks=() if places in unmarked or values in quick else breadth))
    return found


def _row(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
