"""The ``simulated`` copy engine: deterministic, seeded, and as unkind as allowed.

Owns       a clock that only polls and waits move, and the copies under way.
Promises   the same seed and calls give the same run. Copies end late and out of order; they read their source when
           they are issued or only when they complete; by choice they fail, tear, or never end. An operation that
           overlaps one under way without an order between them is reported in ``missing_edges``, be it another copy
           or a forward pass that was told by ``compute``.
Does not   run threads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer


@dataclass(frozen=True)
class Faults:
    """Chances, each 0..1 per transfer, and delays in seconds of the simulated clock (one poll is one second)."""

    fail: float = 0.0
    """Ends with an error; nothing was copied."""
    tear: float = 0.0
    """Ends with an error; half of the blocks were copied."""
    corrupt: float = 0.0
    """A load that flips one bit and does not know it; only ``verify="full"`` sees it."""
    lose: float = 0.0
    """Never ends."""
    max_delay_s: float = 3.0


@dataclass(slots=True)
class _Copy:
    transfer: Transfer
    ends_at_s: float
    fate: str  # "ok" or the name of a fault
    early: bool  # reads its source at issue rather than at completion


class SimulatedEngine:
    """Pass ``lambda memory: SimulatedEngine(memory, seed=...)`` as ``copy_engine``."""

    def __init__(self, memory: TierMemory, seed: int = 0, faults: Faults | None = None) -> None:
        self._memory = memory
        self._random = random.Random(seed)
        self._faults = faults or Faults()
        self._now = 0.0
        self._under_way: dict[int, _Copy] = {}
        self._ended: list[Outcome] = []
        self.missing_edges: list[str] = []

    def submit(self, transfer: Transfer) -> None:
        self._check_order(transfer)
        names = ("fail", "tear", "corrupt", "lose")
        chances = [getattr(self._faults, name) for name in names]
        fate = self._random.choices([*names, "ok"], [*chances, max(0.0, 1.0 - sum(chances))])[0]
        if fate == "corrupt" and transfer.direction is Direction.STORE:
            fate = "ok"
        delay = float("inf") if fate == "lose" else self._random.uniform(0.0, self._faults.max_delay_s)
        copy = _Copy(transfer, self._now + delay, fate, self._random.random() < 0.5)
        if copy.early and fate in ("ok", "corrupt"):
            copy.fate = self._move(copy)
        self._under_way[transfer.ticket] = copy

    def _check_order(self, new: Transfer) -> None:
        """Reports two copies under way on the same block where one of them writes it."""
        for old in self._under_way.values():
            for tier, writes in (("host", Direction.STORE), ("device", Direction.LOAD)):
                if writes not in (new.direction, old.transfer.direction):
                    continue
                a = set(zip(new.groups.tolist(), getattr(new, tier).tolist(), strict=True))
                b = set(zip(old.transfer.groups.tolist(), getattr(old.transfer, tier).tolist(), strict=True))
                if a & b:
                    self.missing_edges.append(
                        f"{new.direction.value} {new.ticket} and {old.transfer.direction.value} {old.transfer.ticket} "
                        f"are under way on {tier} blocks {sorted(a & b)}"
                    )

    def compute(self, reads: set[tuple[int, int]], writes: set[tuple[int, int]]) -> None:
        """A forward pass reads and writes these device blocks, (group index, block id), now.

        Reports a read of what a load under way still writes (edge 3), and a write to what a copy under way still
        reads or writes (edges 2 and 4): whatever has been ordered has ended by now.
        """
        for copy in self._under_way.values():
            t = copy.transfer
            blocks = set(zip(t.groups.tolist(), t.device.tolist(), strict=True))
            touched = (reads | writes) if t.direction is Direction.LOAD else writes
            if blocks & touched:
                self.missing_edges.append(
                    f"{t.direction.value} {t.ticket} is under way on device blocks {sorted(blocks & touched)}, which a "
                    "forward touches"
                )

    def _move(self, copy: _Copy) -> str:
        bad = self._memory.copy(copy.transfer)
        if copy.fate == "corrupt":
            self._memory.flip_device_bit(copy.transfer, self._random.randrange(len(copy.transfer.groups)))
            bad = self._memory.check(copy.transfer)
        return "bad" if len(bad) else "done"

    def poll(self) -> Sequence[Outcome]:
        self._now += 1.0
        ready = sorted((c for c in self._under_way.values() if c.ends_at_s <= self._now), key=lambda c: c.ends_at_s)
        for copy in ready:
            self._end(copy)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, copy: _Copy) -> None:
        transfer = copy.transfer
        del self._under_way[transfer.ticket]
        if copy.fate in ("ok", "corrupt"):
            copy.fate = self._move(copy)
        if copy.fate == "tear":
            half = np.arange(len(transfer.groups)) < (len(transfer.groups) + 1) // 2
            self._memory.copy_some(transfer, half)
        errors = {"fail": "simulated failure", "tear": "simulated torn copy", "bad": "checksum mismatch"}
        bad = self._memory.check(transfer) if copy.fate == "bad" else None
        self._ended.append(Outcome(transfer.ticket, errors.get(copy.fate, ""), bad))

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        """Time passes until the copies have ended; a lost one makes ``timeout_s`` pass instead."""
        copies = [self._under_way[t] for t in tickets if t in self._under_way]
        last = max((c.ends_at_s for c in copies), default=self._now)
        if last > self._now + timeout_s:
            self._now += timeout_s
            return False
        self._now = max(self._now, last)
        for copy in copies:
            self._end(copy)
        return True

    def wait(self, timeout_s: float) -> bool:
        return bool(self._ended)

    def wake(self) -> None:
        """Nobody sleeps here."""

    def now(self) -> float:
        return self._now

    def end_lost(self) -> None:
        """Lost copies end after all (with an error), as late ones may on a real link."""
        for copy in self._under_way.values():
            if copy.fate == "lose":
                copy.ends_at_s, copy.fate = self._now, "fail"

    def close(self, timeout_s: float) -> bool:
        self._under_way.clear()
        return True
