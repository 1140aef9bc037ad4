"""The audit of a tier's pools: places, counters, lists, references, the key index (I1, I2, I21, I22, I25).

Over all groups at once, since the arrays are flat: entry i is a block of one group, or its null block. Numbers of which
each group has one are looked at in Python: so few in an array cost more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvtier.pools.block_pool import BlockPools, Col, Ids, Mark, Place, SlabCol
from kvtier.pools.cached_ring import STAMPED

if TYPE_CHECKING:
    from kvtier.geometry.layout import Layout
    from kvtier.machine.stats import PoolStats

_EMPTY, _CACHED, _FENCED, _HELD, _QUARANTINED, _NULL = (int(p) for p in Place)
_NONE, _PENDING, _READY = (int(m) for m in Mark)
_LAST_PLACE, _LAST_MARK = int(max(Place)), int(max(Mark))
_BASE, _ROWS, _KEYED = int(Col.BASE), int(Col.ROWS), int(Col.KEYED)
_INDEX_BASE, _SLABS, _PER_SLAB = int(Col.INDEX_BASE), int(Col.SLABS), int(Col.PER_SLAB)
COUNTERS = [int(c) for c in (Col.EMPTY, Col.CACHED, Col.FENCED, Col.QUARANTINED, Col.HELD)]
COUNTED = [_EMPTY, _CACHED, _FENCED, _QUARANTINED, _HELD]
_LAID_OUT = [int(c) for c in (Col.BASE, Col.ROWS, Col.PER_SLAB, Col.FIRST_SLAB, Col.MOST_SLABS)]
_SWEPT = [int(c) for c in (Col.HEAD, Col.CLOSED, Col.SWEEP, Col.TAIL, Col.RING_SIZE)]
_NEIGHBOURS = [int(SlabCol.NEXT), int(SlabCol.PREVIOUS)]
_RING = [int(c) for c in (Col.RING_BASE, Col.RING_SIZE, Col.HEAD, Col.TAIL)]
_GAUGES = (("cached", _CACHED), ("fenced", _FENCED), ("held", _HELD), ("quarantined", _QUARANTINED))

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def indices(mask: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Positions at which a flat array is not zero.

    ``np.flatnonzero`` without its wrappers, which cost most of it in tiny pools.
    """
    return mask.nonzero()[0]


def distinct(numbers: npt.NDArray[Any]) -> list[int]:
    """Each once, in order. ``np.unique`` is for many."""
    return sorted(set(numbers.tolist()))


@dataclass(frozen=True)
class Violation:
    """One broken invariant: its name in the contract, and the observation."""

    invariant: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.detail}"


@dataclass(frozen=True)
class Tier:
    """A tier's pools, with their names in a report. Made for one audit: nothing changes meanwhile."""

    name: str  # "device" or "host"
    groups: tuple[str, ...]
    pools: BlockPools

    def where(self, g: int | np.integer[Any]) -> str:
        """A pool, for a report."""
        return f"{self.name} {self.groups[g]}"

    @cached_property
    def base(self) -> Int64s:
        """The entry of each group's block 0."""
        return self.pools.arrays.meta[:, _BASE].copy()

    @cached_property
    def rows(self) -> Int64s:
        """The ids of each group."""
        return self.pools.arrays.meta[:, _ROWS].copy()

    def has(self, groups: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> Bools:
        """Whether each of the blocks lies inside its pool."""
        inside: Bools = (blocks >= 0) & (blocks < self.rows[groups])
        return inside

    def entries(self, groups: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> Int64s:
        """Entries of the blocks that lie inside their pools; other blocks are reported elsewhere (I15, I22)."""
        entries: Int64s = (self.base[groups] + blocks)[self.has(groups, blocks)]
        return entries

    def block_of(self, entry: int | np.integer[Any]) -> tuple[int, int]:
        """(group, block) of an entry."""
        g = int(np.searchsorted(self.base, entry, side="right")) - 1
        return g, int(entry - self.base[g])


def audit_structure(tier: Tier) -> Iterator[Violation]:
    """The arrays have the form that the layout gives them: all other checks read them by it."""
    layout, a, form = tier.pools.layout, tier.pools.arrays, _Form.of(tier.pools.layout)
    for g, (pool, expected) in enumerate(zip(a.meta.tolist(), form.laid_out, strict=True)):
        for c, number in zip(_LAID_OUT, expected, strict=True):
            if pool[c] != number:
                yield Violation("I22", f"{tier.where(g)}: {Col(c).name} is {pool[c]}, its layout says {number}")
    rows = [expected[1] for expected in form.laid_out]
    ring, log = a.meta[:, Col.RING_SIZE].tolist(), (a.meta[:, Col.LOG_MASK] + 1).tolist()
    entries = len(a.ring) - sum(log)
    for base, sizes, room in (
        (Col.INDEX_BASE, (a.meta[:, Col.INDEX_MASK] + 1).tolist(), len(a.slots)),
        (Col.RING_BASE, ring, entries - entries // (STAMPED + 1)),
    ):
        enough = all(n >= least and n & (n - 1) == 0 for n, least in zip(sizes, rows, strict=True))
        begins = [sum(sizes[:g]) for g in range(len(sizes))]
        if not enough or sum(sizes) != room or a.meta[:, base].tolist() != begins:
            yield Violation("I22", f"{tier.name}: {base.name} and sizes do not divide up the {room:,} entries")
    if any(pool[Col.STAMPS] != sum(ring) + pool[Col.RING_BASE] // STAMPED for pool in a.meta.tolist()):
        yield Violation("I22", f"{tier.name}: stamps of the ring are not behind its entries")
    if a.meta[:, Col.LOG_BASE].tolist() != [entries + sum(log[:g]) for g in range(len(log))]:
        yield Violation("I22", f"{tier.name}: logs of changes are not behind the ring's stamps")
    if len(a.blocks) != sum(rows) or len(a.empties) != len(a.blocks) or len(a.slabs) != layout.num_slabs:
        yield Violation("I22", f"{tier.name}: arrays are of other sizes than the layout's")


@dataclass(frozen=True)
class _Form:
    """The form that a layout gives the arrays.

    ``group`` and ``slab`` are the slabs that each group may have, group by group. Groups of one arena may all have the
    same slabs.
    """

    laid_out: list[list[int]]
    """The columns ``_LAID_OUT`` of each group."""
    group: Int64s
    slab: Int64s
    order: Int64s
    """Positions in these two, in the order of the entries; one behind their end stands for each null block."""
    sizes: Int64s
    """The number of entries of each of ``order``."""

    @classmethod
    def of(cls, layout: Layout) -> _Form:
        """Each layout's is made once."""
        if layout not in _FORMS:
            rows, most, count = layout.rows, layout.most_slabs, len(layout.rows)
            columns = (np.cumsum(rows) - rows, rows, layout.per_slab, layout.first_slab, most)
            group, nulls = np.repeat(np.arange(count), most), np.cumsum(most) - most
            slab = np.arange(len(group)) + (layout.first_slab - nulls)[group]
            order = np.insert(np.arange(len(group)), nulls, len(group))  # a group's null block comes before its slabs
            sizes = np.insert(layout.per_slab[group], nulls, 1)
            _FORMS[layout] = cls(np.stack(columns, axis=1).tolist(), group, slab, order, sizes)
        return _FORMS[layout]


_FORMS: WeakKeyDictionary[Layout, _Form] = WeakKeyDictionary()


class _Slabs:
    """The slabs that each group may have, with what is there now."""

    def __init__(self, tier: Tier) -> None:
        form = _Form.of(tier.pools.layout)
        self.group, self.slab = form.group, form.slab
        self.owned: Bools = tier.pools.arrays.slabs[form.slab, SlabCol.OWNER] == form.group
        """Whether the group has it."""
        self.of: Int64s = np.repeat(form.order, form.sizes)
        """The one in which each entry lies; null blocks lie behind all."""
        self.own: Bools = np.append(self.owned, False)[self.of]
        """Whether each entry is a block of a slab that its group has."""

    def count(self, entries: npt.NDArray[Any]) -> Int64s:
        """How many of the entries, or of the masked entries, lie in each."""
        counts: Int64s = np.bincount(self.of[entries], minlength=len(self.group) + 1)[: len(self.group)]
        return counts


def audit_pools(tier: Tier, owners: Int64s, stats: Sequence[PoolStats]) -> Iterator[Violation]:
    """``owners``: the entries that should have holders, each as often as it is held."""
    a = tier.pools.arrays
    place, mark, refs, count = a.place, a.mark, a.refs, tier.pools.num_groups
    group_of = np.repeat(np.arange(count), tier.rows)
    for i in indices((place > _LAST_PLACE) | (mark > _LAST_MARK)).tolist():
        of, b = tier.block_of(i)
        yield Violation("I1", f"{tier.where(of)} block {b}: there is no place {place[i]}, or no mark {mark[i]}")
    if place.max() > _LAST_PLACE:
        return
    slabs, rings = _Slabs(tier), [_ring(tier, g) for g in range(count)]
    kinds = np.bincount((group_of * len(Place) + place)[slabs.own], minlength=count * len(Place))
    yield from _audit_counts(tier, kinds.reshape(count, len(Place)).tolist(), stats)
    for i in indices(~slabs.own & (place != _EMPTY) & (place != _NULL)).tolist():
        g, b = tier.block_of(i)
        yield Violation("I1", f"{tier.where(g)} block {b}: {Place(place[i]).name}, but another pool has its slab")
    for g in indices((place[tier.base] != _NULL) | (refs[tier.base] != 0)):
        yield Violation("I1", f"{tier.where(g)}: the null block is owned")
    yield from _audit_lists(tier, slabs.own, rings)
    yield from _audit_slabs(tier, slabs, rings)
    yield from _audit_open_slabs(tier)
    expected = np.bincount(owners, minlength=len(place))
    is_held, off_duty = place == _HELD, (place == _NULL) | (place == _QUARANTINED)
    unkeyed = (place == _EMPTY) | (place == _QUARANTINED)
    for invariant, what, broken in (
        ("I2", "references do not equal owners and pins", refs != expected),
        ("I2", "references and place disagree", ((refs > 0) != is_held) & ~off_duty),
        ("I21", "findable, but empty or quarantined", unkeyed & (mark != _NONE)),
        ("I21", "CACHED without a key", (place == _CACHED) & (mark == _NONE)),
        ("I19", "PENDING, but no transfer holds it", ~is_held & (mark == _PENDING)),
    ):
        for i in indices(broken).tolist():
            of, b = tier.block_of(i)
            seen = f"{Place(place[i]).name}, {refs[i]} references, {expected[i]} owners and pins"
            yield Violation(invariant, f"{tier.where(of)} block {b}: {what} ({seen})")
    yield from _audit_index(tier, group_of)


def _audit_counts(tier: Tier, kinds: list[list[int]], stats: Sequence[PoolStats]) -> Iterator[Violation]:
    """The counters, and what users are told, against the blocks: ``kinds[g]`` are in each place."""
    unused, meta = tier.pools.unused.tolist(), tier.pools.arrays.meta.tolist()
    for g, (seen, told) in enumerate(zip(kinds, stats, strict=True)):
        for kind, column in zip(COUNTED, COUNTERS, strict=True):
            if seen[kind] != meta[g][column]:
                blocks = f"{seen[kind]} blocks are {Place(kind).name}"
                yield Violation("I1", f"{tier.where(g)}: {blocks}, the counter says {meta[g][column]}")
        for name, kind in _GAUGES:
            if getattr(told, name) != seen[kind]:
                yield Violation("I25", f"{tier.where(g)}: stats count {getattr(told, name)} {name}")
        sum_of = told.empty + told.cached + told.fenced + told.held + told.quarantined + told.lent
        if sum_of != told.usable or told.empty != seen[_EMPTY] + unused[g]:
            yield Violation("I25", f"{tier.where(g)}: stats say {told.empty} empty, {told.lent} lent")


def _audit_lists(tier: Tier, own: Bools, rings: list[Ids]) -> Iterator[Violation]:
    """Every empty block can be handed out once, every cached block stands in its ring once."""
    a = tier.pools.arrays
    all_places, links = a.place, a.blocks["link"]
    for g, ring in enumerate(rings):
        base, rows = int(tier.base[g]), int(tier.rows[g])
        place, link = all_places[base : base + rows], links[base : base + rows]
        mine, at = own[base : base + rows], indices(ring)
        entries, cached = ring[at], np.abs(ring[at])
        if np.count_nonzero((entries[:-1] > 0) & (entries[1:] < 0)):
            yield Violation("I1", f"{tier.where(g)}: what was superseded does not stand first in the ring")
        for kind, listed in ((_EMPTY, tier.pools.empties(g)), (_CACHED, cached.tolist())):
            each = set(listed)
            if len(listed) != len(each):
                yield Violation("I1", f"{tier.where(g)}: the {Place(kind).name} list holds a block twice")
            if each != set(indices((place == kind) & mine).tolist()):
                yield Violation("I1", f"{tier.where(g)}: the {Place(kind).name} list is not the set of such blocks")
        head, closed, sweep, tail, size = a.meta[g, _SWEPT].tolist()
        if not 0 <= tail - head <= size or (sweep != -1 and not head <= closed <= sweep <= tail):
            yield Violation("I1", f"{tier.where(g)}: a ring from {head} to {tail} is swept from {closed} to {sweep}")
        elif sweep != -1 and ring[closed - head : sweep - head].any():
            yield Violation("I1", f"{tier.where(g)}: the sweep of the ring has left blocks behind")
        if np.count_nonzero(link[np.minimum(cached, rows - 1)] != (head + at) % size):
            yield Violation("I1", f"{tier.where(g)}: a cached block does not know its place in the ring")


def _audit_slabs(tier: Tier, slabs: _Slabs, rings: list[Ids]) -> Iterator[Violation]:
    """The slabs' counts match their blocks, and a block knows its slab."""
    a = tier.pools.arrays
    place, fence, of_group, count = a.place, a.fence, slabs.group, tier.pools.num_groups
    stuck = slabs.count((place == _QUARANTINED) | (a.mark == _PENDING) | ((fence < 0) & (place == _HELD)))
    bounds = zip(tier.base.tolist(), tier.rows.tolist(), rings, strict=True)
    gone = [base - ring[(ring < 0) & (ring > -rows)] for base, rows, ring in bounds]
    for column, seen in (
        (SlabCol.EMPTY, slabs.count(place == _EMPTY)),
        (SlabCol.CACHED, slabs.count(place == _CACHED)),
        (SlabCol.SUPERSEDED, slabs.count(np.concatenate(gone))),
        (SlabCol.STUCK, stuck),
        (SlabCol.FENCES, slabs.count(fence > 0)),
    ):
        counted = a.slabs[slabs.slab, column]
        for i in indices(slabs.owned & (counted != seen)):
            where = f"{tier.where(of_group[i])} slab {slabs.slab[i]}"
            yield Violation("I1", f"{where}: {counted[i]} are counted as {column.name}, {seen[i]} are")
    with_stuck = np.bincount(of_group[stuck > 0], minlength=count)
    num_slabs = np.bincount(of_group[slabs.owned], minlength=count)
    for g in indices((a.meta[:, Col.STUCK] != with_stuck) | (a.meta[:, _SLABS] != num_slabs)):
        yield Violation("I1", f"{tier.where(g)}: its slabs are not those that are counted")
    slab = np.append(slabs.slab, -1)[slabs.of]
    wrong = slabs.of[(slab >= 0) & (place != _EMPTY) & (a.blocks["slab"] != slab)]
    misled = np.bincount(of_group[wrong], minlength=count)
    for g in indices(misled):
        yield Violation("I1", f"{tier.where(g)}: {misled[g]} blocks name a slab in which they do not lie")


def _audit_open_slabs(tier: Tier) -> Iterator[Violation]:
    """A pool's slabs with empty blocks, and only these, are in its list; the list can be walked both ways."""
    a = tier.pools.arrays
    with_some = indices((a.slabs[:, SlabCol.OWNER] >= 0) & (a.slabs[:, SlabCol.EMPTY] > 0)).tolist()
    by_group = [list[int]() for _ in tier.groups]
    for s, slab in zip(with_some, a.slabs[with_some].tolist(), strict=True):
        g, pool = slab[SlabCol.OWNER], a.meta[slab[SlabCol.OWNER]].tolist()
        by_group[g].append(s)
        listed = slab[SlabCol.LISTED]
        left = 1 + (s - pool[Col.FIRST_SLAB] + 1) * pool[_PER_SLAB] - slab[SlabCol.FRESH]
        if listed < 0 or left < 0 or listed + left != slab[SlabCol.EMPTY]:
            yield Violation("I1", f"{tier.where(g)} slab {s}: its list and its new ids do not make its empty blocks")
    for g, opened in enumerate(a.meta[:, Col.OPEN].tolist()):
        slab, before, seen = opened, -1, list[int]()
        while 0 <= slab < len(a.slabs) and len(seen) <= len(a.slabs):
            after, previous = a.slabs[slab, _NEIGHBOURS].tolist()
            if previous != before:
                yield Violation("I1", f"{tier.where(g)} slab {slab}: comes after {before}, and does not say so")
            seen.append(slab)
            before, slab = slab, after
        if slab != -1 or sorted(seen) != by_group[g]:
            yield Violation("I1", f"{tier.where(g)}: slabs {seen} are listed as having empty blocks, {by_group[g]} do")


def _ring(tier: Tier, g: int) -> Ids:
    """Group g's ring from its coldest entry to its hottest, holes included."""
    a = tier.pools.arrays
    start, size, head, tail = a.meta[g, _RING].tolist()
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
    for k in indices(ids >= tier.rows[groups]):
        yield Violation("I21", f"{tier.where(groups[k])}: the key index names block {ids[k]}, which there is not")
        return
    named = tier.base[groups] + ids
    keyed = indices(a.mark != _NONE)
    if not np.array_equal(np.sort(named), keyed):
        for g in sorted({int(group_of[i]) for i in np.setxor1d(named, keyed)}) or range(tier.pools.num_groups):
            yield Violation("I21", f"{tier.where(g)}: the key index and the keyed blocks differ")
        return
    of = group_of[keyed].astype(np.int32)
    found = tier.pools.find(of, a.key[keyed])
    for i in indices(tier.base[of] + found != keyed):
        yield Violation("I21", f"{tier.where(int(of[i]))}: a key does not lead to its block")
