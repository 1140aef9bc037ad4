"""The work of ``kvtier remote``: what lies in a remote, the removal of its oldest objects, and a check of all.

Promises   others may read and write meanwhile. Who reads an object while it is removed has it whole or misses it.
           What may not be read or removed is counted in ``Shelf.skipped``, which each of these calls begins anew.
Does not   print.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvtier.remote.envelope import TRAILER_BYTES, Envelope, Trailer, read_trailer
from kvtier.remote.keeper.shelf import Entry, Shelf
from kvtier.remote.names import Name, parse

STAGING_S = 3600.0
"""A staging file of this age has no writer any more."""
AHEAD_S = 3600.0
"""An object from further in the future was written by a wrong clock."""
LARGE_BYTES = 64 << 20
"""The trailer of a larger object is checked before its payload is read: a file may be long and yet empty."""
LEAST_COST = 4096
"""Least that an object takes of ``max_bytes``, as it does of a disk: so their number has a bound, too."""
Progress = Callable[[int], None]
"""Told how many bytes more are done."""


@dataclass
class Share:
    """Objects of one namespace, or of one kind in it."""

    objects: int = 0
    num_bytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = 0.0

    def add(self, entry: Entry) -> None:
        """Counts an object."""
        self.objects += 1
        self.num_bytes += entry.num_bytes
        self.oldest_s = min(self.oldest_s, entry.modified_s)
        self.newest_s = max(self.newest_s, entry.modified_s)


@dataclass
class Contents:
    """What lies in a remote."""

    all: Share = field(default_factory=Share)
    by_namespace: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    by_kind: dict[tuple[str, str], Share] = field(default_factory=lambda: defaultdict(Share))
    staging: Share = field(default_factory=Share)
    """Files of writers at work, or of killed ones."""


@dataclass
class Removal:
    """Objects that ``collect`` or ``forget`` has removed, and what is left."""

    removed: int = 0
    removed_bytes: int = 0
    damaged: int = 0
    """Files too short for an object, removed beside these."""
    swept: int = 0
    """Staging files."""
    left: int = 0
    left_bytes: int = 0


@dataclass
class Check:
    """The findings of ``verify``."""

    objects: int = 0
    num_bytes: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """(name, what is wrong with it)"""
    entries: list[Entry] = field(default_factory=list)
    """The entries of what is wrong."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        wrong = [{"name": name, "reason": reason} for name, reason in self.wrong]
        return {"objects": self.objects, "bytes": self.num_bytes, "wrong": wrong}


def contents(shelf: Shelf, progress: Progress = lambda _: None) -> Contents:
    """Counts all of a remote."""
    shelf.skipped.clear()
    found = Contents()
    for entry in shelf.entries():
        progress(entry.num_bytes)
        if entry.is_staging:
            found.staging.add(entry)
            continue
        found.all.add(entry)
        _, namespace, kind, *_ = entry.name.split("/")
        found.by_namespace[namespace].add(entry)
        found.by_kind[namespace, kind].add(entry)
    return found


def collect(
    shelf: Shelf,
    max_bytes: int,
    progress: Progress = lambda _: None,
    *,
    namespace: str = "",
    only_tell: bool = False,
    now_s: float = 0.0,
) -> Removal:
    """Removes the oldest objects until at most ``max_bytes`` are left, files too short for an object, and staging files
    without a writer.

    Of one ``namespace``, or of all together. ``only_tell`` removes nothing. Objects from the future count as written
    now, and age from now on.
    """
    now_s = now_s or time.time()
    shelf.skipped.clear()
    with shelf.only_one():
        objects, damaged, abandoned = list[Entry](), list[Entry](), list[Entry]()
        for entry in shelf.entries(namespace):
            if entry.is_staging:
                if now_s - entry.modified_s > STAGING_S:
                    abandoned.append(entry)
            elif entry.num_bytes <= TRAILER_BYTES:
                damaged.append(entry)
            elif entry.modified_s > now_s + AHEAD_S:
                objects.append(entry if only_tell else shelf.renew(entry, now_s))
            else:
                objects.append(entry)
        found = Removal(left=len(objects), left_bytes=sum(entry.num_bytes for entry in objects))
        found.damaged = sum(1 for _ in (damaged if only_tell else shelf.remove(damaged)))
        found.swept = sum(1 for _ in (abandoned if only_tell else shelf.remove(abandoned)))
        oldest, cost = iter(sorted(objects)), sum(map(_cost, objects))
        while victims := list(_as_many(oldest, cost - max_bytes)):  # again if some of them have stayed
            for entry in victims if only_tell else shelf.remove(victims):
                cost -= _cost(entry)
                _count(found, entry)
                progress(entry.num_bytes)
    return found


def forget(shelf: Shelf, namespace: str, progress: Progress = lambda _: None) -> Removal:
    """Removes a namespace: its objects, and its staging files of any age."""
    shelf.skipped.clear()
    with shelf.only_one():
        entries = list(shelf.entries(namespace))
        objects = [entry for entry in entries if not entry.is_staging]
        found = Removal(left=len(objects), left_bytes=sum(entry.num_bytes for entry in objects))
        for entry in shelf.remove(objects):
            _count(found, entry)
            progress(entry.num_bytes)
        found.swept = sum(1 for _ in shelf.remove(entry for entry in entries if entry.is_staging))
        shelf.clear_up(namespace)
    return found


def verify(
    shelf: Shelf,
    progress: Progress = lambda _: None,
    *,
    namespace: str = "",
    secret: bytes | None = None,
    threads: int = 4,
) -> Check:
    """Reads all objects and checks each against its trailer and its name; with ``secret``, its digest too."""
    shelf.skipped.clear()
    found = Check()

    def check(entry: Entry) -> tuple[Entry, str | OSError | MemoryError | None]:
        try:
            if entry.num_bytes > LARGE_BYTES and (wrong := _check_end(entry, shelf.read_end(entry, TRAILER_BYTES))):
                return entry, wrong
            return entry, check_object(entry.name, shelf.read(entry.name), secret)
        except FileNotFoundError:
            return entry, None  # removed since it was listed
        except (OSError, MemoryError) as problem:
            return entry, problem

    with ThreadPoolExecutor(threads) as pool:
        objects = (entry for entry in shelf.entries(namespace) if not entry.is_staging)
        while some := list(islice(objects, 16 * threads)):
            for entry, wrong in pool.map(check, some):
                progress(entry.num_bytes)
                if isinstance(wrong, BaseException):
                    shelf.skipped.note_unread(wrong)
                if not isinstance(wrong, str):
                    continue
                found.objects += 1
                found.num_bytes += entry.num_bytes
                if wrong:
                    found.wrong.append((entry.name, wrong))
                    found.entries.append(entry)
    return found


def check_object(name: str, data: memoryview, secret: bytes | None = None) -> str:
    """What is wrong with an object as it lies in the remote; "" if nothing is."""
    parts = parse(name)
    assert parts is not None
    trailer, payload = data[-TRAILER_BYTES:], data[:-TRAILER_BYTES]
    found = _read_end(parts, len(data), trailer)
    if isinstance(found, str):
        return found
    return Envelope(parts.namespace, secret).check_payload(found, [payload], trailer)


def _check_end(entry: Entry, trailer: memoryview) -> str:
    parts = parse(entry.name)
    assert parts is not None
    found = _read_end(parts, entry.num_bytes, trailer)
    return found if isinstance(found, str) else ""


def _read_end(parts: Name, num_bytes: int, trailer: memoryview) -> Trailer | str:
    """The trailer of an object of this name and length, or what is wrong with it."""
    found = read_trailer(trailer)
    if isinstance(found, str):
        return found
    if Name(found.namespace, found.kind, found.key) != parts:
        return f"under a wrong name: it is {found.namespace.hex()}/{found.kind}/{found.key.hex()}"
    if found.num_bytes != num_bytes - TRAILER_BYTES:
        return f"torn: its payload has {num_bytes - TRAILER_BYTES:,} bytes, not {found.num_bytes:,}"
    return found


def _cost(entry: Entry) -> int:
    return max(entry.num_bytes, LEAST_COST)


def _as_many(objects: Iterator[Entry], cost: int) -> Iterator[Entry]:
    """The next objects, as many as take ``cost`` bytes."""
    while cost > 0 and (entry := next(objects, None)) is not None:
        cost -= _cost(entry)
        yield entry


def _count(found: Removal, entry: Entry) -> None:
    found.removed += 1
    found.removed_bytes += entry.num_bytes
    found.left -= 1
    found.left_bytes -= entry.num_bytes
