"""The block pools of one tier: which block is held, its name, and which block goes out next.

Owns       for every group of one tier: reference counts, places, keys, the key index and the order of eviction. They
           are flat arrays over all groups (block b of group g is entry ``base[g] + b``). No Python object per block.
Promises   the same as ``pool_loops``, for batches of blocks of any groups. Keeps I1, I2, I3, I21.
Does not   know tiers, tensors or copies: the same class serves device and host. It never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.geometry.layout import Layout
from kvtier.machine.loops import aligned
from kvtier.machine.loops.jit import records
from kvtier.pools import batches, exchange, slab_loops
from kvtier.pools.cached_ring import STAMPED
from kvtier.pools.changes import room_for_changes
from kvtier.pools.pool_state import BLOCK, Col, Ids, Mark, Place, PoolArrays, SlabCol, Words, fence_of

__all__ = ["BlockPools", "Col", "Ids", "Mark", "Place", "PoolArrays", "SlabCol", "Words", "fence_of"]


_CLOCK = int(Col.CLOCK)


class Fences(Protocol):
    """A device's arrays: ``take_for_stores`` reads ``meta[g, BASE]`` and ``blocks["fence"]`` of them."""

    @property
    def meta(self) -> npt.NDArray[np.int64]:
        """int64 [groups, len(Col)]."""

    @property
    def blocks(self) -> npt.NDArray[np.void]:
        """BLOCK [blocks of all groups]."""


class BlockPools:
    """The pools of one tier: ids 1..usable[g] in group g, id 0 the null block."""

    def __init__(self, layout: Layout) -> None:
        rows = layout.rows
        index = np.array([1 << max(3, (2 * int(n)).bit_length()) for n in rows], np.int64)
        ring = np.array([1 << int(n + n // 2 + 63).bit_length() for n in rows], np.int64)
        meta = np.zeros((len(rows), len(Col)), np.int64)
        meta[:, Col.BASE] = np.cumsum(rows) - rows
        meta[:, Col.ROWS] = rows
        meta[:, Col.INDEX_BASE] = np.cumsum(index) - index
        meta[:, Col.INDEX_MASK] = index - 1
        meta[:, Col.RING_BASE] = np.cumsum(ring) - ring
        meta[:, Col.RING_SIZE] = ring
        meta[:, Col.STAMPS] = ring.sum() + meta[:, Col.RING_BASE] // STAMPED
        log = np.array([room_for_changes(n) for n in rows.tolist()], np.int64)
        meta[:, Col.LOG_BASE] = ring.sum() + ring.sum() // STAMPED + np.cumsum(log) - log
        meta[:, Col.LOG_MASK] = log - 1
        meta[:, Col.HEAD] = meta[:, Col.TAIL] = 1 << 61  # far from both ends, and the beginning of every ring
        meta[:, Col.SWEEP] = meta[:, Col.OPEN] = -1
        meta[:, Col.PER_SLAB] = layout.per_slab
        meta[:, Col.FIRST_SLAB] = layout.first_slab
        meta[:, Col.MOST_SLABS] = layout.most_slabs
        slabs = np.zeros((layout.num_slabs, len(SlabCol)), np.int64)
        slabs[:, SlabCol.OWNER] = -1
        blocks = records(aligned.zeros((int(rows.sum()),), BLOCK))
        blocks["place"][meta[:, Col.BASE]] = Place.NULL
        self.arrays = PoolArrays(
            meta=meta,
            blocks=blocks,
            slots=np.zeros(int(index.sum()), np.uint64),
            ring=np.zeros(int(ring.sum()) // STAMPED * (STAMPED + 1) + int(log.sum()), np.int32),
            empties=np.zeros(len(blocks), np.int32),
            slabs=slabs,
        )
        self.layout = layout
        self.num_groups = len(rows)
        self.shared = layout.shared
        """Whether the pools exchange slabs."""
        self._wanted = np.zeros(len(rows), np.int64)
        self._no_states = np.zeros(len(rows), np.uint8)
        self._moves = np.empty((2, int(layout.per_slab.max()) if layout.shared else 0), np.int32)
        if not self.shared:
            for g, slab in enumerate(layout.first_slab.tolist()):
                exchange.hand_over(meta, slabs, g, slab)
            meta[0, Col.UNUSED] = layout.num_slabs

    # Counts, int64 [groups].

    @property
    def usable(self) -> npt.NDArray[np.int64]:
        """Blocks that the pool could have without the null block. They include blocks in memory that other pools
        use."""
        return self.arrays.meta[:, Col.ROWS] - 1

    @property
    def owned(self) -> npt.NDArray[np.int64]:
        """Blocks of the slabs that the pool has now."""
        return self.arrays.meta[:, Col.SLABS] * self.arrays.meta[:, Col.PER_SLAB]

    @property
    def num_unused(self) -> int:
        """Slabs that no pool has had yet."""
        return len(self.arrays.slabs) - int(self.arrays.meta[0, Col.UNUSED])

    @property
    def unused(self) -> npt.NDArray[np.int64]:
        """Blocks that the pool could have of the slabs without a pool so far."""
        return self.num_unused * self.arrays.meta[:, Col.PER_SLAB]

    @property
    def live(self) -> npt.NDArray[np.int64]:
        """Blocks that cannot be handed out: held, or quarantined."""
        return self.arrays.meta[:, Col.HELD] + self.arrays.meta[:, Col.QUARANTINED]

    @property
    def clean(self) -> npt.NDArray[np.int64]:
        """Blocks that can be handed out at once: empty and cached."""
        return self.arrays.meta[:, Col.EMPTY] + self.arrays.meta[:, Col.CACHED]

    @property
    def free(self) -> npt.NDArray[np.int64]:
        """Blocks without a holder, including blocks that a store still reads."""
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

    def fits(self, used: npt.NDArray[np.int64]) -> bool:
        """Whether the pools can have used[G] blocks that cannot be handed out, all at once."""
        return bool(slab_loops.room(self.arrays.meta, len(self.arrays.slabs), used, np.empty_like(used)))

    def room(self, used: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Blocks that each group could have if the others had used[G], int64 [groups]."""
        most = np.empty(self.num_groups, np.int64)
        slab_loops.room(self.arrays.meta, len(self.arrays.slabs), used, most)
        return most

    def tick(self) -> None:
        """Content that is cached from now on is younger than content cached before, in any pool."""
        if self.shared:
            self.arrays.meta[0, _CLOCK] += 1

    def provide(
        self,
        need: npt.NDArray[np.int64],
        spare_cached: bool = False,
        states: npt.NDArray[np.uint8] | None = None,
        move: Callable[[int, Ids, Ids], None] | None = None,
        make_idle: Callable[[int], bool] | None = None,
    ) -> bool:
        """Gives pools slabs so that ``need[g]`` blocks are empty or cached; returns whether they are.

        Cached content of other pools makes room if it is colder than the pool's own; with ``spare_cached`` it does not.
        ``states``: 1 for groups with states, uint8 [groups]. Between these and others the coldest content goes,
        whatever shares its slab: ``move`` copies cached blocks of a group to others, (group, from, to). Without both,
        slabs go as they are. ``make_idle`` moves what is in use out of a slab of a group, if it can.
        """
        while True:
            enough, g, n = exchange.provide(
                *self.arrays, need, spare_cached, self._no_states if states is None else states, self._moves
            )
            if g < 0 or move is None:
                return bool(enough)
            if n > 0:
                move(g, self._moves[0, :n], self._moves[1, :n])
            elif make_idle is None or not make_idle(int(g)):
                states = None

    def is_enough(self, need: npt.NDArray[np.int64]) -> bool:
        """Whether ``need[g]`` blocks are clean, or one more slab can be had from a pool that can spare it, by moves."""
        return bool(exchange.is_enough(self.arrays.meta, self.arrays.slabs, need))

    # Batches. ``groups`` and ``blocks`` are int32 [n], ``keys`` uint64 [n, 2].

    def take(self, groups: Ids) -> Ids:
        """One block per entry of ``groups``, each with one reference. The caller has checked ``clean``."""
        out = np.empty(len(groups), np.int32)
        batches.take_batch(*self.arrays, groups, self._wanted, out)
        return out

    def take_for_stores(
        self, fences: Fences, groups: Ids, blocks: Ids, keys: Words
    ) -> tuple[Ids, Ids, Ids, Words, int]:
        """These pools are the host's: takes blocks for findable ``blocks`` of the device that are to be stored.

        ``fences`` are the device's arrays. Returns (groups, device blocks, host blocks, keys, number of further blocks
        that found no room). Chosen are blocks that no store reads yet and whose keys are not here. The new host blocks
        carry the keys, PENDING.
        """
        self.tick()
        of, there, here = np.empty((3, len(groups)), np.int32)
        named = np.empty((len(groups), 2), np.uint64)
        n, wanted = batches.take_for_stores(
            *self.arrays, fences.meta, fences.blocks, groups, blocks, keys, self._wanted, of, there, here, named
        )
        return of[:n], there[:n], here[:n], named[:n], wanted - n

    def count_stores(self, fences: Fences, groups: Ids, blocks: Ids, keys: Words) -> npt.NDArray[np.int64]:
        """Blocks by group that ``take_for_stores`` would take if there was room."""
        wanted = np.zeros(self.num_groups, np.int64)
        batches.count_stores(*self.arrays, fences.meta, fences.blocks, groups, blocks, keys, wanted)
        return wanted

    def acquire(self, groups: Ids, blocks: Ids) -> None:
        """One more reference each."""
        batches.acquire_batch(*self.arrays, groups, blocks)

    def release(self, groups: Ids, blocks: Ids, cold: bool = False) -> None:
        """One reference less each; a block that occurs twice loses two. Content goes to the ``cold`` or the hot end."""
        batches.release_batch(*self.arrays, groups, blocks, cold)

    def find(self, groups: Ids, keys: Words) -> Ids:
        """The blocks that carry the keys, 0 if no block does."""
        out = np.empty(len(groups), np.int32)
        batches.find_batch(*self.arrays, groups, keys, out)
        return out

    def publish(self, groups: Ids, blocks: Ids, keys: Words, mark: Mark) -> None:
        """Names the blocks; none of the keys may be in the index."""
        batches.publish_batch(*self.arrays, groups, blocks, keys, int(mark))

    def make_ready(self, groups: Ids, blocks: Ids) -> None:
        """PENDING keys become READY."""
        batches.ready_batch(*self.arrays, groups, blocks)

    def unpublish(self, groups: Ids, blocks: Ids) -> None:
        """Forgets the blocks' keys."""
        batches.unpublish_batch(*self.arrays, groups, blocks)

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """A store of this ticket reads the blocks."""
        batches.fence_batch(*self.arrays, groups, blocks, fence_of(ticket))

    def unfence(self, groups: Ids, blocks: Ids, ticket: int, cold: bool = False) -> None:
        """The store is out of the way; free blocks go to the ``cold`` or the hot end of their list."""
        batches.unfence_batch(*self.arrays, groups, blocks, fence_of(ticket), cold)

    def expire_fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """The store is overdue: the blocks are quarantined as soon as they have no holder."""
        batches.expire_batch(*self.arrays, groups, blocks, fence_of(ticket))

    def are_fenced(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which blocks a store still reads, or an overdue store may still read."""
        fenced: npt.NDArray[np.bool_] = self.arrays.fence[self.entries(groups, blocks)] != 0
        return fenced

    def are_waited_for(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which blocks could be handed out except for their fence."""
        waited: npt.NDArray[np.bool_] = self.arrays.place[self.entries(groups, blocks)] == Place.FENCED
        return waited

    def quarantine(self, groups: Ids, blocks: Ids) -> None:
        """Takes the blocks out of circulation and forgets their keys; references stay counted."""
        batches.quarantine_batch(*self.arrays, groups, blocks)

    def restore(self, groups: Ids, blocks: Ids) -> None:
        """Puts quarantined blocks back into circulation."""
        batches.restore_batch(*self.arrays, groups, blocks)

    def is_own(self, g: int) -> npt.NDArray[np.bool_]:
        """Whether each id of group g is a block of a slab that the pool has, bool [usable + 1]."""
        meta = self.arrays.meta[g]
        own: npt.NDArray[np.bool_] = np.zeros(int(meta[Col.ROWS]), bool)
        slabs = self.arrays.slabs[int(meta[Col.FIRST_SLAB]) :, SlabCol.OWNER] == g
        own[1:] = np.repeat(slabs[: int(meta[Col.MOST_SLABS])], int(meta[Col.PER_SLAB]))
        return own

    def empties(self, g: int) -> list[int]:
        """Group g's empty blocks in the order in which they would be handed out; for auditing."""
        meta, slabs = self.arrays.meta[g], self.arrays.slabs
        base, rows, per_slab = int(meta[Col.BASE]), int(meta[Col.ROWS]), int(meta[Col.PER_SLAB])
        listed, out = self.arrays.empties[base : base + rows], list[int]()
        slab, seen = int(meta[Col.OPEN]), set[int]()
        while slab >= 0 and slab not in seen:
            seen.add(slab)
            first = 1 + (slab - int(meta[Col.FIRST_SLAB])) * per_slab
            out += reversed(listed[first : first + int(slabs[slab, SlabCol.LISTED])].tolist())
            out += range(max(first, int(slabs[slab, SlabCol.FRESH])), first + per_slab)
            slab = int(slabs[slab, SlabCol.NEXT])
        return out

    def coldest(self, g: int, n: int) -> Ids:
        """Up to ``n`` cached blocks of group g in the order in which they would be handed out."""
        out = np.empty(n, np.int32)
        return out[: batches.coldest(*self.arrays, g, out)]

    def coldest_of(self, n: npt.NDArray[np.int64]) -> tuple[Ids, Ids]:
        """Groups and blocks of the ``coldest`` n[g] of every group."""
        blocks = [self.coldest(g, max(0, int(k))) for g, k in enumerate(n)]
        return np.repeat(np.arange(len(n), dtype=np.int32), [len(of) for of in blocks]), np.concatenate(blocks)

    def is_superseded(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these cached blocks are superseded."""
        a = self.arrays
        at = a.meta[groups, Col.RING_BASE] + a.blocks["link"][self.entries(groups, blocks)]
        superseded: npt.NDArray[np.bool_] = a.ring[at] < 0
        return superseded

    def in_colder_half(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these blocks are cached, and no more than half of their group's cached blocks are colder.

        Holes of the ring count as blocks: the answer may be True too early, never too late.
        """
        entries = self.entries(groups, blocks)
        head, tail, size = (self.column(column)[groups] for column in (Col.HEAD, Col.TAIL, Col.RING_SIZE))
        older = (self.arrays.blocks["link"][entries].astype(np.int64) - head) & (size - 1)
        is_cached = self.arrays.blocks["place"][entries] == Place.CACHED
        colder: npt.NDArray[np.bool_] = is_cached & (2 * (tail - head - older) >= self.column(Col.CACHED)[groups])
        return colder

    def num_superseded(self, g: int) -> int:
        """Group g's superseded cached blocks; for auditing."""
        slabs = self.arrays.slabs
        return int(slabs[slabs[:, SlabCol.OWNER] == g, SlabCol.SUPERSEDED].sum())

    def num_spare(self, g: int) -> int:
        """Blocks of group g that can be had without giving up any content."""
        return int(self.column(Col.EMPTY)[g] + self.unused[g])

    def forget_all(self) -> None:
        """Unpublishes every key; cached blocks become empty ones."""
        batches.forget_all(*self.arrays)
