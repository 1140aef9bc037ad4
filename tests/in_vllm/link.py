"""A copy engine that does what a scenario tells it: the ``copy_engine`` of every engine here."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.transfer import Direction, Transfer

Copies = Callable[[Transfer], Outcome]
Manner = Callable[[Copies, Transfer], Outcome]
"""How a copy is made: it is given the plain copy."""


class Link:
    """Makes the copy engine, and says how it copies. As a factory it goes to ``copy_engine``."""

    def __init__(self) -> None:
        self.engine: Obeying | None = None
        self.manner: dict[Direction, Manner] = {}
        self.orders = True
        """Whether ``order_after`` waits, as it must."""
        self.num_waits = 0
        """Calls of ``order_after`` that had to wait."""
        self.stored: list[tuple[int, int]] = []
        """(fragment, host block) of each copy to the host tier, since ``forget``."""

    def __call__(self, memory: Any) -> Obeying:
        self.engine = Obeying(memory, self)
        return self.engine

    @property
    def memory(self) -> Any:
        """The bytes, by fragments."""
        assert self.engine is not None
        return self.engine.memory

    def damage(self, every: int) -> int:
        """All numbers in each ``every``-th part of the host tier are NaN or infinite; how many parts these are."""
        chosen = sorted(set(self.stored))[::every]
        for fragment, block in chosen:
            blow_up(self.memory, fragment, block)
        return len(chosen)

    def flip_signs(self) -> None:
        """One in each part of the host tier: the numbers stay numbers."""
        host = self.memory.arenas[1]
        for fragment, block in set(self.stored):
            at = int(host.origins[fragment] + block * host.strides[fragment])
            host.bytes[at + int(host.block_bytes[fragment]) // 2 + 3] ^= 0x80

    @contextmanager
    def doing(self, loads: Manner | None = None, stores: Manner | None = None, orders: bool = True) -> Iterator[None]:
        """Copies are made in another manner meanwhile."""
        given = {Direction.LOAD: loads, Direction.STORE: stores}
        self.manner = {direction: manner for direction, manner in given.items() if manner is not None}
        self.orders = orders
        try:
            yield
        finally:
            self.manner, self.orders = {}, True


def blow_up(memory: Any, fragment: int, block: int) -> None:
    """All numbers of a part of a host block are NaN or infinite."""
    host = memory.arenas[1]
    at = int(host.origins[fragment] + block * host.strides[fragment])
    host.bytes[at : at + int(host.block_bytes[fragment])].view(np.uint16)[:] |= 0x7F80


class Obeying(ThreadsEngine):
    """``threads``, in the manner of its link."""

    def __init__(self, memory: Any, link: Link) -> None:
        super().__init__(memory)
        self._link = link

    def order_after(self, tickets: Any, timeout_s: float) -> bool:
        if not self._link.orders:
            return True
        self._link.num_waits += not super().order_after(tickets, 0.0)
        return super().order_after(tickets, timeout_s)

    def _copy(self, transfer: Transfer) -> Outcome:
        if transfer.direction is Direction.STORE:
            self._link.stored += zip(transfer.groups.tolist(), transfer.host.tolist(), strict=True)
        manner = self._link.manner.get(transfer.direction)
        return super()._copy(transfer) if manner is None else manner(super()._copy, transfer)


class Held:
    """Copies begin only after ``release``."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self.begun = 0
        self.ended = 0

    def __call__(self, copy: Copies, transfer: Transfer) -> Outcome:
        self.begun += 1
        assert self._released.wait(120), "nobody has released the copies"
        outcome = copy(transfer)
        self.ended += 1
        return outcome

    def release(self) -> None:
        """They go on."""
        self._released.set()


def late(seconds: float) -> Manner:
    """Each copy reads its source only after so many seconds."""

    def manner(copy: Copies, transfer: Transfer) -> Outcome:
        time.sleep(seconds)
        return copy(transfer)

    return manner


def noise(memory: Any) -> Manner:
    """A load that brings noise instead of the stored bytes, and says that all went well."""
    rnd = np.random.default_rng(0)

    def manner(copy: Copies, transfer: Transfer) -> Outcome:
        outcome = copy(transfer)
        device = memory.arenas[0]
        first = device.origins[transfer.groups] + transfer.device * device.strides[transfer.groups]
        for at, size in zip(first.tolist(), device.block_bytes[transfer.groups].tolist(), strict=True):
            device.bytes[at : at + size].view(np.float32)[:] = rnd.standard_normal(size // 4, np.float32)
        return outcome

    return manner


class Unlucky:
    """A part of the copies fails, is torn, damages what is stored, or hangs for ``hang_s`` seconds."""

    def __init__(self, memory: Any, seed: int, chance: float, hang_s: float) -> None:
        self._memory, self._random, self._chance, self._hang_s = memory, random.Random(seed), chance, hang_s
        self.counts: Counter[str] = Counter()

    def __call__(self, copy: Copies, transfer: Transfer) -> Outcome:
        fates = ("fail", "tear", "corrupt", "hang")
        fate = self._random.choice(fates) if self._random.random() < self._chance else "ok"
        self.counts[fate] += 1
        if fate == "fail":
            return Outcome(transfer.ticket, "planted: failed")
        if fate == "tear":
            chosen = np.arange(len(transfer.groups)) % 2 == 0
            self._memory.copy_some(transfer, chosen)
            return Outcome(transfer.ticket, "planted: torn")
        if fate == "hang":
            time.sleep(self._hang_s)
        outcome = copy(transfer)
        if fate == "corrupt" and transfer.direction is Direction.STORE:
            k = self._random.randrange(len(transfer.groups))
            blow_up(self._memory, int(transfer.groups[k]), int(transfer.host[k]))
        return outcome
