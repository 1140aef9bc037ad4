"""The audit of rows (I2, I13, I15 - I17, I23, I27)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.audit.pools import Violation, indices
from kvtier.coordinator.coordinator import Coordinator
from kvtier.cpu_offload.transfer import Transfer
from kvtier.gpu_pool.row_state import Geo, Phase
from kvtier.pools.block_pool import BlockPools, Col, Mark

if TYPE_CHECKING:
    from kvtier.coordinator.core import Driver

_FREE, _LOADING, _LAST_PHASE = int(Phase.FREE), int(Phase.LOADING), int(max(Phase))
_NONE, _PENDING = int(Mark.NONE), int(Mark.PENDING)
_BASE, _ROWS = int(Col.BASE), int(Col.ROWS)


def audit_geometry(coordinator: Coordinator) -> Iterator[Violation]:
    """The rows' arrays have the form that the spec gives them."""
    t, spec = coordinator.tables.arrays, coordinator.spec
    for g, group in enumerate(spec.groups):
        expected = {
            Geo.BLOCK_TOKENS: group.block_tokens,
            Geo.KIND: int(group.attention.kind),
            Geo.SPAN: group.attention.span_tokens,
            Geo.UNITS: group.block_tokens // spec.hash_tokens,
        }
        for column, number in expected.items():
            if t.geometry[g, column] != number:
                yield Violation(
                    "I23", f"{group.name}: {column.name} is {t.geometry[g, column]}, the spec says {number}"
                )
    widths = t.geometry[:, Geo.WIDTH] * coordinator.tables.num_rows
    offsets = np.cumsum(widths) - widths
    if widths.min() < 0 or int(widths.sum()) != len(t.table) or (t.geometry[:, Geo.OFFSET] != offsets).any():
        yield Violation("I15", f"the tables of the groups do not divide up the {len(t.table):,} entries")


def audit_rows(coordinator: Coordinator) -> Iterator[Violation]:
    """Each group's table: held blocks are inside the pool, once; everything else is null."""
    t = coordinator.tables.arrays
    taken = indices(t.phase != _FREE)
    for row in indices((t.phase < 0) | (t.phase > _LAST_PHASE)):
        yield Violation("I2", f"row {row}: there is no phase {t.phase[row]}")
    for g, group in enumerate(coordinator.spec.groups):
        table = coordinator.tables.table(g)
        lo, hi, at = t.lo[g][:, None], t.hi[g][:, None], np.arange(table.shape[1])
        inside = (at >= lo) & (at < hi)
        for row in indices((t.phase == _FREE) & (t.hi[g] > 0)):
            yield Violation("I27", f"{group.name} row {row}: free but holds blocks")
        for row in indices(((table != 0) & ~inside).any(1)):
            yield Violation("I15", f"{group.name} row {row}: an id outside the held entries")
        rows = coordinator.pools.arrays.meta[g, _ROWS]
        for row in indices((((table <= 0) | (table >= rows)) & inside).any(1)):
            yield Violation("I15", f"{group.name} row {row}: a held entry is null or outside the pool")
        for row in taken:
            held = table[row, t.lo[g, row] : t.hi[g, row]]
            if len(set(held.tolist())) != len(held):
                yield Violation("I16", f"{group.name} row {row}: a block holds two places of one request")
            elif len(held) and held.min() > 0 and held.max() < rows:
                yield from _audit_written(f"{group.name} row {row}", coordinator, g, int(row), held)
            computed, bt = int(t.computed[row]), group.block_tokens
            first, end = group.attention.first_visible(computed) // bt, -(-computed // bt)
            if t.lo[g, row] > first or t.hi[g, row] < end:
                seen = f"[{t.lo[g, row]}, {t.hi[g, row]})"
                yield Violation("I15", f"{group.name} row {row}: blocks {seen} are held, [{first}, {end}) are seen")


def _audit_written(
    where: str, coordinator: Coordinator, g: int, row: int, held: npt.NDArray[np.int32]
) -> Iterator[Violation]:
    """Findable blocks of a row are full; the blocks it writes next belong to it alone and have no key."""
    t, a, bt = coordinator.tables.arrays, coordinator.pools.arrays, coordinator.spec.groups[g].block_tokens
    if t.phase[row] == _LOADING:
        return
    if (a.mark[a.meta[g, _BASE] + held] == _PENDING).any():
        yield Violation("I13", f"{where}: runs on a block that a transfer is still writing")
    filled = max(0, int(t.computed[row]) // bt - int(t.lo[g, row]))
    entries = a.meta[g, _BASE] + held[filled:]
    if (a.mark[entries] != _NONE).any():
        yield Violation("I13", f"{where}: findable, but not every slot is written")
    if (a.refs[entries] != 1).any():
        yield Violation("I16", f"{where}: a block that is still being filled has several owners")
    if (a.fence[entries] != 0).any():
        yield Violation("I17", f"{where}: a store still reads a block that is being filled")


def audit_quiet(
    coordinator: Coordinator, host: BlockPools | None, driver: Driver, transfers: list[Transfer]
) -> Iterator[Violation]:
    """Once all requests are gone and all copies have ended, nothing is held."""
    if transfers or driver.roster.running or driver.roster.waiting or driver.num_arrived:
        return
    if coordinator.remote is not None and coordinator.remote.moves():
        return
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        if pools is not None and (pools.held.any() or pools.column(Col.FENCED).any()):
            yield Violation("I27", f"{tier}: {pools.held.tolist()} blocks are held and nobody is left")
    if driver.roster.watched:
        yield Violation("I27", f"the ends of loads of {list(driver.roster.watched)} are awaited and nobody is left")
