"""How much of a prompt is already there, over all groups and both tiers.

Promises   the hit is the largest multiple of hit_tokens, at most len - 1, at which *every* group has all that its
           mask needs, in either tier: an intersection of valid boundaries, never a minimum of per-group lengths
           (vLLM issue 46453). Changes nothing. Keeps I11.

Full-attention groups are searched forward to their first miss; then, from there downwards, the other groups are
asked for what each candidate boundary needs. A missing block rules out every boundary down to its own start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier._jit import inlined, jit
from kvtier.gpu_pool.block_pool import BlockPools, Col, Mark
from kvtier.gpu_pool.block_table import BlockTables, Geo, first_block
from kvtier.gpu_pool.pool_loops import find
from kvtier.spec import Kind

_BT, _KIND, _SPAN, _UNITS = (int(c) for c in list(Geo)[:4])
_FULL, _WINDOW = int(Kind.FULL), int(Kind.WINDOW)
_BASE, _PENDING = int(Col.BASE), int(Mark.PENDING)


@dataclass(frozen=True)
class Match:
    """A hit: the blocks of every group that a row of ``num_tokens`` cached tokens starts with.

    ``first[g]`` is the first logical block of group g that the boundary needs; ``device[g]`` and ``host[g]`` are
    int32 arrays of equal length, parallel from there on: the block of each tier that has the content, 0 if none.
    At least one of the two is not 0. ``pending`` tells that a transfer is still writing some of it.
    ``limited_by`` names the group that kept the hit from being longer, "" if nothing did. ``full_tokens`` is the
    boundary that the full-attention groups alone would have allowed: content shared with others ends about there.
    """

    num_tokens: int
    full_tokens: int
    first: tuple[int, ...]
    device: tuple[npt.NDArray[np.int32], ...]
    host: tuple[npt.NDArray[np.int32], ...]
    pending: bool
    limited_by: str = ""

    @property
    def num_loads(self) -> npt.NDArray[np.int64]:
        """Blocks to load from the host, by group."""
        return np.array([int((blocks == 0).sum()) for blocks in self.device], np.int64)


@inlined
def _probe(d: Any, h: Any, has_host: Any, use_host: Any, g: Any, lo: Any, hi: Any) -> Any:
    """(device block, host block, 1 if only pending) of one key."""
    b = np.int64(find(d, g, lo, hi))
    device_pending = b != 0 and d.mark[d.meta[g, _BASE] + b] == _PENDING
    if b != 0 and not device_pending:
        return b, np.int64(0), 0
    c = np.int64(0)
    if has_host and use_host:
        c = np.int64(find(h, g, lo, hi))
    if b != 0:
        return b, c, 1
    if c != 0 and h.mark[h.meta[g, _BASE] + c] == _PENDING:
        return b, c, 1
    return b, c, 0


@jit
def _match(d: Any, h: Any, has_host: Any, use_host: Any, geometry: Any, keys: Any, bound: Any, unit: Any) -> Any:
    """(largest valid boundary <= bound, that of the full groups alone, group that lowered it last or -1)."""
    n, limiter = bound, -1
    for g in range(geometry.shape[0]):
        if geometry[g, _KIND] != _FULL:
            continue
        bt, units, j = geometry[g, _BT], geometry[g, _UNITS], 0
        while (j + 1) * bt <= n:
            at = (j + 1) * units - 1
            b, c, _ = _probe(d, h, has_host, use_host, g, keys[at, 0], keys[at, 1])
            if b == 0 and c == 0:
                break
            j += 1
        if (j * bt) // unit * unit < n:
            n, limiter = (j * bt) // unit * unit, g
    full, settled = n, False
    while not settled and n > 0:
        settled = True
        for g in range(geometry.shape[0]):
            if geometry[g, _KIND] == _FULL:
                continue
            bt, units = geometry[g, _BT], geometry[g, _UNITS]
            first = first_block(geometry, g, n)
            for j in range(first, n // bt):
                at = (j + 1) * units - 1
                b, c, _ = _probe(d, h, has_host, use_host, g, keys[at, 0], keys[at, 1])
                if b == 0 and c == 0:
                    n, limiter, settled = (j * bt) // unit * unit, g, False
                    break
            if not settled:
                break
    return n, full, limiter


@jit
def _collect(
    d: Any, h: Any, has_host: Any, use_host: Any, g: Any, units: Any, first: Any, keys: Any, device: Any, host: Any
) -> Any:
    pending = 0
    for k in range(len(device)):
        at = (first + k + 1) * units - 1
        b, c, waiting = _probe(d, h, has_host, use_host, g, keys[at, 0], keys[at, 1])
        device[k] = b
        host[k] = c
        pending |= waiting
    return pending


class Matcher:
    """Asks the pools of both tiers; ``host`` is None where there is no host tier."""

    def __init__(self, device: BlockPools, host: BlockPools | None) -> None:
        self._device = device
        self._host = host

    def match(self, tables: BlockTables, keys: npt.NDArray[np.uint64], num_tokens: int, use_host: bool = True) -> Match:
        """The longest hit for a request of ``num_tokens`` tokens with this key chain, uint64 [units, 2].

        At least one token is left to compute, since its logits are needed.
        """
        spec, geometry = tables.spec, tables.arrays.geometry
        unit = spec.hit_tokens
        bound = (num_tokens - 1) // unit * unit
        d = self._device.arrays
        h, has_host = (self._host.arrays, True) if self._host is not None else (d, False)
        n, full, limiter = _match(d, h, has_host, use_host, geometry, keys, bound, unit)
        first, device, host, pending = [], [], [], False
        for g, group in enumerate(spec.groups):
            start = group.attention.first_visible(n) // group.block_tokens
            count = max(0, n // group.block_tokens - start)
            found = np.zeros(count, np.int32), np.zeros(count, np.int32)
            if count:
                pending |= bool(_collect(d, h, has_host, use_host, g, int(geometry[g, Geo.UNITS]), start, keys, *found))
            first.append(start)
            device.append(found[0])
            host.append(found[1])
        name = spec.names[limiter] if limiter >= 0 else ""
        return Match(int(n), int(full), tuple(first), tuple(device), tuple(host), pending, name)
