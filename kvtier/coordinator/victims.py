"""The compiled search for requests whose preemption makes room.

Promises   what is chosen suffices as a set, and without any of it the rest does not. Changes nothing. Keeps I4, I10.
Does not   decide in which order requests are considered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier._jit import inlined, jit
from kvtier.coordinator.needs import promised_to
from kvtier.gpu_pool.pool_state import Col
from kvtier.gpu_pool.row_state import Geo, row_at
from kvtier.gpu_pool.slab_loops import fits, live
from kvtier.spec import Kind

_BASE, _KIND, _FULL = int(Col.BASE), int(Geo.KIND), int(Kind.FULL)
_U = np.uint64


@inlined
def _drop(
    meta: Any, blocks: Any, geometry: Any, table: Any, span: Any, state: Any, r: Any, promises: Any, gained: Any
) -> None:
    """Counts row r's blocks as given up, and adds those that this frees to gained[G]; with ``promises`` those as well
    that it was still to take.

    A block that an overdue store may still read frees nothing: it would be quarantined.
    """
    for g in range(len(gained)):
        at = row_at(geometry, g, r)
        for j in range(span[r, g, 0], span[r, g, 1]):
            block = blocks[_U(meta[g, _BASE] + table[_U(at + j)])]
            block.refs -= 1
            gained[g] += block.refs == 0 and block.fence >= 0
        if promises:
            gained[g] += promised_to(geometry, span, state, g, r)


@inlined
def _undrop(
    meta: Any, blocks: Any, geometry: Any, table: Any, span: Any, state: Any, r: Any, promises: Any, lost: Any
) -> None:
    """Takes a ``_drop`` back; lost[G] is what the others that are dropped then free less."""
    lost[:] = 0
    for g in range(len(lost)):
        at = row_at(geometry, g, r)
        for j in range(span[r, g, 0], span[r, g, 1]):
            block = blocks[_U(meta[g, _BASE] + table[_U(at + j)])]
            lost[g] += block.refs == 0 and block.fence >= 0
            block.refs += 1
        if promises:
            lost[g] += promised_to(geometry, span, state, g, r)


@inlined
def _hold(meta: Any, blocks: Any, geometry: Any, device: Any, counts: Any, by: Any) -> None:
    """Changes by how many the blocks of a hit in full-attention groups are held."""
    k = 0
    for g in range(len(counts)):
        for _ in range(counts[g]):
            if device[k] and geometry[g, _KIND] == _FULL:
                blocks[_U(meta[g, _BASE] + device[k])].refs += by
            k += 1


@jit
def choose_victims(
    p: Any, t: Any, victims: Any, want: Any, device: Any, counts: Any, promises: Any, chosen: Any, total: Any, lost: Any
) -> Any:
    """Which of ``victims``, taken in order, must give up their blocks so that want[G] more can be taken: sets
    chosen[k], 0 or 1.

    Counts the blocks that the *set* frees: one that two victims share is freed by both together, by neither alone, and
    one of the hit (``device`` and ``counts``, as for ``admission_need``) by nobody, since want[G] is without it. With
    ``promises`` want[G] has what rows were still to take, and nobody needs that of a victim any more.
    A victim without whom the others suffice is spared. False, and none chosen, if all together do not suffice.
    """
    meta, blocks, geometry, table, span, state = p.meta, p.blocks, t.geometry, t.table, t.span, t.state
    num_slabs = len(p.slabs)
    for g in range(len(meta)):
        total[g] = live(meta, g) + want[g]
    chosen[:] = 0
    _hold(meta, blocks, geometry, device, counts, 1)
    visited, enough = 0, False
    while visited < len(victims) and not enough:
        lost[:] = 0
        _drop(meta, blocks, geometry, table, span, state, victims[visited], promises, lost)
        for g in range(len(meta)):
            total[g] -= lost[g]
        chosen[visited] = 1
        visited += 1
        enough = fits(meta, num_slabs, total)
    for v in range(visited):
        _undrop(meta, blocks, geometry, table, span, state, victims[v], promises, lost)
        for g in range(len(meta)):
            total[g] += lost[g]
        if enough and not fits(meta, num_slabs, total):
            lost[:] = 0
            _drop(meta, blocks, geometry, table, span, state, victims[v], promises, lost)
            for g in range(len(meta)):
                total[g] -= lost[g]
        else:
            chosen[v] = 0
    for v in range(visited):
        if chosen[v]:
            _undrop(meta, blocks, geometry, table, span, state, victims[v], promises, lost)
    _hold(meta, blocks, geometry, device, counts, -1)
    return enough
