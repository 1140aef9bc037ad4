"""Moves as a store sees them: names as text, host blocks as buffers, a trailer behind each object.

Promises   bytes go straight from and to the host tier. A fetched object is checked on the store's own thread, whole,
           before anybody hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.pools.block_pool import Ids
from kvtier.remote.block_store import DAMAGED, BlockStore
from kvtier.remote.envelope import TRAILER_BYTES, Envelope
from kvtier.remote.moves import Move
from kvtier.remote.names import object_name


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

    def text(self, name: tuple[str, bytes]) -> str:
        """An object's name in the store."""
        return object_name(self._namespace, *name)

    def look(self, store: BlockStore, ticket: int, names: Sequence[tuple[str, bytes]], within_s: float) -> None:
        """Asks which objects are there."""
        store.look(ticket, [self.text(name) for name in names], within_s)

    def delete(self, store: BlockStore, ticket: int, names: Sequence[tuple[str, bytes]], within_s: float) -> None:
        """Forgets objects."""
        store.delete(ticket, [self.text(name) for name in names], within_s)

    def put(self, store: BlockStore, move: Move, within_s: float) -> None:
        """Stores a spill's objects."""
        trailers = [memoryview(bytearray(TRAILER_BYTES)) for _ in move.objects]
        parts = [self._blocks(move.groups[move.of == k], move.hosts[move.of == k]) for k in range(len(trailers))]

        def before(k: int) -> None:
            what, mine = move.objects[k], move.of == k
            changed = self._tier.changed_in_host(move.groups[mine], move.hosts[mine])
            if changed:
                raise ValueError(f"{changed} blocks of the host tier have changed since they were stored")
            self._envelope.seal(what.key, what.kind, parts[k], trailers[k])

        names = [self.text(what.name) for what in move.objects]
        objects = [[*part, trailer] for part, trailer in zip(parts, trailers, strict=True)]
        store.put(move.ticket, names, objects, within_s, before)

    def get(self, store: BlockStore, move: Move, absent: Sequence[npt.NDArray[np.bool_]], within_s: float) -> None:
        """Reads a fetch's objects. Blocks that are here already are read aside, for the checksum."""
        parts, trailers = [], [memoryview(bytearray(TRAILER_BYTES)) for _ in move.objects]
        views = iter(self._blocks(move.groups, move.hosts))
        for what, missing in zip(move.objects, absent, strict=True):
            sizes = self.block_bytes[what.groups].tolist()
            aside = (memoryview(bytearray(size)) for size in sizes)
            parts.append([next(views) if comes else next(aside) for comes in missing.tolist()])

        def after(k: int, total: int | None) -> str:
            what = move.objects[k]
            wrong = self._envelope.check(what.key, what.kind, parts[k], trailers[k], total=total)
            if not wrong:
                self._tier.note_host(move.groups[move.of == k], move.hosts[move.of == k])
            return f"{DAMAGED}: {wrong}" if wrong else ""

        names = [self.text(what.name) for what in move.objects]
        objects = [[*part, trailer] for part, trailer in zip(parts, trailers, strict=True)]
        store.get(move.ticket, names, objects, within_s, after)

    def _blocks(self, groups: Ids, hosts: Ids) -> list[memoryview]:
        arena, memory = self._arena, self._memory
        starts = arena.origins[groups] + hosts * arena.strides[groups]
        ends = starts + arena.block_bytes[groups]
        return [memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
