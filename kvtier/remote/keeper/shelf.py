"""``Shelf``: a remote as its keeper sees it: what lies there, how large and how old, to be listed, read and removed.

Promises   only names of kvtier's objects, and staging files that their writers left, are ever listed or removed.
           What the remote does not let us read or remove is skipped and counted; the rest is done. So are links in a
           directory: what they lead to is not looked at.
Does not   decide what to remove (``upkeep``).
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvtier.machine.errors import ConfigError
from kvtier.remote.backends.folder import LIST, PRIVATE, Folder, Misplaced
from kvtier.remote.backends.threads import reason_of
from kvtier.remote.backends.uri import bucket, parse_uri
from kvtier.remote.names import ROOT, parse

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LOCK = "kvtier-store.lock"
_SLASHES = 4
"""Slashes in the name of an object: folders with more are none of ours."""
_STAGING = re.compile(r"(.+)#\d+")


class Entry(NamedTuple):
    """An object, or a staging file."""

    modified_s: float
    num_bytes: int
    name: str
    is_staging: bool = False


@dataclass
class Skipped:
    """Counts of what could not be read or removed, with the first one's reason."""

    unread: int = 0
    """Objects and folders."""
    unremoved: int = 0
    first: str = ""

    def clear(self) -> None:
        """Begins anew."""
        self.unread, self.unremoved, self.first = 0, 0, ""

    def note_unread(self, problem: BaseException) -> None:
        """One more, for this reason."""
        self.unread += 1
        self.first = self.first or reason_of(problem)

    def note_unremoved(self, problem: BaseException, count: int = 1) -> None:
        """Counts so many more, and keeps the first reason."""
        self.unremoved += count
        self.first = self.first or reason_of(problem)

    def __str__(self) -> str:
        counts = (self.unread, "read"), (self.unremoved, "removed")
        told = [f"{count:,} could not be {verb}" for count, verb in counts if count]
        return f"{', '.join(told)}: {self.first}" if told else ""


class Shelf(Protocol):
    """All methods raise ``OSError`` or an error of the remote's library if it does not answer."""

    skipped: Skipped
    """What ``entries`` and ``remove`` have skipped."""
    is_renewed: bool
    """Whether a hit makes an object young again, so that the oldest are those that nobody reads."""

    def entries(self, namespace: str = "") -> Iterator[Entry]:
        """Lists what lies there, of one namespace or of all."""

    def read(self, name: str) -> memoryview:
        """All of an object. Raises ``FileNotFoundError``, and ``OSError`` for an object that may not be read."""

    def read_end(self, entry: Entry, num_bytes: int) -> memoryview:
        """The last bytes of an object. Raises as ``read`` does."""

    def remove(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Removes what has not changed since it was listed; yields what is gone now."""

    def renew(self, entry: Entry, now_s: float) -> Entry:
        """Lets an object age from now on."""

    def clear_up(self, namespace: str) -> None:
        """Removes what is left of an empty namespace."""

    def only_one(self) -> AbstractContextManager[None, bool | None]:
        """Held by one keeper at a time. Raises ``ConfigError`` if another one is at work."""


def open_shelf(uri: str) -> Shelf:
    """Raises ``ConfigError`` for a URI that has nothing to keep."""
    parsed = parse_uri(uri)
    if parsed.scheme == "file":
        folder = Path(parsed.path)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no directory")
        return FolderShelf(folder, parsed.mode)
    if parsed.scheme in ("s3", "gs", "az"):
        return BucketShelf(bucket(parsed))
    if parsed.scheme == "memory":
        raise ConfigError("memory:// is the memory of one process, and ends with it")
    raise ConfigError(f"{parsed.scheme}:// keeps itself: it evicts what is read least, and checks nothing at rest")


class FolderShelf:
    """A directory."""

    is_renewed = True

    def __init__(self, folder: Path, mode: int = PRIVATE) -> None:
        self.folder = Folder(folder, mode)
        self.skipped = Skipped()

    def entries(self, namespace: str = "") -> Iterator[Entry]:
        """See ``Shelf``."""
        yield from self._under(f"{ROOT}/{namespace}" if namespace else ROOT)

    def _under(self, name: str) -> Iterator[Entry]:
        try:
            place = self.folder.open(name, LIST)
        except FileNotFoundError:
            return  # removed meanwhile
        except OSError as problem:
            self.skipped.note_unread(problem)
            return
        try:
            with os.scandir(place) as found:
                for item in found:
                    yield from self._item(f"{name}/{item.name}", item)
        finally:
            os.close(place)

    def _item(self, name: str, item: os.DirEntry[str]) -> Iterator[Entry]:
        if item.is_symlink():
            self.skipped.note_unread(Misplaced.link(name))
        elif item.is_dir(follow_symlinks=False):
            if name.count("/") < _SLASHES:
                yield from self._under(name)
        elif item.is_file(follow_symlinks=False):
            yield from self._entry(name, item)

    def _entry(self, name: str, item: os.DirEntry[str]) -> Iterator[Entry]:
        staging = _STAGING.fullmatch(name)
        if parse(staging[1] if staging else name) is None:
            return
        try:
            found = item.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as problem:
            self.skipped.note_unread(problem)
            return
        yield Entry(found.st_mtime, found.st_size, name, staging is not None)

    def read(self, name: str) -> memoryview:
        """See ``Shelf``."""
        file, found = self.folder.open_file(name)
        with os.fdopen(file, "rb") as opened:
            data = memoryview(bytearray(found.st_size))
            return data[: opened.readinto(data)]

    def read_end(self, entry: Entry, num_bytes: int) -> memoryview:
        """See ``Shelf``."""
        file, found = self.folder.open_file(entry.name)
        with os.fdopen(file, "rb") as opened:
            opened.seek(max(0, found.st_size - num_bytes))
            return memoryview(opened.read(num_bytes))

    def remove(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """See ``Shelf``."""
        for entry in entries:
            try:
                with self.folder.place_of(entry.name) as (place, leaf):
                    found = os.stat(leaf, dir_fd=place, follow_symlinks=False)
                    if found.st_mtime != entry.modified_s or not stat.S_ISREG(found.st_mode):
                        continue  # read or written anew meanwhile
                    os.unlink(leaf, dir_fd=place)
            except FileNotFoundError:
                pass
            except OSError as problem:
                self.skipped.note_unremoved(problem)
                continue
            yield entry

    def renew(self, entry: Entry, now_s: float) -> Entry:
        """See ``Shelf``."""
        with suppress(OSError), self.folder.place_of(entry.name) as (place, leaf):
            os.utime(leaf, (now_s, now_s), dir_fd=place, follow_symlinks=False)
            return entry._replace(modified_s=os.stat(leaf, dir_fd=place, follow_symlinks=False).st_mtime)
        return entry

    def clear_up(self, namespace: str) -> None:
        """See ``Shelf``. Folders that are not empty stay."""
        self._clear_up(f"{ROOT}/{namespace}")

    def _clear_up(self, name: str) -> None:
        with suppress(OSError):
            place = self.folder.open(name, LIST)
            try:
                with os.scandir(place) as found:
                    inner = [f"{name}/{item.name}" for item in found if item.is_dir(follow_symlinks=False)]
            finally:
                os.close(place)
            if name.count("/") < _SLASHES - 1:
                for each in inner:
                    self._clear_up(each)
            with self.folder.place_of(name) as (place, leaf):
                os.rmdir(leaf, dir_fd=place)

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """See ``Shelf``. The lock ends with the process that holds it."""
        try:
            file = self.folder.open_lock(LOCK)
        except Misplaced as problem:
            raise ConfigError(f"{problem}: it is where `kvtier remote` has its lock; remove it") from None
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                path = self.folder.path / LOCK
                raise ConfigError(f"another `kvtier remote` is at work: it holds {path}") from None
            yield
        finally:
            os.close(file)


class BucketShelf:
    """A bucket. Its objects have the time of their writing: hits do not renew it."""

    is_renewed = False
    _together = 1000
    """Objects that a request removes."""

    def __init__(self, backend: ObjectStore) -> None:
        import obstore

        self._obstore = obstore
        self.backend = backend
        self.skipped = Skipped()

    def entries(self, namespace: str = "") -> Iterator[Entry]:
        """See ``Shelf``."""
        for batch in self._obstore.list(self.backend, f"{ROOT}/{namespace}" if namespace else ROOT):
            for item in batch:
                if parse(item["path"]) is not None:
                    modified: datetime = item["last_modified"]
                    yield Entry(modified.timestamp(), item["size"], item["path"])

    def read(self, name: str) -> memoryview:
        """See ``Shelf``."""
        with self._denied_as_os_error():
            return memoryview(bytearray(self._obstore.get(self.backend, name).bytes()))

    def read_end(self, entry: Entry, num_bytes: int) -> memoryview:
        """See ``Shelf``."""
        start = max(0, entry.num_bytes - num_bytes)
        with self._denied_as_os_error():
            found = self._obstore.get_range(self.backend, entry.name, start=start, length=num_bytes)
            return memoryview(bytearray(found))

    @contextmanager
    def _denied_as_os_error(self) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.PermissionDeniedError as problem:
            raise PermissionError(str(problem)) from problem

    def remove(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """See ``Shelf``. A name fixes the content: deleting a just rewritten object costs a miss."""
        left = list(entries)
        for i in range(0, len(left), self._together):
            part = left[i : i + self._together]
            try:
                with suppress(FileNotFoundError), self._denied_as_os_error():
                    self._obstore.delete(self.backend, [entry.name for entry in part])
            except PermissionError as problem:
                self.skipped.note_unremoved(problem, len(part))
                continue
            yield from part

    def renew(self, entry: Entry, now_s: float) -> Entry:
        """See ``Shelf``. A bucket's clock is its own."""
        return entry

    def clear_up(self, namespace: str) -> None:
        """See ``Shelf``. A bucket has no folders."""

    @contextmanager
    def only_one(self) -> Iterator[None]:
        """See ``Shelf``. Nobody is kept out: two at once remove the same objects, the oldest."""
        yield
