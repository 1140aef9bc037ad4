"""Moves as a store sees them: names as text, host blocks as buffers, a trailer behind each object.

Promises   bytes go straight from and to the host tier. A fetched object is checked on the store's own thread, whole,
           before anybody hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.host_blocks import HostSide
from kvtier.cpu_offload.parcels import Parcel
from kvtier.pools.block_pool import Ids
from kvtier.remote.block_store import DAMAGED, Answer, BlockStore
from kvtier.remote.envelope import TRAILER_BYTES, Envelope
from kvtier.remote.moves import Move
from kvtier.remote.names import object_name

Names = Sequence[tuple[str, bytes]]
"""Kind and key of objects."""


class Answering(Protocol):
    """What a tier asks of a store, or of what stands for several."""

    kind: str

    def poll(self) -> list[Answer]:
        """Calls that ended since the last poll, each once."""

    def close(self, timeout_s: float) -> bool:
        """As ``BlockStore.close``."""


class Carrier(Protocol):
    """How a tier calls its store: ``Wire``, or ``relay.RelayedWire``."""

    block_bytes: npt.NDArray[np.int64]

    def look(self, store: Any, ticket: int, names: Names, within_s: float) -> None:
        """Asks which objects are there."""

    def delete(self, store: Any, ticket: int, names: Names, within_s: float) -> None:
        """Forgets objects."""

    def put(self, store: Any, move: Move, within_s: float) -> None:
        """Stores a spill's objects."""

    def get(self, store: Any, move: Move, absent: Sequence[npt.NDArray[np.bool_]], within_s: float) -> None:
        """Reads a fetch's objects. ``absent[k]``: which blocks of object k are not here."""


class Wire:
    """Between one host tier and stores of one namespace."""

    def __init__(self, tier: HostSide, namespace: bytes, secret: bytes | None) -> None:
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

    def look(self, store: BlockStore, ticket: int, names: Names, within_s: float) -> None:
        """Asks which objects are there."""
        store.look(ticket, [self.text(name) for name in names], within_s)

    def delete(self, store: BlockStore, ticket: int, names: Names, within_s: float) -> None:
        """Forgets objects."""
        store.delete(ticket, [self.text(name) for name in names], within_s)

    def put(self, store: BlockStore, move: Move, within_s: float) -> None:
        """Stores a spill's objects."""
        self.carry(store, put_parcel(move, within_s))

    def get(self, store: BlockStore, move: Move, absent: Sequence[npt.NDArray[np.bool_]], within_s: float) -> None:
        """Reads a fetch's objects. Blocks that are here already are read aside, for the checksum."""
        self.carry(store, get_parcel(move, absent, within_s))

    def carry(self, store: BlockStore, parcel: Parcel) -> None:
        """Stores or reads a parcel's objects."""
        cuts = np.searchsorted(parcel.of, np.arange(len(parcel.names) + 1)).tolist()
        mine, blocks = [slice(*ends) for ends in pairwise(cuts)], self._blocks(parcel.groups, parcel.hosts)
        parts = [blocks[which] for which in mine]
        trailers = [memoryview(bytearray(TRAILER_BYTES)) for _ in mine]

        def before(k: int) -> None:
            changed = self._tier.changed_in_host(parcel.groups[mine[k]], parcel.hosts[mine[k]])
            if changed:
                raise ValueError(f"{changed} blocks of the host tier have changed since they were stored")
            kind, key = parcel.names[k]
            self._envelope.seal(key, kind, parts[k], trailers[k])

        def after(k: int) -> str:
            kind, key = parcel.names[k]
            wrong = self._envelope.check(key, kind, parts[k], trailers[k])
            if not wrong:
                groups, hosts = parcel.groups[mine[k]], parcel.hosts[mine[k]]
                self._tier.note_host(groups[hosts > 0], hosts[hosts > 0])
            return f"{DAMAGED}: {wrong}" if wrong else ""

        names = [self.text(name) for name in parcel.names]
        objects = [[*part, trailer] for part, trailer in zip(parts, trailers, strict=True)]
        if parcel.is_put:
            store.put(parcel.ticket, names, objects, parcel.within_s, before)
        else:
            store.get(parcel.ticket, names, objects, parcel.within_s, after)

    def _blocks(self, groups: Ids, hosts: Ids) -> list[memoryview]:
        """The blocks' memory; memory of its own for block 0."""
        arena, memory = self._arena, self._memory
        starts = arena.origins[groups] + hosts * arena.strides[groups]
        sizes = arena.block_bytes[groups]
        places = zip(hosts.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        return [memory[a : a + size] if host else memoryview(bytearray(size)) for host, a, size in places]


def put_parcel(move: Move, within_s: float) -> Parcel:
    """A spill."""
    return Parcel(move.ticket, True, _names(move), move.groups, move.hosts, move.of, within_s)


def get_parcel(move: Move, absent: Sequence[npt.NDArray[np.bool_]], within_s: float) -> Parcel:
    """A fetch. ``absent[k]``: which blocks of object k it brings."""
    groups = np.concatenate([what.groups for what in move.objects])
    hosts = np.zeros(len(groups), np.int32)
    hosts[np.concatenate(absent)] = move.hosts
    of = np.repeat(np.arange(len(absent), dtype=np.int32), [len(what.groups) for what in move.objects])
    return Parcel(move.ticket, False, _names(move), groups, hosts, of, within_s)


def _names(move: Move) -> tuple[tuple[str, bytes], ...]:
    return tuple(what.name for what in move.objects)
