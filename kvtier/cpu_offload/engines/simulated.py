"""The ``simulated`` copy engine: deterministic, seeded, and as unkind as allowed.

Owns       a clock that only polls and waits move, and the copies under way.
Promises   the same seed and calls give the same run. Copies end late and out of order. They read their source when they
           are issued or only when they complete. By choice they fail, tear, or never end. ``missing_edges`` reports an
           operation that overlaps an operation under way without an order between them. Such an operation is a copy, or
           a forward pass told by ``compute``.
Does not   run threads, or know streams: ``kvtier.testing.SimulatedDevice`` does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer


@dataclass(frozen=True)
class Faults:
    """Chances, each 0..1 per transfer, and delays in seconds of the simulated clock (one poll is one second)."""

    fail: float = 0.0
    """Ends with an error; nothing was copied."""
    tear: float = 0.0
    """Ends with an error; half of the blocks were copied, and half of the bytes of the next one."""
    corrupt: float = 0.0
    """A load flips one bit and does not know it; only ``verify="full"`` sees it."""
    lose: float = 0.0
    """Never ends; on a simulated device, which has to end some day, after ten thousand seconds."""
    max_delay_s: float = 3.0


FATES = ("fail", "tear", "corrupt", "lose")
_ERRORS = {"fail": "simulated failure", "tear": "simulated torn copy"}


class SimulatedCopy:
    """One transfer's bytes: when they are read, and their fate."""

    def __init__(self, memory: TierMemory, transfer: Transfer, faults: Faults, rnd: random.Random) -> None:
        self.transfer = transfer
        self._memory = memory
        self._random = rnd
        chances = [getattr(faults, name) for name in FATES]
        self.fate = rnd.choices([*FATES, "ok"], [*chances, max(0.0, 1.0 - sum(chances))])[0]
        """"ok" or the name of a fault; the simulation's driver may change it before the end."""
        self.early = rnd.random() < 0.5
        """Reads its source when it begins rather than when it ends."""
        self._moved = False

    def begin(self) -> None:
        """The copy may read its source from now on."""
        if self.early and self.fate in ("ok", "corrupt"):
            self._move()

    def _move(self) -> None:
        self._moved = True
        self._memory.copy(self.transfer)

    def end(self) -> Outcome:
        """The copy is over; returns its outcome."""
        count = len(self.transfer.groups)
        if self.fate in _ERRORS:
            if self.fate == "tear" and not self._moved:
                self._memory.copy_some(self.transfer, np.arange(count) < count // 2)
            return Outcome(self.transfer.ticket, _ERRORS[self.fate])
        if not self._moved:
            self._move()
        if self.transfer.direction is Direction.STORE:
            return Outcome(self.transfer.ticket)
        if self.fate == "corrupt" and count:
            self._memory.flip_device_bit(self.transfer, self._random.randrange(count))
        bad = self._memory.check(self.transfer)
        return Outcome.of_check(self.transfer, bad)


@dataclass(slots=True)
class _UnderWay:
    copy: SimulatedCopy
    ends_at_s: float


class SimulatedEngine(CopyEngine):
    """Pass ``lambda memory: SimulatedEngine(memory, seed=...)`` as ``copy_engine``."""

    def __init__(self, memory: TierMemory, seed: int = 0, faults: Faults | None = None) -> None:
        super().__init__(memory)
        self._random = random.Random(seed)
        self._faults = faults or Faults()
        self._now = 0.0
        self._under_way: dict[int, _UnderWay] = {}
        self._ended: list[Outcome] = []
        self.missing_edges: list[str] = []

    def submit(self, transfer: Transfer) -> None:
        self._check_order(transfer)
        copy = SimulatedCopy(self.memory, transfer, self._faults, self._random)
        delay = float("inf") if copy.fate == "lose" else self._random.uniform(0.0, self._faults.max_delay_s)
        copy.begin()
        self._under_way[transfer.ticket] = _UnderWay(copy, self._now + delay)

    def _check_order(self, new: Transfer) -> None:
        """Reports two copies under way on the same block, if one of them writes it."""
        for old in (under_way.copy.transfer for under_way in self._under_way.values()):
            for tier, writes in (("host", Direction.STORE), ("device", Direction.LOAD)):
                if writes not in (new.direction, old.direction):
                    continue
                both = self._shared_by(tier, (new.groups, getattr(new, tier)), (old.groups, getattr(old, tier)))
                if both:
                    self.missing_edges.append(
                        f"{new.direction.value} {new.ticket} and {old.direction.value} {old.ticket} are under way on "
                        f"{tier} blocks {both}"
                    )

    def _shared_by(self, tier: str, some: tuple[Ids, Ids], others: tuple[Ids, Ids]) -> list[tuple[int, int]]:
        """The ``some`` blocks, (groups, ids), that share memory with ``others``."""
        cells, of = self.memory.cells(tier, *some)
        both = np.unique(of[np.isin(cells, self.memory.cells(tier, *others)[0])])
        return list(zip(some[0][both].tolist(), some[1][both].tolist(), strict=True))

    def compute(self, reads: set[tuple[int, int]], writes: set[tuple[int, int]]) -> None:
        """A forward pass reads and writes these device blocks, (group index, block id), now.

        Reports a read of a block that a load under way still writes (edge 3). Reports a write to a block that a copy
        under way still reads or writes (edges 2 and 4). A copy that was ordered has ended by now.
        """
        for t in (under_way.copy.transfer for under_way in self._under_way.values()):
            touched = np.array(sorted(reads | writes if t.direction is Direction.LOAD else writes), np.int32)
            groups, blocks = touched.reshape(-1, 2).T
            both = self._shared_by("device", (groups, blocks), (t.groups, t.device))
            if both:
                self.missing_edges.append(
                    f"{t.direction.value} {t.ticket} is under way on device blocks {both}, which a forward touches"
                )

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        """Blocks of group g on the device are copied to other blocks, now."""
        self.compute({(g, int(b)) for b in sources}, {(g, int(b)) for b in targets})
        self.memory.move(g, sources, targets)

    def wipe(self, groups: Ids, blocks: Ids) -> None:
        """Blocks on the device are zeros from now on."""
        self.compute(set(), set(zip(groups.tolist(), blocks.tolist(), strict=True)))
        self.memory.wipe(groups, blocks)

    def poll(self) -> Sequence[Outcome]:
        self._now += 1.0
        ready = sorted((u for u in self._under_way.values() if u.ends_at_s <= self._now), key=lambda u: u.ends_at_s)
        for under_way in ready:
            self._end(under_way)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, under_way: _UnderWay) -> None:
        del self._under_way[under_way.copy.transfer.ticket]
        self._ended.append(under_way.copy.end())

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        """Time passes until the copies have ended; a lost one makes ``timeout_s`` pass instead."""
        waited_for = [self._under_way[t] for t in tickets if t in self._under_way]
        last = max((u.ends_at_s for u in waited_for), default=self._now)
        if last > self._now + timeout_s:
            self._now += timeout_s
            return False
        self._now = max(self._now, last)
        for under_way in waited_for:
            self._end(under_way)
        return True

    def wait(self, timeout_s: float) -> bool:
        return bool(self._ended)

    def wake(self) -> None:
        """No thread sleeps here."""

    def now(self) -> float:
        return self._now

    def end_lost(self) -> None:
        """Lost copies end after all (with an error), as late ones may on a real link."""
        for under_way in self._under_way.values():
            if under_way.copy.fate == "lose":
                under_way.ends_at_s, under_way.copy.fate = self._now, "fail"

    def close(self, timeout_s: float) -> bool:
        self._under_way.clear()
        return True
