"""Moves as a remote sees them: names as text, host blocks as buffers, a trailer behind each object.

Promises   bytes go straight from and to the host tier. A fetched object is checked on the remote's own thread, whole,
           before anybody hears of it. Names and buffers are made there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.tier_memory import HostSide
from kvtier.pools.block_pool import Ids
from kvtier.remote.backends.contract import DAMAGED, Answer, Backend
from kvtier.remote.envelope import TRAILER_BYTES, Envelope
from kvtier.remote.moves import Move
from kvtier.remote.names import object_name
from kvtier.remote.objects import Name
from kvtier.remote.parcels import Parcel

T = TypeVar("T")


class _Made(Sequence[T]):
    """``make(k)`` for each k, once it is asked for: on a thread of the remote, which alone asks for this k."""

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


class Answering(Protocol):
    """The questions that a tier asks of a remote, or of what stands for several."""

    kind: str

    def poll(self) -> list[Answer]:
        """Calls that ended since the last poll, each once."""

    def close(self, timeout_s: float) -> bool:
        """Ends the remote, as ``Backend.close`` does."""


class Carrier(Protocol):
    """How a tier calls its remote: ``Wire``, or ``relay.RelayedWire``."""

    block_bytes: npt.NDArray[np.int64]

    def look(self, backend: Any, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Asks which objects are there."""

    def delete(self, backend: Any, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Forgets objects."""

    def put(self, backend: Any, move: Move, within_s: float) -> None:
        """Stores a spill's objects."""

    def get(self, backend: Any, move: Move, absent: npt.NDArray[np.bool_], within_s: float) -> None:
        """Reads a fetch's objects. ``absent``: bool [n], which of their blocks are not here."""


class Wire:
    """Stands between one host tier and backends, with one namespace."""

    def __init__(self, tier: HostSide, namespace: bytes, secret: bytes | None) -> None:
        """``secret``: keys a digest in each trailer, for remote tiers that others can write to."""
        _, host = tier.arenas
        self._tier = tier
        self._memory = host.bytes.data
        self._arena = host
        self._namespace = namespace
        self._envelope = Envelope(namespace, secret)
        self.block_bytes = host.block_bytes

    def register(self, backend: Backend) -> None:
        """Makes the host tier's memory known to a remote."""
        backend.register(self._memory)

    def text(self, name: Name) -> str:
        """An object's name in the remote."""
        return object_name(self._namespace, *name)

    def look(self, backend: Backend, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Asks which objects are there."""
        backend.look(ticket, self._texts(names), within_s)

    def delete(self, backend: Backend, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Forgets objects."""
        backend.delete(ticket, self._texts(names), within_s)

    def put(self, backend: Backend, move: Move, within_s: float) -> None:
        """Stores a spill's objects."""
        self.carry(backend, put_parcel(move, within_s))

    def get(self, backend: Backend, move: Move, absent: npt.NDArray[np.bool_], within_s: float) -> None:
        """Reads a fetch's objects. Blocks that are here already are read aside, for the checksum."""
        self.carry(backend, get_parcel(move, absent, within_s))

    def carry(self, backend: Backend, parcel: Parcel) -> None:
        """Stores or reads a parcel's objects."""
        starts = np.searchsorted(parcel.of, np.arange(len(parcel.names) + 1)).tolist()

        def blocks(k: int) -> tuple[Ids, Ids]:
            mine = slice(starts[k], starts[k + 1])
            return parcel.groups[mine], parcel.hosts[mine]

        def buffers(k: int) -> list[memoryview]:
            return [*self._blocks(*blocks(k)), memoryview(bytearray(TRAILER_BYTES))]

        names, objects = self._texts(parcel.names), _Made(len(parcel.names), buffers)

        def before(k: int) -> None:
            changed = self._tier.changed_in_host(*blocks(k))
            if changed:
                raise ValueError(f"{changed} blocks of the host tier have changed since they were stored")
            kind, key = parcel.names[k]
            self._envelope.seal(key, kind, objects[k][:-1], objects[k][-1])

        def after(k: int, total: int | None) -> str:
            kind, key = parcel.names[k]
            wrong = self._envelope.check(key, kind, objects[k][:-1], objects[k][-1], total=total)
            if not wrong:
                groups, hosts = blocks(k)
                self._tier.note_host(groups[hosts > 0], hosts[hosts > 0])
            return f"{DAMAGED}: {wrong}" if wrong else ""

        if parcel.is_put:
            backend.put(parcel.ticket, names, objects, parcel.within_s, before)
        else:
            backend.get(parcel.ticket, names, objects, parcel.within_s, after)

    def _texts(self, names: Sequence[Name]) -> Sequence[str]:
        return _Made(len(names), lambda k: self.text(names[k]))

    def _blocks(self, groups: Ids, hosts: Ids) -> list[memoryview]:
        """The blocks' memory; memory of its own for block 0."""
        arena, memory = self._arena, self._memory
        starts = arena.origins[groups] + hosts * arena.strides[groups]
        sizes = arena.block_bytes[groups]
        places = zip(hosts.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        return [memory[a : a + size] if host else memoryview(bytearray(size)) for host, a, size in places]


def put_parcel(move: Move, within_s: float) -> Parcel:
    """A spill."""
    return Parcel(move.ticket, True, tuple(move.objects.names), move.groups, move.hosts, move.of, within_s)


def get_parcel(move: Move, absent: npt.NDArray[np.bool_], within_s: float) -> Parcel:
    """A fetch. ``absent``: bool [n], which blocks of its objects it brings."""
    what, hosts = move.objects, np.zeros(len(absent), np.int32)
    hosts[absent] = move.hosts
    return Parcel(move.ticket, False, tuple(what.names), what.groups, hosts, what.of, within_s)
