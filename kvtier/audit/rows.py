"""The audit of rows (I2, I13, I15 - I17, I23, I27)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.audit.pools import Violation, distinct, indices
from kvtier.coordinator.coordinator import Coordinator
from kvtier.cpu_offload.transfer import Transfer
from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.row_state import Geo, Phase
from kvtier.pools.block_pool import BlockPools, Col, Mark

if TYPE_CHECKING:
    from kvtier.coordinator.core import Driver

_FREE, _LOADING, _LAST_PHASE = int(Phase.FREE), int(Phase.LOADING), int(max(Phase))
_NONE, _PENDING = int(Mark.NONE), int(Mark.PENDING)
_BASE, _ROWS = int(Col.BASE), int(Col.ROWS)
_OF_SPEC = Geo.BLOCK_TOKENS, Geo.KIND, Geo.SPAN, Geo.UNITS


def audit_geometry(coordinator: Coordinator) -> Iterator[Violation]:
    """The rows' arrays have the form that the spec gives them."""
    t, spec, geometry = coordinator.tables.arrays, coordinator.spec, coordinator.tables.arrays.geometry.tolist()
    end = 0
    is_divided = True
    for row, group in zip(geometry, spec.groups, strict=True):
        kind = group.attention
        expected = group.block_tokens, int(kind.kind), kind.span_tokens, group.block_tokens // spec.hash_tokens
        for column, number in zip(_OF_SPEC, expected, strict=True):
            if row[column] != number:
                yield Violation("I23", f"{group.name}: {column.name} is {row[column]}, the spec says {number}")
        is_divided = is_divided and row[Geo.WIDTH] >= 0 and row[Geo.OFFSET] == end
        end += row[Geo.WIDTH] * coordinator.tables.num_rows
    if not is_divided or end != len(t.table):
        yield Violation("I15", f"the tables of the groups do not divide up the {len(t.table):,} entries")


def audit_rows(coordinator: Coordinator) -> Iterator[Violation]:
    """Each group's table: held blocks are inside the pool, once; everything else is null."""
    t = coordinator.tables.arrays
    phase, computed = t.phase, t.computed
    taken = indices(phase != _FREE).tolist()
    for row in indices((phase < 0) | (phase > _LAST_PHASE)):
        yield Violation("I2", f"row {row}: there is no phase {phase[row]}")
    for g, group in enumerate(coordinator.spec.groups):
        table, lo, hi = coordinator.tables.table(g), t.span[:, g, 0], t.span[:, g, 1]
        at = np.arange(table.shape[1])
        inside = (at >= lo[:, None]) & (at < hi[:, None])
        for row in indices((phase == _FREE) & (hi > 0)):
            yield Violation("I27", f"{group.name} row {row}: free but holds blocks")
        for row in distinct(((table != 0) & ~inside).nonzero()[0]):
            yield Violation("I15", f"{group.name} row {row}: an id outside the held entries")
        of, place = (inside & (phase != _FREE)[:, None]).nonzero()
        held, rows = table[of, place], int(coordinator.pools.arrays.meta[g, _ROWS])
        if group.attention.kind is Kind.STATE:
            yield from _audit_gaps(coordinator, g, taken)
            of, place, held = of[held != 0], place[held != 0], held[held != 0]
        wrong = (held <= 0) | (held >= rows)
        for row in distinct(of[wrong]):
            yield Violation("I15", f"{group.name} row {row}: a held entry is null or outside the pool")
        both = np.sort(of * np.int64(1 << 32) + held)
        for row in distinct(both[1:][both[1:] == both[:-1]] >> 32):
            yield Violation("I16", f"{group.name} row {row}: a block holds two places of one request")
        which = ~wrong & (phase != _LOADING)[of]
        of, place, held = of[which], place[which], held[which]
        yield from _audit_written(coordinator, g, of, held, place >= (computed // group.block_tokens)[of])
        spans = zip(taken, lo[taken].tolist(), hi[taken].tolist(), computed[taken].tolist(), strict=True)
        for row, low, high, tokens in spans:
            first, end = group.attention.first_visible(tokens) // group.block_tokens, -(-tokens // group.block_tokens)
            if low > first or high < end:
                yield Violation(
                    "I15", f"{group.name} row {row}: blocks [{low}, {high}) are held, [{first}, {end}) are seen"
                )


def _audit_gaps(coordinator: Coordinator, g: int, taken: list[int]) -> Iterator[Violation]:
    """A row of states has the one that it goes on from, the one of its last boundary, and a block to write to."""
    t, name, bt = coordinator.tables.arrays, coordinator.spec.groups[g].name, coordinator.spec.groups[g].block_tokens
    for row in taken:
        lo, hi, computed = int(t.lo[g, row]), int(t.hi[g, row]), int(t.computed[row])
        needed = {(computed - 1) // bt, max(0, computed - 1) // bt - 1, hi - 1}
        for j in sorted(j for j in needed if lo <= j < hi):
            if coordinator.tables.table(g)[row, j] == 0:
                yield Violation("S5", f"{name} row {row}: no state where block {j} should be, after {computed} tokens")


def _audit_written(
    coordinator: Coordinator, g: int, of: npt.NDArray[Any], held: npt.NDArray[np.int32], is_ahead: npt.NDArray[np.bool_]
) -> Iterator[Violation]:
    """Findable blocks of a row are full; the blocks it writes next belong to it alone and have no key.

    ``held[i]`` is a block of row ``of[i]``, which runs; ``is_ahead``: not all of it is written.
    """
    a, name = coordinator.pools.arrays, coordinator.spec.groups[g].name
    entries = int(a.meta[g, _BASE]) + held
    mark = a.mark[entries]
    for invariant, what, broken in (
        ("I13", "runs on a block that a transfer is still writing", mark == _PENDING),
        ("I13", "findable, but not every slot is written", is_ahead & (mark != _NONE)),
        ("I16", "a block that is still being filled has several owners", is_ahead & (a.refs[entries] != 1)),
        ("I17", "a store still reads a block that is being filled", is_ahead & (a.fence[entries] != 0)),
    ):
        for row in distinct(of[broken]):
            yield Violation(invariant, f"{name} row {row}: {what}")


def audit_quiet(
    coordinator: Coordinator, host: BlockPools | None, driver: Driver, transfers: list[Transfer]
) -> Iterator[Violation]:
    """Once all requests are gone and all copies have ended, nothing is held."""
    if transfers or driver.roster.running or driver.roster.waiting or driver.num_arrived:
        return
    if (remote := coordinator.door.remote) is not None and remote.moves():
        return
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        if pools is not None and (pools.held.any() or pools.column(Col.FENCED).any()):
            yield Violation("I27", f"{tier}: {pools.held.tolist()} blocks are held and nobody is left")
    if driver.roster.watched:
        yield Violation("I27", f"the ends of loads of {list(driver.roster.watched)} are awaited and nobody is left")
