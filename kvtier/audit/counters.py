"""The audit of a tier's counters (I1, I21, I22, I25): what costs the same for pools of any size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from kvtier.audit.pools import COUNTED, COUNTERS, Tier, Violation
from kvtier.pools.block_pool import Col, Place

if TYPE_CHECKING:
    from kvtier.geometry.layout import Layout
    from kvtier.pools.arena import Arena

_KEYED, _N_CACHED, _ROWS = int(Col.KEYED), int(Col.CACHED), int(Col.ROWS)
_PEAK, _N_HELD = int(Col.PEAK_HELD), int(Col.HELD)
_SLABS, _PER_SLAB, _MOST_SLABS = int(Col.SLABS), int(Col.PER_SLAB), int(Col.MOST_SLABS)


def check_counters(tier: Tier, arena: Arena | None) -> Iterator[Violation]:
    """Counters against each other."""
    pools, num_slabs = tier.pools.arrays.meta.tolist(), len(tier.pools.arrays.slabs)
    for g, pool in enumerate(pools):
        counts, owned = [pool[c] for c in COUNTERS], pool[_SLABS] * pool[_PER_SLAB]
        if min(counts) < 0 or sum(counts) != owned:
            seen = ", ".join(f"{n} {Place(kind).name}" for n, kind in zip(counts, COUNTED, strict=True))
            yield Violation("I1", f"{tier.where(g)}: {seen} do not make {owned} blocks")
        if not pool[_N_CACHED] <= pool[_KEYED] < pool[_ROWS]:
            yield Violation("I21", f"{tier.where(g)}: {pool[_KEYED]} keys, {pool[_N_CACHED]} cached blocks")
        if not pool[_N_HELD] <= pool[_PEAK] < pool[_ROWS]:
            yield Violation("I25", f"{tier.where(g)}: {pool[_N_HELD]} blocks are held, {pool[_PEAK]} at most so far")
        if pool[Col.EVICTED] < 0:
            yield Violation("I25", f"{tier.where(g)}: {pool[Col.EVICTED]} blocks were evicted")
    used, unused = sum(pool[_SLABS] for pool in pools), pools[0][Col.UNUSED]
    if used != unused:
        yield Violation("I1", f"{tier.name}: pools have {used} of {unused} slabs")
    if not 0 <= unused <= num_slabs or any(pool[_SLABS] > pool[_MOST_SLABS] for pool in pools):
        yield Violation("I22", f"{tier.name}: more slabs are used than there are")
    if arena is not None:
        yield from _check_arena(tier, arena)


def _check_arena(tier: Tier, arena: Arena) -> Iterator[Violation]:
    """The ids are those for which there is memory, and the pools make all of it."""
    rows, begins, strides = arena.rows.tolist(), arena.origins.tolist(), arena.strides.tolist()
    for g, (known, there) in enumerate(zip(tier.rows.tolist(), rows, strict=True)):
        if known != there:
            yield Violation("I22", f"{tier.where(g)}: {known} ids, but memory for {there} blocks")
    spare = arena.layout.spare.tolist()
    ends = [begin + (n + more) * stride for begin, n, more, stride in zip(begins, rows, spare, strides, strict=True)]
    narrow = any(stride < size for stride, size in zip(strides, arena.block_bytes.tolist(), strict=True))
    if max(ends) != arena.num_bytes or min(begins) < 0 or narrow:
        yield Violation("I22", f"{tier.name}: the pools do not make the arena's {arena.num_bytes:,} bytes")
    yield from _check_places(tier, arena.layout, begins, ends, strides)


def _check_places(
    tier: Tier, layout: Layout, begins: list[int], ends: list[int], strides: list[int]
) -> Iterator[Violation]:
    """No block lies on another pool's blocks: pools side by side, or all their blocks inside their slabs."""
    if not layout.shared:
        for a, b in pairwise(sorted(range(len(begins)), key=begins.__getitem__)):
            if ends[a] > begins[b]:
                yield Violation("I22", f"{tier.where(a)}: its blocks reach into those of {tier.where(b)}")
        return
    beside = int((layout.strides * layout.spare).max())
    first = layout.num_bytes - beside - layout.num_slabs * layout.slab_bytes  # start of the slabs
    for g, per_slab in enumerate(layout.per_slab.tolist()):
        for slab in (0, layout.num_slabs - 1):
            at = begins[g] + (1 + slab * per_slab) * strides[g] - first - slab * layout.slab_bytes
            if at < 0 or at + per_slab * strides[g] > layout.slab_bytes:
                yield Violation("I22", f"{tier.where(g)}: its blocks do not lie inside their slabs")
