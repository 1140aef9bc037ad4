"""The compiled search for requests whose preemption makes room.

Promises   the victims suffice as a set, and no victim can be left out. References in live records change during the
           search, and are as before at its end. Keeps I4, I10.
Does not   decide in which order requests are considered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.coordinator.needs import drop, promised, undrop
from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.row_state import Geo
from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.pool_state import Col
from kvtier.pools.slab_loops import fits, live

_BASE, _KIND, _FULL = int(Col.BASE), int(Geo.KIND), int(Kind.FULL)
_U = np.uint64


@inlined
def _keep(p: Any, t: Any, device: Any, counts: Any, by: Any) -> None:
    """With ``by`` 1 the blocks of a hit in full-attention groups get one more holder, which stays. -1 takes it back.

    Windows and chunks are not kept: the new request needs as many blocks of its own, which may be the same blocks.
    """
    k = 0
    for g in range(len(counts)):
        for _ in range(counts[g]):
            if device[k] and t.geometry[g, _KIND] == _FULL:
                p.blocks[_U(p.meta[g, _BASE] + device[k])].refs += by
            k += 1


@inlined
def _leave(p: Any, t: Any, r: Any, among: Any, held: Any) -> None:
    """Counts as if row r had left: held[G] is without the blocks that this frees, and among[r] without r."""
    among[r] = 0
    for g in range(len(held)):
        _, free = drop(p, t, g, r)
        held[g] -= free


@inlined
def _return(p: Any, t: Any, r: Any, among: Any, held: Any) -> None:
    """Takes a ``_leave`` back."""
    among[r] = 1
    for g in range(len(held)):
        held[g] += undrop(p, t, g, r)


@inlined
def _fit(p: Any, t: Any, promises: Any, among: Any, held: Any, total: Any) -> Any:
    """Whether held[G] blocks fit, with ``promises`` beside the blocks promised to the rows ``among``."""
    total[:] = 0
    if promises:
        promised(p, t, among, total)
    for g in range(len(held)):
        total[g] += held[g]
    return fits(p.meta, len(p.slabs), total)


@jit
def choose_victims(
    p: Any,
    t: Any,
    victims: Any,
    want: Any,
    device: Any,
    counts: Any,
    promises: Any,
    chosen: Any,
    among: Any,
    held: Any,
    total: Any,
) -> Any:
    """Which of the rows ``victims``, taken in order, must give up their blocks so that want[G] more can be taken.

    The blocks must fit with ``promises`` beside the blocks promised to the rows that stay. Sets chosen[k], 0 or 1.

    Counts the blocks that the *set* frees: two victims that share a block free it together, neither alone. Blocks of
    the hit (``device`` and ``counts``, as for ``admission_need``) stay held in full-attention groups, and want[G] does
    not count them there. A victim is spared if the others suffice. False, and none chosen, if all together do not
    suffice.
    """
    for g in range(len(held)):
        held[g] = live(p.meta, g) + want[g]
    chosen[:] = 0
    among[:] = 1
    _keep(p, t, device, counts, 1)
    visited, enough = 0, False
    while visited < len(victims) and not enough:
        _leave(p, t, np.int64(victims[visited]), among, held)
        chosen[visited] = 1
        visited += 1
        enough = _fit(p, t, promises, among, held, total)
    for v in range(visited):
        _return(p, t, np.int64(victims[v]), among, held)
        if enough and not _fit(p, t, promises, among, held, total):
            _leave(p, t, np.int64(victims[v]), among, held)
        else:
            chosen[v] = 0
    for v in range(visited):
        if chosen[v]:
            _return(p, t, np.int64(victims[v]), among, held)
    _keep(p, t, device, counts, -1)
    return enough
