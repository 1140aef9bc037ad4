"""The audit of a tier's pools: places, counters, lists, references, the key index (I1, I2, I21, I22, I25).

Over all groups at once, since the arrays are flat: entry i is a block of one group, or its null block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.pools.block_pool import BlockPools, Col, Ids, Mark, Place, SlabCol
from kvtier.pools.cached_ring import STAMPED

if TYPE_CHECKING:
    from kvtier.pools.arena import Arena
    from kvtier.stats import PoolStats

_EMPTY, _CACHED, _FENCED, _HELD, _QUARANTINED, _NULL = (int(p) for p in Place)
_NONE, _PENDING, _READY = (int(m) for m in Mark)
_LAST_PLACE, _LAST_MARK = int(max(Place)), int(max(Mark))
_BASE, _ROWS, _KEYED, _N_CACHED = int(Col.BASE), int(Col.ROWS), int(Col.KEYED), int(Col.CACHED)
_INDEX_BASE, _PEAK, _N_HELD = int(Col.INDEX_BASE), int(Col.PEAK_HELD), int(Col.HELD)
_COUNTERS = [int(c) for c in (Col.EMPTY, Col.CACHED, Col.FENCED, Col.QUARANTINED, Col.HELD)]
_COUNTED = [_EMPTY, _CACHED, _FENCED, _QUARANTINED, _HELD]
_LAID_OUT = [int(c) for c in (Col.BASE, Col.ROWS, Col.PER_SLAB, Col.FIRST_SLAB, Col.MOST_SLABS)]
_GAUGES = ("cached", "fenced", "held", "quarantined")

Int64s = npt.NDArray[np.int64]


def indices(mask: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Positions at which a flat array is not zero.

    ``np.flatnonzero`` without its wrappers, which cost most of it in tiny pools.
    """
    return mask.nonzero()[0]


@dataclass(frozen=True)
class Violation:
    """One broken invariant: its name in the contract, and the observation."""

    invariant: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.detail}"


@dataclass(frozen=True)
class Tier:
    """A tier's pools, with their names in a report."""

    name: str  # "device" or "host"
    groups: tuple[str, ...]
    pools: BlockPools

    def where(self, g: int | np.integer[Any]) -> str:
        """A pool, for a report."""
        return f"{self.name} {self.groups[g]}"

    def has(self, groups: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Whether each of the blocks lies inside its pool."""
        inside: npt.NDArray[np.bool_] = (blocks >= 0) & (blocks < self.pools.arrays.meta[groups, _ROWS])
        return inside

    def entries(self, groups: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> Int64s:
        """Entries of the blocks that lie inside their pools; other blocks are reported elsewhere (I15, I22)."""
        inside = self.has(groups, blocks)
        entries: Int64s = self.pools.arrays.meta[groups[inside], _BASE] + blocks[inside]
        return entries

    def block_of(self, entry: int | np.integer[Any]) -> tuple[int, int]:
        """(group, block) of an entry."""
        g = int(np.searchsorted(self.pools.arrays.meta[:, _BASE], entry, side="right")) - 1
        return g, int(entry - self.pools.arrays.meta[g, _BASE])


def check_counters(tier: Tier, arena: Arena | None) -> Iterator[Violation]:
    """Counters against each other; costs the same for pools of any size."""
    meta = tier.pools.arrays.meta
    counts = meta[:, _COUNTERS]
    owned, slabs = tier.pools.owned, tier.pools.arrays.slabs
    for g in indices((counts.min(1) < 0) | (counts.sum(1) != owned)):
        seen = ", ".join(f"{n} {Place(kind).name}" for n, kind in zip(counts[g], _COUNTED, strict=True))
        yield Violation("I1", f"{tier.where(g)}: {seen} do not make {owned[g]} blocks")
    if meta[:, Col.SLABS].sum() != meta[0, Col.UNUSED]:
        yield Violation("I1", f"{tier.name}: pools have {meta[:, Col.SLABS].sum()} of {meta[0, Col.UNUSED]} slabs")
    if not 0 <= meta[0, Col.UNUSED] <= len(slabs) or (meta[:, Col.SLABS] > meta[:, Col.MOST_SLABS]).any():
        yield Violation("I22", f"{tier.name}: more slabs are used than there are")
    for g in indices((meta[:, _KEYED] < meta[:, _N_CACHED]) | (meta[:, _KEYED] >= meta[:, _ROWS])):
        yield Violation("I21", f"{tier.where(g)}: {meta[g, _KEYED]} keys, {meta[g, _N_CACHED]} cached blocks")
    for g in indices((meta[:, _PEAK] < meta[:, _N_HELD]) | (meta[:, _PEAK] >= meta[:, _ROWS])):
        yield Violation("I25", f"{tier.where(g)}: {meta[g, _N_HELD]} blocks are held, {meta[g, _PEAK]} at most so far")
    for g in indices(meta[:, Col.EVICTED] < 0):
        yield Violation("I25", f"{tier.where(g)}: {meta[g, Col.EVICTED]} blocks were evicted")
    if arena is None:
        return
    for g in indices(arena.rows != meta[:, _ROWS]):
        yield Violation("I22", f"{tier.where(g)}: {meta[g, _ROWS]} ids, but memory for {arena.rows[g]} blocks")
    ends = arena.origins + arena.rows * arena.strides
    if int(ends.max()) != arena.num_bytes or int(arena.origins.min()) < 0 or (arena.strides < arena.block_bytes).any():
        yield Violation("I22", f"{tier.name}: the pools do not make the arena's {arena.num_bytes:,} bytes")
    yield from _check_places(tier, arena)


def _check_places(tier: Tier, arena: Arena) -> Iterator[Violation]:
    """No block lies on another pool's blocks: pools side by side, or all their blocks inside their slabs."""
    layout, begins = arena.layout, arena.origins
    if not layout.shared:
        order = np.argsort(begins)
        ends = begins + arena.rows * arena.strides
        for a, b in pairwise(order):
            if ends[a] > begins[b]:
                yield Violation("I22", f"{tier.where(a)}: its blocks reach into those of {tier.where(b)}")
        return
    first = layout.num_bytes - layout.num_slabs * layout.slab_bytes  # start of the slabs
    for g in range(len(begins)):
        slabs = np.array([0, layout.num_slabs - 1])
        at = begins[g] + (1 + slabs * layout.per_slab[g]) * arena.strides[g] - first - slabs * layout.slab_bytes
        if (at < 0).any() or (at + layout.per_slab[g] * arena.strides[g] > layout.slab_bytes).any():
            yield Violation("I22", f"{tier.where(g)}: its blocks do not lie inside their slabs")


def audit_structure(tier: Tier) -> Iterator[Violation]:
    """The arrays have the form that the layout gives them: all other checks read them by it."""
    layout, a = tier.pools.layout, tier.pools.arrays
    rows = layout.rows
    columns = (np.cumsum(rows) - rows, rows, layout.per_slab, layout.first_slab, layout.most_slabs)
    expected = np.stack(columns, axis=1)
    for g, k in np.argwhere(a.meta[:, _LAID_OUT] != expected):
        column = Col(_LAID_OUT[k])
        yield Violation(
            "I22", f"{tier.where(g)}: {column.name} is {a.meta[g, column]}, its layout says {expected[g, k]}"
        )
    for base, size, room, least in (
        (Col.INDEX_BASE, a.meta[:, Col.INDEX_MASK] + 1, len(a.slots), rows),
        (Col.RING_BASE, a.meta[:, Col.RING_SIZE], len(a.ring) - len(a.ring) // (STAMPED + 1), rows),
    ):
        sound = ((size >= least) & (size & (size - 1) == 0)).all() and int(size.sum()) == room
        if not sound or (a.meta[:, base] != np.cumsum(size) - size).any():
            yield Violation("I22", f"{tier.name}: {base.name} and sizes do not divide up the {room:,} entries")
    stamps = int(a.meta[:, Col.RING_SIZE].sum()) + a.meta[:, Col.RING_BASE] // STAMPED
    if (a.meta[:, Col.STAMPS] != stamps).any():
        yield Violation("I22", f"{tier.name}: stamps of the ring are not behind its entries")
    if len(a.blocks) != int(rows.sum()) or len(a.empties) != len(a.blocks) or len(a.slabs) != layout.num_slabs:
        yield Violation("I22", f"{tier.name}: arrays are of other sizes than the layout's")


@dataclass(frozen=True)
class _Slabs:
    """The slabs that each group may have, group by group. Groups of one arena may all have the same slabs."""

    group: Int64s
    slab: Int64s
    owned: npt.NDArray[np.bool_]  # whether the group has it
    of: Int64s  # for every entry the one in which it lies, as a position in these arrays; null blocks lie behind them

    @classmethod
    def of_tier(cls, tier: Tier) -> _Slabs:
        """Laid out in the form that ``audit_structure`` has checked."""
        layout, count = tier.pools.layout, tier.pools.num_groups
        group = np.repeat(np.arange(count), layout.most_slabs)
        ends = np.cumsum(layout.most_slabs)
        slab = np.arange(len(group)) + (layout.first_slab - ends + layout.most_slabs)[group]
        nulls = ends - layout.most_slabs  # a group's null block comes before its slabs
        of = np.insert(np.arange(len(group)), nulls, len(group))
        of = np.repeat(of, np.insert(layout.per_slab[group], nulls, 1))
        return cls(group, slab, tier.pools.arrays.slabs[slab, SlabCol.OWNER] == group, of)

    @property
    def own(self) -> npt.NDArray[np.bool_]:
        """For every entry whether it is a block of a slab that its group has."""
        return np.append(self.owned, False)[self.of]

    def count(self, entries: npt.NDArray[Any]) -> Int64s:
        """How many of the entries, or of the masked entries, lie in each."""
        counts: Int64s = np.bincount(self.of[entries], minlength=len(self.group) + 1)[: len(self.group)]
        return counts


def audit_pools(tier: Tier, owners: Int64s, stats: Sequence[PoolStats]) -> Iterator[Violation]:
    """``owners``: the entries that should have holders, each as often as it is held."""
    a = tier.pools.arrays
    meta, place, count = a.meta, a.place, tier.pools.num_groups
    group_of = np.repeat(np.arange(count), meta[:, _ROWS])
    for i in indices((place > _LAST_PLACE) | (a.mark > _LAST_MARK)).tolist():
        of, b = tier.block_of(i)
        yield Violation("I1", f"{tier.where(of)} block {b}: there is no place {place[i]}, or no mark {a.mark[i]}")
    if place.max() > _LAST_PLACE:
        return
    slabs, rings = _Slabs.of_tier(tier), [_ring(tier, g) for g in range(count)]
    own = slabs.own
    kinds = np.bincount((group_of * len(Place) + place)[own], minlength=count * len(Place)).reshape(count, len(Place))
    for g, k in np.argwhere(kinds[:, _COUNTED] != meta[:, _COUNTERS]):
        seen, counter = kinds[g, _COUNTED[k]], meta[g, _COUNTERS[k]]
        yield Violation(
            "I1", f"{tier.where(g)}: {seen} blocks are {Place(_COUNTED[k]).name}, the counter says {counter}"
        )
    gauges = np.array([[getattr(pool, name) for name in _GAUGES] for pool in stats])
    for g, k in np.argwhere(kinds[:, [_CACHED, _FENCED, _HELD, _QUARANTINED]] != gauges):
        yield Violation("I25", f"{tier.where(g)}: stats count {gauges[g, k]} {_GAUGES[k]}")
    for g, pool in enumerate(stats):
        sum_of = pool.empty + pool.cached + pool.fenced + pool.held + pool.quarantined + pool.lent
        if sum_of != pool.usable or pool.empty != kinds[g, _EMPTY] + tier.pools.unused[g]:
            yield Violation("I25", f"{tier.where(g)}: stats say {pool.empty} empty, {pool.lent} lent")
    for i in indices(~own & (place != _EMPTY) & (place != _NULL)).tolist():
        g, b = tier.block_of(i)
        yield Violation("I1", f"{tier.where(g)} block {b}: {Place(place[i]).name}, but another pool has its slab")
    for g in indices((place[meta[:, _BASE]] != _NULL) | (a.refs[meta[:, _BASE]] != 0)):
        yield Violation("I1", f"{tier.where(g)}: the null block is owned")
    yield from _audit_lists(tier, own, rings)
    yield from _audit_slabs(tier, slabs, rings)
    yield from _audit_open_slabs(tier)
    expected, refs, mark = np.bincount(owners, minlength=len(place)), a.refs, a.mark
    off_duty = (place == _NULL) | (place == _QUARANTINED)
    unkeyed = (place == _EMPTY) | (place == _QUARANTINED)
    for invariant, what, broken in (
        ("I2", "references do not equal owners and pins", refs != expected),
        ("I2", "references and place disagree", ((refs > 0) != (place == _HELD)) & ~off_duty),
        ("I21", "findable, but empty or quarantined", unkeyed & (mark != _NONE)),
        ("I21", "CACHED without a key", (place == _CACHED) & (mark == _NONE)),
        ("I19", "PENDING, but no transfer holds it", (place != _HELD) & (mark == _PENDING)),
    ):
        for i in indices(broken).tolist():
            of, b = tier.block_of(i)
            seen = f"{Place(place[i]).name}, {refs[i]} references, {expected[i]} owners and pins"
            yield Violation(invariant, f"{tier.where(of)} block {b}: {what} ({seen})")
    yield from _audit_index(tier, group_of)


def _audit_lists(tier: Tier, own: npt.NDArray[np.bool_], rings: list[Ids]) -> Iterator[Violation]:
    """Every empty block can be handed out once, every cached block stands in its ring once."""
    a = tier.pools.arrays
    for g, ring in enumerate(rings):
        base, rows = int(a.meta[g, _BASE]), int(a.meta[g, _ROWS])
        place, link = a.place[base : base + rows], a.blocks["link"][base : base + rows]
        mine, at, size = own[base : base + rows], indices(ring), int(a.meta[g, Col.RING_SIZE])
        entries, cached = ring[at], np.abs(ring[at])
        if ((entries[:-1] > 0) & (entries[1:] < 0)).any():
            yield Violation("I1", f"{tier.where(g)}: what was superseded does not stand first in the ring")
        for kind, listed in ((_EMPTY, tier.pools.empties(g)), (_CACHED, cached.tolist())):
            distinct = set(listed)
            if len(listed) != len(distinct):
                yield Violation("I1", f"{tier.where(g)}: the {Place(kind).name} list holds a block twice")
            if distinct != set(indices((place == kind) & mine).tolist()):
                yield Violation("I1", f"{tier.where(g)}: the {Place(kind).name} list is not the set of such blocks")
        head, closed, sweep, tail = (int(a.meta[g, c]) for c in (Col.HEAD, Col.CLOSED, Col.SWEEP, Col.TAIL))
        if not 0 <= tail - head <= size or (sweep != -1 and not head <= closed <= sweep <= tail):
            yield Violation("I1", f"{tier.where(g)}: a ring from {head} to {tail} is swept from {closed} to {sweep}")
        elif sweep != -1 and ring[closed - head : sweep - head].any():
            yield Violation("I1", f"{tier.where(g)}: the sweep of the ring has left blocks behind")
        if (link[np.minimum(cached, rows - 1)] != (head + at) % size).any():
            yield Violation("I1", f"{tier.where(g)}: a cached block does not know its place in the ring")


def _audit_slabs(tier: Tier, slabs: _Slabs, rings: list[Ids]) -> Iterator[Violation]:
    """The slabs' counts match their blocks, and a block knows its slab."""
    a = tier.pools.arrays
    place, meta, of_group, count = a.place, a.meta, slabs.group, tier.pools.num_groups
    stuck = slabs.count((place == _QUARANTINED) | (a.mark == _PENDING) | ((a.fence < 0) & (place == _HELD)))
    gone = [meta[g, _BASE] - ring[(ring < 0) & (ring > -meta[g, _ROWS])] for g, ring in enumerate(rings)]
    for column, seen in (
        (SlabCol.EMPTY, slabs.count(place == _EMPTY)),
        (SlabCol.CACHED, slabs.count(place == _CACHED)),
        (SlabCol.SUPERSEDED, slabs.count(np.concatenate(gone))),
        (SlabCol.STUCK, stuck),
        (SlabCol.FENCES, slabs.count(a.fence > 0)),
    ):
        counted = a.slabs[slabs.slab, column]
        for i in indices(slabs.owned & (counted != seen)):
            where = f"{tier.where(of_group[i])} slab {slabs.slab[i]}"
            yield Violation("I1", f"{where}: {counted[i]} are counted as {column.name}, {seen[i]} are")
    with_stuck = np.bincount(of_group[stuck > 0], minlength=count)
    num_slabs = np.bincount(of_group[slabs.owned], minlength=count)
    for g in indices((meta[:, Col.STUCK] != with_stuck) | (meta[:, Col.SLABS] != num_slabs)):
        yield Violation("I1", f"{tier.where(g)}: its slabs are not those that are counted")
    slab = np.append(slabs.slab, -1)[slabs.of]
    wrong = slabs.of[(slab >= 0) & (place != _EMPTY) & (a.blocks["slab"] != slab)]
    misled = np.bincount(of_group[wrong], minlength=count)
    for g in indices(misled):
        yield Violation("I1", f"{tier.where(g)}: {misled[g]} blocks name a slab in which they do not lie")


def _audit_open_slabs(tier: Tier) -> Iterator[Violation]:
    """A pool's slabs with empty blocks, and only these, are in its list; the list can be walked both ways."""
    a = tier.pools.arrays
    for g in range(tier.pools.num_groups):
        slab, before, seen = int(a.meta[g, Col.OPEN]), -1, list[int]()
        while 0 <= slab < len(a.slabs) and len(seen) <= len(a.slabs):
            if a.slabs[slab, SlabCol.PREVIOUS] != before:
                yield Violation("I1", f"{tier.where(g)} slab {slab}: comes after {before}, and does not say so")
            seen.append(slab)
            before, slab = slab, int(a.slabs[slab, SlabCol.NEXT])
        with_some = indices((a.slabs[:, SlabCol.OWNER] == g) & (a.slabs[:, SlabCol.EMPTY] > 0))
        if slab != -1 or sorted(seen) != with_some.tolist():
            yield Violation("I1", f"{tier.where(g)}: slabs {seen} are listed as having empty blocks, {with_some} do")
        first = 1 + (with_some - int(a.meta[g, Col.FIRST_SLAB])) * int(a.meta[g, Col.PER_SLAB])
        listed, fresh = a.slabs[with_some, SlabCol.LISTED], a.slabs[with_some, SlabCol.FRESH]
        left = first + int(a.meta[g, Col.PER_SLAB]) - fresh
        wrong = (listed < 0) | (left < 0) | (listed + left != a.slabs[with_some, SlabCol.EMPTY])
        for s in with_some[wrong]:
            yield Violation("I1", f"{tier.where(g)} slab {s}: its list and its new ids do not make its empty blocks")


def _ring(tier: Tier, g: int) -> Ids:
    """Group g's ring from its coldest entry to its hottest, holes included."""
    a = tier.pools.arrays
    start, size = int(a.meta[g, Col.RING_BASE]), int(a.meta[g, Col.RING_SIZE])
    head, tail = int(a.meta[g, Col.HEAD]), int(a.meta[g, Col.TAIL])
    ring: Ids = a.ring[start + np.arange(head, min(tail, head + size + 1)) % size]
    return ring


def _audit_index(tier: Tier, group_of: Int64s) -> Iterator[Violation]:
    """The key index names the keyed blocks, each once, and every key leads to its block."""
    a = tier.pools.arrays
    used = indices(a.slots)
    groups = np.searchsorted(a.meta[:, _INDEX_BASE], used, side="right") - 1
    counts = np.bincount(groups, minlength=tier.pools.num_groups)
    for k in indices(counts != a.meta[:, _KEYED]):
        yield Violation("I21", f"{tier.where(k)}: {counts[k]} keys, the counter says {a.meta[k, _KEYED]}")
    ids = (a.slots[used] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    for k in indices(ids >= a.meta[groups, _ROWS]):
        yield Violation("I21", f"{tier.where(groups[k])}: the key index names block {ids[k]}, which there is not")
        return
    named = a.meta[groups, _BASE] + ids
    keyed = indices(a.mark != _NONE)
    if not np.array_equal(np.sort(named), keyed):
        for g in sorted({int(group_of[i]) for i in np.setxor1d(named, keyed)}) or range(tier.pools.num_groups):
            yield Violation("I21", f"{tier.where(g)}: the key index and the keyed blocks differ")
        return
    of = group_of[keyed].astype(np.int32)
    found = tier.pools.find(of, a.key[keyed])
    for i in indices(a.meta[of, _BASE] + found != keyed):
        yield Violation("I21", f"{tier.where(int(of[i]))}: a key does not lead to its block")
