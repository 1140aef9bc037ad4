"""The order of tests: as the files have them, or drawn by the number in ``KVTIER_TESTS_SEED``, as ``make test`` does.

Modules are drawn, then the tests within each: what the tests of a module share is built once, as before.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, TypeVar

import pytest

VARIABLE = "KVTIER_TESTS_SEED"


class Placed(Protocol):
    """A test, as far as its place goes."""

    @property
    def nodeid(self) -> str:
        """``file::test[parameters]``."""


P = TypeVar("P", bound=Placed)


def seed() -> int | None:
    """What the order is drawn by; None leaves it. Workers of xdist inherit it."""
    given = os.environ.get(VARIABLE, "")
    if given and not given.isdecimal():
        raise pytest.UsageError(f"{VARIABLE} is {given!r}; it can be a whole number, or nothing for the files' order")
    return int(given) if given else None


def shuffled(items: Sequence[P], by: int) -> list[P]:
    """The same tests, in an order that hangs on ``by`` and on their names, not on the order that they come in."""
    modules = [list(of) for _, of in groupby(sorted(items, key=lambda item: item.nodeid), _module)]
    rnd = random.Random(by)
    rnd.shuffle(modules)
    for module in modules:
        rnd.shuffle(module)
    return [item for module in modules for item in module]


def _module(item: Placed) -> str:
    return item.nodeid.partition("::")[0]
