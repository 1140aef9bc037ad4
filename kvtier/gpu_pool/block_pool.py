"""The block pools of one tier: who owns a block, what it is called, which one goes next.

Owns       for every group of one tier: reference counts, places, keys, the key index and the two free lists, as flat
           arrays over all groups (block b of group g is entry ``base[g] + b``). No Python object per block.
Promises   what ``pool_loops`` promises, for batches of blocks of any groups. Keeps I1, I2, I3, I21.
Does not   know tiers, tensors or copies: the same class serves device and host. It never waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.gpu_pool import pool_loops as loops
from kvtier.gpu_pool.pool_state import Col, Ids, Mark, Place, PoolArrays, Words

__all__ = ["BlockPools", "Col", "Ids", "Mark", "Place", "PoolArrays", "Words"]


class BlockPools:
    """The pools of one tier; ``usable[g]`` blocks in group g, ids 1..usable[g], id 0 the null block."""

    def __init__(self, usable: Sequence[int]) -> None:
        rows = [n + 1 for n in usable]
        base = np.concatenate([[0], np.cumsum([n + 1 for n in rows])]).astype(np.int64)
        sizes = [1 << max(3, (2 * n).bit_length()) for n in rows]
        index_base = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        total = int(base[-1])
        meta = np.zeros((len(usable), len(Col)), np.int64)
        meta[:, Col.BASE] = base[:-1]
        meta[:, Col.ROWS] = rows
        meta[:, Col.EMPTY] = usable
        meta[:, Col.INDEX_BASE] = index_base[:-1]
        meta[:, Col.INDEX_MASK] = np.array(sizes) - 1
        self.arrays = PoolArrays(
            meta=meta,
            refs=np.zeros(total, np.int32),
            place=np.zeros(total, np.uint8),
            mark=np.zeros(total, np.uint8),
            key=np.zeros(2 * total, np.uint64),
            next=np.zeros(total, np.int32),
            prev=np.zeros(total, np.int32),
            fence=np.zeros(total, np.int64),
            slots=np.zeros(int(index_base[-1]), np.uint64),
        )
        for g, n in enumerate(usable):
            self._link_empty(g, n)
        self.num_groups = len(usable)

    def _link_empty(self, g: int, usable: int) -> None:
        """All blocks in the empty list, in the order of their ids."""
        a, base, head = self.arrays, int(self.arrays.meta[g, Col.BASE]), usable + 1
        ring = np.concatenate([[head], np.arange(1, usable + 1), [head]]).astype(np.int32)
        a.next[base + ring[:-1]] = ring[1:]
        a.prev[base + ring[1:]] = ring[:-1]
        a.place[base + 1 : base + 1 + usable] = Place.EMPTY

    # Counts, int64 [groups].

    @property
    def usable(self) -> npt.NDArray[np.int64]:
        """Blocks that exist, the null block not counted."""
        return self.arrays.meta[:, Col.ROWS] - 1

    @property
    def clean(self) -> npt.NDArray[np.int64]:
        """Blocks that can be handed out at once: empty and cached."""
        return self.arrays.meta[:, Col.EMPTY] + self.arrays.meta[:, Col.CACHED]

    @property
    def free(self) -> npt.NDArray[np.int64]:
        """Blocks that nobody holds, those included that a store still reads."""
        return self.clean + self.arrays.meta[:, Col.FENCED]

    @property
    def held(self) -> npt.NDArray[np.int64]:
        """Blocks with a reference."""
        return self.arrays.meta[:, Col.HELD]

    def column(self, column: Col) -> npt.NDArray[np.int64]:
        """One column of ``meta``, by group."""
        return self.arrays.meta[:, column]

    def entries(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.int64]:
        """Positions of blocks in the flat arrays."""
        entries: npt.NDArray[np.int64] = self.arrays.meta[groups, Col.BASE] + blocks
        return entries

    # Batches. ``groups`` and ``blocks`` are int32 [n], ``keys`` uint64 [n, 2].

    def take(self, groups: Ids) -> Ids:
        """One block per entry of ``groups``, each with one reference. The caller has checked ``clean``."""
        out = np.empty(len(groups), np.int32)
        loops.take_batch(self.arrays, groups, out)
        return out

    def acquire(self, groups: Ids, blocks: Ids) -> None:
        """One more reference each."""
        loops.acquire_batch(self.arrays, groups, blocks)

    def release(self, groups: Ids, blocks: Ids) -> None:
        """One reference less each; a block that occurs twice loses two."""
        loops.release_batch(self.arrays, groups, blocks)

    def find(self, groups: Ids, keys: Words) -> Ids:
        """The blocks that carry the keys, 0 where none does."""
        out = np.empty(len(groups), np.int32)
        loops.find_batch(self.arrays, groups, keys, out)
        return out

    def publish(self, groups: Ids, blocks: Ids, keys: Words, mark: Mark) -> None:
        """Names the blocks; none of the keys may be in the index."""
        loops.publish_batch(self.arrays, groups, blocks, keys, int(mark))

    def make_ready(self, groups: Ids, blocks: Ids) -> None:
        """PENDING keys become READY."""
        loops.ready_batch(self.arrays, groups, blocks)

    def unpublish(self, groups: Ids, blocks: Ids) -> None:
        """Forgets the blocks' keys."""
        loops.unpublish_batch(self.arrays, groups, blocks)

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """A store of this ticket reads the blocks."""
        loops.fence_batch(self.arrays, groups, blocks, ticket)

    def unfence(self, groups: Ids, blocks: Ids, ticket: int, cold: bool = False) -> None:
        """The store is out of the way; free blocks go to the ``cold`` or the hot end of their list."""
        loops.unfence_batch(self.arrays, groups, blocks, ticket, cold)

    def expire_fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """The store is overdue: the blocks are quarantined as soon as nobody holds them."""
        loops.expire_batch(self.arrays, groups, blocks, ticket)

    def quarantine(self, groups: Ids, blocks: Ids) -> None:
        """Takes the blocks out of circulation and forgets their keys; references stay counted."""
        loops.quarantine_batch(self.arrays, groups, blocks)

    def restore(self, groups: Ids, blocks: Ids) -> None:
        """Puts quarantined blocks back into circulation."""
        loops.restore_batch(self.arrays, groups, blocks)

    def coldest(self, g: int, n: int) -> Ids:
        """Up to ``n`` cached blocks of group g in the order in which they would be handed out."""
        out = np.empty(n, np.int32)
        return out[: loops.coldest(self.arrays, g, out)]

    def forget_all(self) -> None:
        """Unpublishes every key; cached blocks become empty ones."""
        loops.forget_all(self.arrays)
