"""What the callers of ``BlockPools`` have to see to, executable: with ``KVTIER_AUDIT=2`` every batch is checked first.

The audit sees damage one call later; here the call that would do it is named.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.machine.errors import InvariantBroken
from kvtier.pools.block_pool import BlockPools, Ids, Mark, Place, Words

Bools = npt.NDArray[np.bool_]


class CheckedPools(BlockPools):
    """Raises ``InvariantBroken`` instead of a batch that its caller should not have asked for; then nothing changed."""

    def take(self, groups: Ids) -> Ids:
        lacking = np.bincount(groups, minlength=self.num_groups) > self.clean
        self._check("take", "I4 more than can be handed out, in group", np.arange(self.num_groups), lacking)
        return super().take(groups)

    def acquire(self, groups: Ids, blocks: Ids) -> None:
        entries = self._inside("acquire", groups, blocks)
        place = self.arrays.place[entries]
        free = (self.arrays.refs[entries] == 0) & (place != Place.CACHED) & (place != Place.FENCED)
        self._check("acquire", "I2 holds nothing, nobody has it: block", blocks, free)
        super().acquire(groups, blocks)

    def release(self, groups: Ids, blocks: Ids, cold: bool = False) -> None:
        entries, counts = np.unique(self._inside("release", groups, blocks), return_counts=True)
        self._check("release", "I2 held less often than released: entry", entries, self.arrays.refs[entries] < counts)
        super().release(groups, blocks, cold)

    def publish(self, groups: Ids, blocks: Ids, keys: Words, mark: Mark) -> None:
        entries = self._inside("publish", groups, blocks)
        named = self.arrays.mark[entries] != Mark.NONE
        self._check("publish", "I21 has a name already: block", blocks, named)
        self._check("publish", "I21 another block has this name: block", blocks, self.find(groups, keys) != 0)
        super().publish(groups, blocks, keys, mark)

    def make_ready(self, groups: Ids, blocks: Ids) -> None:
        entries = self._inside("make_ready", groups, blocks)
        self._check(
            "make_ready", "I19 nothing is on its way to block", blocks, self.arrays.mark[entries] != Mark.PENDING
        )
        super().make_ready(groups, blocks)

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        entries = self._inside("fence", groups, blocks)
        self._check("fence", "I17 a store reads already block", blocks, self.arrays.fence[entries] != 0)
        lost = (self.arrays.place[entries] == Place.EMPTY) | (self.arrays.place[entries] == Place.QUARANTINED)
        self._check("fence", "I17 there is nothing to store in block", blocks, lost)
        super().fence(groups, blocks, ticket)

    def quarantine(self, groups: Ids, blocks: Ids) -> None:
        entries = self._inside("quarantine", groups, blocks)
        place = self.arrays.place[entries]
        loose = (place != Place.HELD) & (place != Place.QUARANTINED)
        self._check("quarantine", "I1 nobody holds block", blocks, loose)
        super().quarantine(groups, blocks)

    def _inside(self, what: str, groups: Ids, blocks: Ids) -> npt.NDArray[np.int64]:
        """Entries of the blocks, which lie in their pools and are no null blocks."""
        self._check(what, "I22 outside its pool: block", blocks, (blocks < 1) | (blocks > self.usable[groups]))
        return self.entries(groups, blocks)

    @staticmethod
    def _check(what: str, problem: str, of: npt.NDArray[Any], wrong: Bools) -> None:
        if wrong.any():
            raise InvariantBroken(f"a call of {what}", [f"{problem} {n}" for n in of[wrong].tolist()])
