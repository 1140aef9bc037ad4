"""How much of a prompt is already there, over all groups and both tiers.

Promises   a hit is the largest multiple of hit_tokens, at most len - 1, that is a valid boundary of *every* group. At a
           valid boundary a group has all blocks that its mask needs, in either tier. So a hit is in an intersection of
           valid boundaries, never a minimum of per-group lengths (vLLM issue 46453). Changes nothing. Keeps I11.

Full-attention groups are searched forward to their first miss. From there downwards, the other groups are asked for the
blocks of each candidate boundary. A missing block rules out every boundary down to its own start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import Attention, Kind
from kvtier.gpu_pool.row_state import Geo, first_block
from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.block_pool import BlockPools, Col, Ids, Mark
from kvtier.pools.key_index import find

_BT, _KIND, _UNITS = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Geo.UNITS)
_FULL = int(Kind.FULL)
_BASE, _PENDING = int(Col.BASE), int(Mark.PENDING)
_U = np.uint64


@dataclass(frozen=True)
class Match:
    """A hit: the blocks of every group that a row of ``num_tokens`` cached tokens starts with.

    ``first[g]`` is the first logical block of group g that the boundary needs, ``counts[g]`` how many it needs.
    ``device`` and ``host`` are int32 arrays of equal length, group after group. They give the block of each tier that
    has the content, 0 if none. At least one of the two is not 0. ``pending`` tells that a transfer is still writing
    some of it. ``limited_by`` names the group that kept the hit from being longer, "" if none did. ``full_tokens`` is
    the boundary that the full-attention groups alone would have allowed: content shared with others ends about there.
    ``missing_from`` is the first token of a block that ``limited_by`` lacked, the block of its highest failed boundary;
    -1 if none did.
    """

    num_tokens: int
    full_tokens: int
    first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    device: Ids
    host: Ids
    pending: bool
    limited_by: str = ""
    missing_from: int = -1

    @cached_property
    def groups(self) -> Ids:
        """The group of each block."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @cached_property
    def at(self) -> npt.NDArray[np.int64]:
        """The logical block of each, in its group."""
        before = np.cumsum(self.counts) - self.counts
        at: npt.NDArray[np.int64] = (self.first - before)[self.groups] + np.arange(len(self.device))
        return at

    def of_group(self, g: int) -> tuple[Ids, Ids]:
        """Group g's part of ``device`` and ``host``."""
        mine = self.groups == g
        return self.device[mine], self.host[mine]


@inlined
def _probe(d: Any, h: Any, use_host: Any, g: Any, key: Any, at: Any) -> Any:
    """(device block, host block, whether it is only pending) of the key at position ``at``."""
    low, high = key[_U(2 * at)], key[_U(2 * at + 1)]
    b, c = find(d, g, low, high), np.int64(0)
    pending = b != 0 and d.blocks[_U(d.meta[g, _BASE] + b)].mark == _PENDING
    if b != 0 and not pending:
        return b, c, False
    if use_host:
        c = find(h, g, low, high)
        pending = pending or (c != 0 and h.blocks[_U(h.meta[g, _BASE] + c)].mark == _PENDING)
    return b, c, pending


@jit
def _match(
    d: Any, h: Any, use_host: Any, geometry: Any, key: Any, start: Any,
    bound: Any, unit: Any, room: Any, device: Any, host: Any,
) -> Any:
    """Searches for the largest valid boundary n in start..bound. All tokens before ``start`` are there.

    ``key`` is the chain, flat; ``start`` and ``bound`` are multiples of ``unit``. Writes the blocks that group g needs
    from ``start`` on to device[room[g]:] and host[room[g]:].

    Returns five values: n; the boundary of the full groups alone; the group that lowered it last, or -1. Then the first
    token of a block that this group lacked, and whether some of the hit is pending.
    """
    n, limiter, missing, pending_from = bound, -1, -1, bound
    for g in range(len(geometry)):
        if geometry[g, _KIND] != _FULL:
            continue
        bt, units = geometry[g, _BT], geometry[g, _UNITS]
        j = start // bt
        out = room[g] - j
        while (j + 1) * bt <= n:
            at = (j + 1) * units - 1
            b, c, waits = _probe(d, h, use_host, g, key, at)
            if b == 0 and c == 0:
                break
            device[_U(out + j)] = b
            host[_U(out + j)] = c
            if waits:
                pending_from = min(pending_from, j * bt)
            j += 1
        if (j * bt) // unit * unit < n:
            n, limiter, missing = (j * bt) // unit * unit, g, j * bt
    full, pending, settled = n, False, False
    while not settled:
        settled, pending = True, pending_from < n
        for g in range(len(geometry)):
            if geometry[g, _KIND] == _FULL:
                continue
            bt, units, out = geometry[g, _BT], geometry[g, _UNITS], room[g]
            first = max(first_block(geometry, g, n), start // bt)
            for j in range(first, n // bt):
                at = (j + 1) * units - 1
                b, c, waits = _probe(d, h, use_host, g, key, at)
                if b == 0 and c == 0:
                    missing = missing if limiter == g else j * bt
                    n, limiter, settled = (j * bt) // unit * unit, g, False
                    break
                device[_U(out + j - first)] = b
                host[_U(out + j - first)] = c
                pending = pending or waits
            if not settled:
                break
    return n, full, limiter, missing, pending


class Attending(Protocol):
    """A group, as far as a search is concerned."""

    @property
    def attention(self) -> Attention:
        """What its queries see."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""


class Groups(Protocol):
    """What a ``CacheSpec`` says of all groups."""

    @property
    def groups(self) -> Sequence[Attending]:
        """The groups, in the order of the pools."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the groups."""

    @property
    def hit_tokens(self) -> int:
        """A hit is a multiple of it."""


class Geometry(Protocol):
    """Arrays of which ``geometry`` is read."""

    @property
    def geometry(self) -> npt.NDArray[np.int64]:
        """int64 [groups, len(Geo)]."""


class Searched(Protocol):
    """The groups of a search: ``BlockTables``, or the groups of a ``HostTier``."""

    @property
    def spec(self) -> Groups:
        """The groups' attention and block sizes."""

    @property
    def arrays(self) -> Geometry:
        """The same as the loops read it."""


class Matcher:
    """Asks the pools of both tiers; ``host`` is None if there is no host tier."""

    def __init__(self, device: BlockPools, host: BlockPools | None) -> None:
        self._device = device
        self._host = host
        self._found = np.empty((2, 0), np.int32)

    def match(
        self,
        tables: Searched,
        keys: npt.NDArray[np.uint64],
        num_tokens: int,
        use_host: bool = True,
        start: int = 0,
    ) -> Match:
        """The longest hit for a request of ``num_tokens`` tokens with this key chain, uint64 [units, 2].

        At least one token is left to compute, since its logits are needed. The tokens before ``start``, a multiple of
        hit_tokens, are there already: the hit begins with them.
        """
        spec, h = tables.spec, self._host
        unit = spec.hit_tokens
        bound = max(start, (num_tokens - 1) // unit * unit)
        room = [0]
        for group in spec.groups:
            room.append(room[-1] + min(bound, group.attention.span_tokens or bound) // group.block_tokens + 1)
        if room[-1] > len(self._found[0]):
            self._found = np.empty((2, 2 * room[-1]), np.int32)
        device, host = self._found
        n, full, limiter, missing, pending = _match(
            self._device.arrays,
            self._device.arrays if h is None else h.arrays,
            use_host and h is not None,
            tables.arrays.geometry,
            keys.reshape(-1),
            start,
            bound,
            unit,
            np.array(room),
            device,
            host,
        )
        first = [max(group.attention.first_visible(n), start) // group.block_tokens for group in spec.groups]
        counts = [max(0, n // group.block_tokens - at) for group, at in zip(spec.groups, first, strict=True)]
        parts = [slice(at, at + count) for at, count in zip(room, counts, strict=False)] if n > start else [slice(0)]
        return Match(
            num_tokens=int(n),
            full_tokens=int(full),
            first=np.array(first, np.int64),
            counts=np.array(counts, np.int64),
            device=np.concatenate([device[part] for part in parts]),
            host=np.concatenate([host[part] for part in parts]),
            pending=pending,
            limited_by=spec.names[limiter] if limiter >= 0 else "",
            missing_from=int(missing),
        )
