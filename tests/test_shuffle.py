"""The order of tests can be drawn, and drawn again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import shuffle


@dataclass(frozen=True)
class Item:
    nodeid: str


ITEMS = [Item(f"tests/test_{module}.py::test_{k}") for module in "abcde" for k in range(6)]


def test_a_number_is_an_order_in_which_modules_stay_together() -> None:
    orders = [shuffle.shuffled(ITEMS, by) for by in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    for by, order in enumerate(orders):
        assert order == shuffle.shuffled(ITEMS[::-1], by)
        assert sorted(order, key=lambda item: item.nodeid) == ITEMS
        modules = [item.nodeid.partition("::")[0] for item in order]
        assert all(len(set(modules[k : k + 6])) == 1 for k in range(0, len(modules), 6))
    assert len({order[0].nodeid for order in orders}) > 10, "within a module, too"


def test_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shuffle.VARIABLE, "17")
    assert shuffle.seed() == 17
    monkeypatch.delenv(shuffle.VARIABLE)
    assert shuffle.seed() is None
    monkeypatch.setenv(shuffle.VARIABLE, "0x11")
    with pytest.raises(pytest.UsageError, match="0x11"):
        shuffle.seed()
