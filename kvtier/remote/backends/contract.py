"""What keeps blocks beyond this process: ``Backend``, a small protocol in front of engines that others maintain.

An *object* is a few blocks under one name, and a trailer that says what they are (``envelope``). A backend knows names
and bytes, and nothing of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

DAMAGED = "damaged"
"""The reason of a FAILED object begins so if the object itself is not what it should be: it may be deleted."""

Buffers = Sequence[memoryview]
"""The bytes of one object, piece by piece: contiguous views of bytes."""


After = Callable[[int, int | None], str]
"""What is wrong with object k, which has just been read; "" if nothing is. The second: the sum of all its words
(``envelope.checksum_of``), if the backend has taken it while it read, as it may."""


class Outcome(Enum):
    """What became of one object."""

    OK = "ok"
    MISS = "miss"
    """There is no object of this name."""
    FAILED = "failed"
    """The object could not be read or written, took too long, or came back as something else."""
    REFUSED = "refused"
    """The backend is full, or does not let us write."""


@dataclass(frozen=True)
class Answer:
    """The end of one call: an outcome for each name. ``reasons``: by position, why an object failed or was refused."""

    ticket: int
    outcomes: tuple[Outcome, ...]
    reasons: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds from the beginning of the call's first object to its end, without the wait for a free thread."""


PROTOCOL = ("register", "look", "put", "get", "delete", "poll", "wait", "wake", "close")


class Backend(Protocol):
    """A backend, as the tier uses it: from one thread, except ``wake``. Nothing raises; ``poll`` never waits.

    Names and objects may be made as they are asked for: a backend asks for each on its own threads, in its turn.
    A call is known by its ``ticket``, and ends with one ``Answer``, even after its deadline: until then the backend may
    read or write the buffers. ``on_news`` is called from any thread whenever ``poll`` has something to tell.
    """

    kind: str
    """The kind of backend for metrics: "file", "s3", "mooncake", ..."""
    on_news: Callable[[], None]

    def register(self, memory: memoryview) -> None:
        """All buffers of ``get`` and ``put``, but for trailers, will be views of ``memory``. Called once, first."""

    def look(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """Asks which objects are there: OK or MISS. A hint: the object may be gone when it is asked for."""

    def put(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """Stores objects. An object of that name may be there already: it is replaced, or stays.

        ``before(k)`` is called on a thread of the backend before object k is read: it writes the trailer. Its exception
        is the reason why object k FAILED, and so with ``after`` of ``get``. Neither touches another object.
        """

    def get(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        after: After | None = None,
    ) -> None:
        """Reads objects into buffers, which are undefined unless the outcome is OK. Another length is FAILED.

        ``after(k, total)`` is called on a thread of the backend once object k is there.
        """

    def delete(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """Forgets objects: OK or MISS."""

    def poll(self) -> list[Answer]:
        """Calls that ended since the last poll, each once."""

    def wait(self, timeout_s: float) -> bool:
        """True as soon as ``poll`` has something to tell; False after ``timeout_s`` seconds or a ``wake``."""

    def wake(self) -> None:
        """Ends a ``wait``; from any thread."""

    def close(self, timeout_s: float) -> bool:
        """Begins nothing more, and lets what is under way end. True if no thread touches a buffer any more.

        Calls that did not begin, and later ones, end as FAILED; ``poll`` still tells. Called again, it waits again.
        """
