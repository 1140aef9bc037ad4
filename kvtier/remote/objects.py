"""Which objects a text is made of in a store: tiles of its full-attention blocks, and what a hit at its end needs.

Owns       the cut of texts into objects.
Promises   the same tokens make the same objects in every process with the same geometry. An object has ``least_bytes``
           at least, except the one at a text's end. What a hit needs is a function of its boundary.
Does not   know what is stored.

Blocks of at least ``least_bytes`` are objects by themselves ("b0" is one of group 0). Smaller ones are packed:

    "t"   a tile: the small blocks of all full-attention groups for ``tile_tokens`` tokens, named by the key at its end
    "e"   an end: the small blocks that a hit at boundary n needs beyond its tiles: what follows the last tile, and the
          windows and chunks. Named by the key at n
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.keys import KeyArray
from kvtier.pools.block_pool import Ids, Words
from kvtier.spec import Attention, Kind

LEAST_BYTES = 256 * 1024

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StoredObject:
    """Blocks under one name: of ``groups``, int32 [n], with ``keys``, uint64 [n, 2], in this order."""

    kind: str
    key: bytes
    groups: Ids
    keys: Words

    @property
    def name(self) -> tuple[str, bytes]:
        """Unlike that of any other object of the same namespace."""
        return self.kind, self.key


Planned = tuple[tuple[str, bytes], Callable[[], StoredObject]]
"""An object's name, and what makes it."""


def _same(what: StoredObject) -> StoredObject:
    return what


class StoredGroup(Protocol):
    """A group, as far as the cut of texts is concerned."""

    @property
    def attention(self) -> Attention:
        """What its queries see."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""


class StoredSpec(Protocol):
    """The groups of a cache, or of an engine with memory of its own."""

    @property
    def groups(self) -> Sequence[StoredGroup]:
        """In the order of the pools."""

    @property
    def hash_tokens(self) -> int:
        """Tokens of a key."""

    @property
    def hit_tokens(self) -> int:
        """A hit is a multiple of it."""


class ObjectPlan:
    """The cut of texts of a cache with these groups."""

    def __init__(self, spec: StoredSpec, least_bytes: int | None = None) -> None:
        least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self.unit = spec.hit_tokens
        """Hits are multiples of it."""
        self.link = spec.hash_tokens
        """Tokens of a key."""
        self._groups = list(enumerate(spec.groups))
        small = [(g, of) for g, of in self._groups if of.block_bytes < least_bytes]
        self._big = [(g, of) for g, of in self._groups if of.block_bytes >= least_bytes]
        self._tiled = [(g, of) for g, of in small if of.attention.kind is Kind.FULL]
        self._local = [(g, of) for g, of in small if of.attention.kind is not Kind.FULL]
        a_unit = sum(of.block_bytes * (self.unit // of.block_tokens) for _, of in self._tiled)
        self.tile_tokens = self.unit * max(1, -(-least_bytes // a_unit)) if a_unit else 0
        """Tokens of a tile; 0 if nothing is tiled."""
        self.has_ends = bool(small) and (self.tile_tokens != self.unit or bool(self._local))
        """Whether hits need an "e" object, unless it would be empty."""

    @property
    def signature(self) -> list[str | int]:
        """What the cut of texts depends on beside their groups."""
        return ["tile", self.tile_tokens, *(f"b{g}" for g, _ in self._big)]

    def tile(self, keys: KeyArray, i: int) -> StoredObject:
        """Tile i of the text with these keys, uint64 [units, 2]."""
        start, end = i * self.tile_tokens, (i + 1) * self.tile_tokens
        parts = [(g, start // of.block_tokens, end // of.block_tokens) for g, of in self._tiled]
        return self._object("t", keys, end, parts)

    def tile_name(self, keys: KeyArray, i: int) -> tuple[str, bytes]:
        """The name of tile i."""
        return "t", self._key(keys, (i + 1) * self.tile_tokens)

    def most_with(self, reach: int) -> int:
        """The longest boundary whose tiles end at ``reach`` or before."""
        if not self.tile_tokens:
            return reach
        return reach // self.tile_tokens * self.tile_tokens + self.tile_tokens - self.unit

    def end(self, keys: KeyArray, n: int) -> StoredObject | None:
        """What a hit at boundary n needs of small blocks beyond its tiles; None if that is nothing."""
        start = n // self.tile_tokens * self.tile_tokens if self.tile_tokens else n
        parts = [(g, start // of.block_tokens, n // of.block_tokens) for g, of in self._tiled]
        parts += [
            (g, of.attention.first_visible(n) // of.block_tokens, n // of.block_tokens) for g, of in self._local
        ]
        found = self._object("e", keys, n, parts)
        return found if len(found.groups) else None

    def end_name(self, keys: KeyArray, n: int) -> tuple[str, bytes]:
        """The name that ``end`` would have."""
        return "e", self._key(keys, n)

    @property
    def kinds(self) -> list[str]:
        """Of all objects."""
        return ["t", "e", *(f"b{g}" for g, _ in self._big)]

    def planned(self, keys: KeyArray, n: int) -> Iterator[Planned]:
        """All objects that a hit at boundary n needs: their names, and what makes them."""
        for i in range(n // self.tile_tokens if self.tile_tokens else 0):
            yield self.tile_name(keys, i), partial(self.tile, keys, i)
        for g, of in self._big:
            bt = of.block_tokens
            first = 0 if of.attention.kind is Kind.FULL else of.attention.first_visible(n) // bt
            for j in range(first, n // bt):
                end, part = (j + 1) * bt, [(g, j, j + 1)]
                yield (f"b{g}", self._key(keys, end)), partial(self._object, f"b{g}", keys, end, part)
        if self.has_ends and (end_object := self.end(keys, n)) is not None:
            yield end_object.name, partial(_same, end_object)

    def names_of_hit(self, keys: KeyArray, n: int) -> Iterator[tuple[str, bytes]]:
        """Their names alone."""
        return (name for name, _ in self.planned(keys, n))

    @property
    def has_full(self) -> bool:
        """Whether a group attends to everything."""
        return any(of.attention.kind is Kind.FULL for _, of in self._groups)

    @property
    def stride(self) -> int:
        """Boundaries at which tiles and big full-attention blocks end are multiples of it."""
        return self.tile_tokens or self.unit

    def names_at(self, keys: KeyArray, n: int) -> list[tuple[str, bytes]]:
        """The tile, and the big full-attention blocks, that end at boundary n, a multiple of ``stride``."""
        key = self._key(keys, n)
        big = [f"b{g}" for g, of in self._big if of.attention.kind is Kind.FULL]
        return [(kind, key) for kind in (["t", *big] if self.tile_tokens and n % self.tile_tokens == 0 else big)]

    def signs_of_end(self, keys: KeyArray, n: int) -> list[tuple[str, bytes]]:
        """Names that are there if a hit at boundary n is; none if its tiles and full-attention blocks tell all."""
        if self.has_ends and self.end(keys, n) is not None:
            return [self.end_name(keys, n)]
        local = [(g, of) for g, of in self._big if of.attention.kind is not Kind.FULL]
        needed = [(g, of) for g, of in local if of.attention.first_visible(n) // of.block_tokens < n // of.block_tokens]
        return [(f"b{g}", self._key(keys, n // of.block_tokens * of.block_tokens)) for g, of in needed]

    def tiles_of(self, n: int) -> int:
        """The tokens of a hit at boundary n that its tiles have."""
        return n // self.tile_tokens * self.tile_tokens if self.tile_tokens else n

    def of_hit(self, keys: KeyArray, n: int) -> Iterator[StoredObject]:
        """All objects that a hit at boundary n needs."""
        return (make() for _, make in self.planned(keys, n))

    def _key(self, keys: KeyArray, n: int) -> bytes:
        key: bytes = keys[n // self.link - 1].tobytes()
        return key

    def _object(self, kind: str, keys: KeyArray, n: int, parts: list[tuple[int, int, int]]) -> StoredObject:
        groups = np.repeat(np.array([g for g, _, _ in parts], np.int32), [max(0, b - a) for _, a, b in parts])
        named = [self._block_keys(keys, g, a, b) for g, a, b in parts if b > a]
        found = np.concatenate(named) if named else np.empty((0, 2), np.uint64)
        return StoredObject(kind, self._key(keys, n), groups, np.ascontiguousarray(found))

    def _block_keys(self, keys: KeyArray, g: int, first: int, end: int) -> KeyArray:
        units = self._groups[g][1].block_tokens // self.link
        return keys[(first + 1) * units - 1 : end * units : units]
