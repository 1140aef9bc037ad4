"""Moves as a store sees them: names as text, host blocks as buffers, a trailer behind each object.

Promises   bytes go straight from and to the host tier. A fetched object is checked on the store's own thread, whole,
           before anybody hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.pools.block_pool import Ids
from kvtier.remote.block_store import DAMAGED, BlockStore
from kvtier.remote.envelope import TRAILER_BYTES, Envelope
from kvtier.remote.moves import Move
from kvtier.remote.names import object_name
from kvtier.remote.objects import Name

T = TypeVar("T")


class _Made(Sequence[T]):
    """``make(k)`` for each k, once it is asked for: on a thread of the store, which alone asks for this k."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count = count
        self._make = make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, k: int) -> T: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[T]: ...
    def __getitem__(self, k: int | slice) -> T | Sequence[T]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(self._count))]
        if not 0 <= k < self._count:
            raise IndexError(k)
        if k not in self._made:
            self._made[k] = self._make(k)
        return self._made[k]


class Wire:
    """Between one host tier and stores of one namespace."""

    def __init__(self, tier: TierMemory, namespace: bytes, secret: bytes | None) -> None:
        """``secret``: keys a digest in each trailer, for stores that others can write to."""
        _, host = tier.arenas
        self._tier = tier
        self._memory = host.bytes.data
        self._arena = host
        self._namespace = namespace
        self._envelope = Envelope(namespace, secret)
        self.block_bytes = host.block_bytes

    def register(self, store: BlockStore) -> None:
        """Makes the host tier's memory known to a store."""
        store.register(self._memory)

    def text(self, name: Name) -> str:
        """An object's name in the store."""
        return object_name(self._namespace, *name)

    def look(self, store: BlockStore, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Asks which objects are there."""
        store.look(ticket, self._texts(names), within_s)

    def delete(self, store: BlockStore, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Forgets objects."""
        store.delete(ticket, self._texts(names), within_s)

    def put(self, store: BlockStore, move: Move, within_s: float) -> None:
        """Stores a spill's objects."""
        starts = _starts(move.of, len(move.objects))

        def buffers(k: int) -> list[memoryview]:
            mine = slice(starts[k], starts[k + 1])
            return [*self._blocks(move.groups[mine], move.hosts[mine]), memoryview(bytearray(TRAILER_BYTES))]

        objects = _Made(len(move.objects), buffers)

        def before(k: int) -> None:
            (kind, key), mine = move.objects.names[k], slice(starts[k], starts[k + 1])
            changed = self._tier.changed_in_host(move.groups[mine], move.hosts[mine])
            if changed:
                raise ValueError(f"{changed} blocks of the host tier have changed since they were stored")
            self._envelope.seal(key, kind, objects[k][:-1], objects[k][-1])

        store.put(move.ticket, self._texts(move.objects.names), objects, within_s, before)

    def get(self, store: BlockStore, move: Move, absent: npt.NDArray[np.bool_], within_s: float) -> None:
        """Reads a fetch's objects. Blocks that are here already are read aside, for the checksum."""
        starts, all_starts = _starts(move.of, len(move.objects)), _starts(move.objects.of, len(move.objects))

        def buffers(k: int) -> list[memoryview]:
            mine, whole = slice(starts[k], starts[k + 1]), slice(all_starts[k], all_starts[k + 1])
            views = iter(self._blocks(move.groups[mine], move.hosts[mine]))
            sizes = self.block_bytes[move.objects.groups[whole]].tolist()
            parts = [
                next(views) if comes else memoryview(bytearray(size))
                for comes, size in zip(absent[whole].tolist(), sizes, strict=True)
            ]
            return [*parts, memoryview(bytearray(TRAILER_BYTES))]

        objects = _Made(len(move.objects), buffers)

        def after(k: int, total: int | None) -> str:
            (kind, key), mine = move.objects.names[k], slice(starts[k], starts[k + 1])
            wrong = self._envelope.check(key, kind, objects[k][:-1], objects[k][-1], total=total)
            if not wrong:
                self._tier.note_host(move.groups[mine], move.hosts[mine])
            return f"{DAMAGED}: {wrong}" if wrong else ""

        store.get(move.ticket, self._texts(move.objects.names), objects, within_s, after)

    def _texts(self, names: Sequence[Name]) -> Sequence[str]:
        return _Made(len(names), lambda k: self.text(names[k]))

    def _blocks(self, groups: Ids, hosts: Ids) -> list[memoryview]:
        arena, memory = self._arena, self._memory
        starts = arena.origins[groups] + hosts * arena.strides[groups]
        ends = starts + arena.block_bytes[groups]
        return [memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def _starts(of: Ids, count: int) -> list[int]:
    """Where each object's blocks begin, and where the last ones end."""
    found: list[int] = np.searchsorted(of, np.arange(count + 1)).tolist()
    return found
