"""Memory for a model's packed weights, one behind the other.

At the end of a weight what lies behind it is fetched: the next one. Small weights have pages of 2 MiB, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_CHUNK = 256 << 20
"""Bytes that weights share. Those that are not written take no memory."""
_ALIGNED = 16
"""Float32 numbers: 64 bytes."""


class _Room:
    """What is left of the current chunk. A chunk goes with its last weight."""

    def __init__(self) -> None:
        self.left = _new(0)

    def take(self, numbers: int) -> Tensor:
        size = -(-numbers // _ALIGNED) * _ALIGNED
        if size > len(self.left):
            self.left = _new(max(size, _CHUNK // 4))
        taken, self.left = self.left[:numbers], self.left[size:]
        return taken


_room: ContextVar[_Room | None] = ContextVar("room", default=None)


@contextmanager
def side_by_side() -> Iterator[None]:
    """Meanwhile this thread's weights get a room together, which ends with it."""
    before = _room.set(_Room())
    try:
        yield
    finally:
        _room.reset(before)


def place(numbers: int) -> Tensor:
    """Memory for so many float32 numbers, aligned to 64 bytes."""
    room = _room.get()
    return _new(numbers) if room is None else room.take(numbers)


def mark() -> Any:
    """Where the room is, for ``back_to``."""
    room = _room.get()
    return None if room is None else room.left


def back_to(marked: Any) -> None:
    """Gives back what was taken since ``mark``, which nobody uses any more."""
    room = _room.get()
    if room is not None:
        room.left = marked


def _new(numbers: int) -> Tensor:
    with torch.inference_mode(False):  # else nobody could write to it outside of that mode
        return torch.empty(numbers, dtype=torch.float32, device="cpu")
