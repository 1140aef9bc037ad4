"""Which objects a text is made of in a remote: tiles of its full-attention blocks, and what a hit at its end needs.

Owns       the cut of texts into objects.
Promises   the same tokens make the same objects in every process with the same geometry. An object has ``least_bytes``
           at least, except the one at a text's end. What a hit needs is a function of its boundary.
Does not   know what is stored.

Blocks of at least ``least_bytes`` are objects by themselves ("b0" is one of group 0). Smaller ones are packed:

    "t"   a tile: the small blocks of all full-attention groups for ``tile_tokens`` tokens, named by the key at its end
    "e"   an end: the small blocks that a hit at boundary n needs beyond its tiles. These follow the last tile, or are
          of windows and chunks. Named by the key at n
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.geometry.keys import KeyArray
from kvtier.geometry.kinds import Attention, Kind
from kvtier.pools.block_pool import Ids, Words

LEAST_BYTES = 256 * 1024

Indices = npt.NDArray[np.int64]


Name = tuple[str, bytes]
"""Kind and key of an object: unlike those of any other object of the same namespace."""


@dataclass(frozen=True, eq=False)
class Objects:
    """Some objects, with their blocks one after the other.

    Block i is of group ``groups[i]``, int32 [n], and has the key ``keys[i]``, uint64 [n, 2]. It is in object ``of[i]``,
    int32 [n], ascending. Each object has a block.
    """

    names: Sequence[Name]
    of: Ids
    groups: Ids
    keys: Words

    def __len__(self) -> int:
        return len(self.names)

    def have(self, blocks: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """bool [objects]: which of them have a block among these, bool [n]."""
        found = np.zeros(len(self), bool)
        found[self.of[blocks]] = True
        return found

    def only(self, wanted: npt.NDArray[np.bool_]) -> Objects:
        """The objects that are wanted, bool [objects]."""
        if wanted.all():
            return self
        blocks = wanted[self.of]
        of = (np.cumsum(wanted, dtype=np.int32) - np.int32(1))[self.of[blocks]]
        names = [name for name, is_wanted in zip(self.names, wanted.tolist(), strict=True) if is_wanted]
        return Objects(names, of, self.groups[blocks], self.keys[blocks])

    @staticmethod
    def joined(parts: Sequence[Objects]) -> Objects:
        """All of them, in order."""
        if len(parts) == 1:
            return parts[0]
        names = [name for part in parts for name in part.names]
        before = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)
        of = [part.of + n for part, n in zip(parts, before, strict=False)]
        empty = Objects([], np.empty(0, np.int32), np.empty(0, np.int32), _NO_KEYS)
        groups, keys = [part.groups for part in (empty, *parts)], [part.keys for part in (empty, *parts)]
        return Objects(names, np.concatenate([empty.of, *of]), np.concatenate(groups), np.concatenate(keys))


_NO_KEYS = np.empty((0, 2), np.uint64)
_ALL = 2**31


class KeptGroup(Protocol):
    """A group, as far as the cut of texts is concerned."""

    @property
    def attention(self) -> Attention:
        """What the group's queries see."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""


class KeptSpec(Protocol):
    """The groups of a cache, or of an engine with memory of its own."""

    @property
    def groups(self) -> Sequence[KeptGroup]:
        """The groups in the order of the pools."""

    @property
    def hash_tokens(self) -> int:
        """Tokens of a key."""

    @property
    def hit_tokens(self) -> int:
        """A hit is a multiple of it."""


_Groups = list[tuple[int, KeptGroup]]


class ObjectPlan:
    """The cut of texts of a cache with these groups."""

    def __init__(self, spec: KeptSpec, least_bytes: int | None = None) -> None:
        least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self.unit = spec.hit_tokens
        """Hits are multiples of it."""
        self.link = spec.hash_tokens
        """Tokens of a key."""
        self._groups = list(enumerate(spec.groups))
        small = [(g, of) for g, of in self._groups if of.block_bytes < least_bytes]
        self.big = [(g, of) for g, of in self._groups if of.block_bytes >= least_bytes]
        """Groups, by number, whose blocks are objects by themselves: those that attend to everything, and others."""
        self.big_full, self.big_local = _by_kind(self.big)
        self._tiled, self.small_local = _by_kind(small)
        a_unit = sum(of.block_bytes * (self.unit // of.block_tokens) for _, of in self._tiled)
        self.tile_tokens = self.unit * max(1, -(-least_bytes // a_unit)) if a_unit else 0
        """Tokens of a tile; 0 if nothing is tiled."""
        self.has_ends = bool(small) and (self.tile_tokens != self.unit or bool(self.small_local))
        """Whether hits need an "e" object, unless it would be empty."""

    @property
    def signature(self) -> list[str | int]:
        """All that the cut of texts depends on, beside the groups."""
        return ["tile", self.tile_tokens, *(f"b{g}" for g, _ in self.big)]

    def most_with(self, reach: int) -> int:
        """The longest boundary whose tiles end at ``reach`` or before."""
        if not self.tile_tokens:
            return reach
        return reach // self.tile_tokens * self.tile_tokens + self.tile_tokens - self.unit

    def needs_end(self, n: int) -> bool:
        """Whether a hit at boundary n needs small blocks beyond its tiles."""
        has_rest = self.tile_tokens > 0 and n % self.tile_tokens != 0
        return has_rest or any(first < end for first, end in (_seen(of, n) for _, of in self.small_local))

    def end(self, keys: KeyArray, n: int) -> Objects:
        """What a hit at boundary n needs of small blocks beyond its tiles (``needs_end``)."""
        start = n // self.tile_tokens * self.tile_tokens if self.tile_tokens else n
        parts = [(g, start // of.block_tokens, n // of.block_tokens) for g, of in self._tiled]
        parts += [(g, *_seen(of, n)) for g, of in self.small_local]
        found = [(g, self._block_keys(keys, g, first, end)) for g, first, end in parts if end > first]
        groups = np.repeat(np.array([g for g, _ in found], np.int32), [len(of) for _, of in found])
        return Objects(
            [self._end_name(keys, n)], np.zeros_like(groups), groups, np.concatenate([of for _, of in found])
        )

    def named(self, kind: str, keys: KeyArray) -> Objects:
        """The object of this kind that has its name from the last of these keys, uint64 [units, 2], all of a text's."""
        n = len(keys) * self.link
        if kind == "e":
            return self.end(keys, n)
        if kind == "t":
            return self._tiles(keys, n // self.tile_tokens - 1, n // self.tile_tokens)
        found = np.ascontiguousarray(keys[-1:])
        return Objects(_named(kind, found), np.zeros(1, np.int32), np.array([int(kind[1:])], np.int32), found)

    def _end_name(self, keys: KeyArray, n: int) -> Name:
        return "e", self._key(keys, n)

    @property
    def kinds(self) -> list[str]:
        """The kinds of all objects."""
        return ["t", "e", *(f"b{g}" for g, _ in self.big)]

    def all_names(self, keys: KeyArray) -> list[Name]:
        """Names of all objects that any hit on this text may need."""
        steps = [("t", self.tile_tokens), ("e", self.unit if self.has_ends else 0)]
        steps += [(f"b{g}", of.block_tokens) for g, of in self.big]
        cut = [(kind, step // self.link) for kind, step in steps if step]
        return [name for kind, units in cut for name in _named(kind, keys[units - 1 :: units])]

    def last_blocks(self, keys: KeyArray, n: int) -> tuple[Ids, KeyArray]:
        """The last block before boundary n of each group: groups, int32 [n], and keys."""
        at = [(g, n // of.block_tokens * (of.block_tokens // self.link) - 1) for g, of in self._groups]
        found = [(g, i) for g, i in at if i >= 0]
        return np.array([g for g, _ in found], np.int32), keys[np.array([i for _, i in found], np.int64)]

    def parts(self, keys: KeyArray, n: int, most: int = _ALL) -> Iterator[Objects]:
        """All objects that a hit at boundary n of the text with these keys, uint64 [units, 2], needs.

        ``most`` of them at a time.
        """
        for first, end in _slices(0, n // self.tile_tokens if self.tile_tokens else 0, most):
            yield self._tiles(keys, first, end)
        for g, of in self.big:
            first, last = (0, n // of.block_tokens) if of.attention.kind is Kind.FULL else _seen(of, n)
            for at, end in _slices(first, last, most):
                found = np.ascontiguousarray(self._block_keys(keys, g, at, end))
                each, groups = np.arange(len(found), dtype=np.int32), np.full(len(found), g, np.int32)
                yield Objects(_named(f"b{g}", found), each, groups, found)
        if self.needs_end(n):
            yield self.end(keys, n)

    def of_hit(self, keys: KeyArray, n: int) -> Objects:
        """All objects of the hit at once."""
        return Objects.joined(list(self.parts(keys, n)))

    def _tiles(self, keys: KeyArray, first: int, end: int) -> Objects:
        """Each tile has its blocks of one group after those of another."""
        per_tile, count = [(g, self.tile_tokens // of.block_tokens) for g, of in self._tiled], end - first
        found = [self._block_keys(keys, g, first * n, end * n).reshape(count, n, 2) for g, n in per_tile]
        in_one = np.repeat(np.array([g for g, _ in per_tile], np.int32), [n for _, n in per_tile])
        of = np.repeat(np.arange(count, dtype=np.int32), len(in_one))
        units = self.tile_tokens // self.link
        names = _named("t", keys[(first + 1) * units - 1 : end * units : units])
        return Objects(names, of, np.tile(in_one, count), np.concatenate(found, axis=1).reshape(-1, 2))

    @property
    def has_full(self) -> bool:
        """Whether a group attends to everything."""
        return any(of.attention.kind is Kind.FULL for _, of in self._groups)

    @property
    def stride(self) -> int:
        """Boundaries at which tiles and big full-attention blocks end are multiples of it."""
        return self.tile_tokens or self.unit

    def names_at(self, keys: KeyArray, n: int) -> list[Name]:
        """The tile, and the big full-attention blocks, that end at boundary n, a multiple of ``stride``."""
        key = self._key(keys, n)
        big = [f"b{g}" for g, _ in self.big_full]
        return [(kind, key) for kind in (["t", *big] if self.tile_tokens and n % self.tile_tokens == 0 else big)]

    def signs_of_end(self, keys: KeyArray, n: int) -> list[Name]:
        """Names that are there if a hit at boundary n is; none if its tiles and full-attention blocks tell all.

        Of a window of big blocks the first and the last: the boundary before one that is stored has the last.
        """
        if self.needs_end(n):
            return [self._end_name(keys, n)]
        spans = [(g, of.block_tokens, *_seen(of, n)) for g, of in self.big_local]
        both = [(g, bt, j) for g, bt, first, end in spans if first < end for j in sorted({first, end - 1})]
        return [(f"b{g}", self._key(keys, (j + 1) * bt)) for g, bt, j in both]

    def tiles_of(self, n: int) -> int:
        """The tokens of a hit at boundary n that its tiles have."""
        return n // self.tile_tokens * self.tile_tokens if self.tile_tokens else n

    def _key(self, keys: KeyArray, n: int) -> bytes:
        key: bytes = keys[n // self.link - 1].tobytes()
        return key

    def _block_keys(self, keys: KeyArray, g: int, first: int, end: int) -> KeyArray:
        units = self._groups[g][1].block_tokens // self.link
        return keys[(first + 1) * units - 1 : end * units : units]


def _by_kind(groups: _Groups) -> tuple[_Groups, _Groups]:
    """The groups that attend to everything, and the others."""
    full = [(g, of) for g, of in groups if of.attention.kind is Kind.FULL]
    return full, [(g, of) for g, of in groups if of.attention.kind is not Kind.FULL]


def _seen(of: KeptGroup, n: int) -> tuple[int, int]:
    """The blocks of a local group that a hit at boundary n needs: the first, and the end."""
    return of.attention.first_visible(n) // of.block_tokens, n // of.block_tokens


def _slices(first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + most, end)) for at in range(first, end, most))


def _named(kind: str, keys: KeyArray) -> list[Name]:
    data = keys.tobytes()
    return [(kind, data[at : at + 16]) for at in range(0, len(data), 16)]
