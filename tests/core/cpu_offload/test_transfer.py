"""The transfer's table: every arrow of its diagram, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier import TransferError
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState

ARROWS = {
    ("planned", "in flight"),
    ("planned", "settled"),
    ("in flight", "landed"),
    ("in flight", "failed"),
    ("in flight", "expired"),
    ("landed", "settled"),
    ("failed", "settled"),
    ("expired", "settled"),
}


def transfer(state: TransferState) -> Transfer:
    ids = np.ones(1, np.int32)
    return Transfer(1, Direction.STORE, ids, ids, ids, np.ones((1, 2), np.uint64), 16, 0, state=state)


@pytest.mark.parametrize("start", TransferState)
@pytest.mark.parametrize("end", TransferState)
def test_a_transfer_moves_along_its_arrows_only(start, end):
    t = transfer(start)
    if (start.value, end.value) in ARROWS:
        t.move(end)
        assert t.state is end
    else:
        with pytest.raises(TransferError, match=f"{start.value} to {end.value}"):
            t.move(end)
        assert t.state is start


def test_a_planned_transfer_has_no_deadline():
    assert transfer(TransferState.PLANNED).deadline_s == float("inf")
