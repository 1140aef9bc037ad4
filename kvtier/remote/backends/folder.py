"""``Folder``: what lies below a backend's directory, opened through no link and seen by nobody else.

Owns       the rights of what is made there.
Promises   a name leads to what lies below the directory, whatever links somebody puts in between, also while it is
           opened. A file is written aside and renamed: its name has all of it or none. What is made has the rights
           that were asked for, whatever the umask is. Nobody waits for a pipe or a device of a file's name.
Does not   mind links on the way to the directory itself: its user chose them. They are followed once, at the start.

Linux opens such a name in one call, ``openat2``. Where it cannot, each part is opened in the folder before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PRIVATE = 0o600
"""Rights of files by default. Who may read a file may enter its folder."""
_BARE = os.O_NOFOLLOW | os.O_CLOEXEC
_PATH = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK)  # Linux alone has it
PLACE = _PATH | os.O_DIRECTORY | _BARE
LIST = os.O_RDONLY | os.O_DIRECTORY | _BARE
_READ = os.O_RDONLY | os.O_NONBLOCK | _BARE
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BARE
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _BARE
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


class Misplaced(OSError):
    """A link lies on the way, or something that is no file where a file should be."""

    @classmethod
    def link(cls, name: str) -> Misplaced:
        """The error for a link at this place."""
        return cls(f"{name} is a link, which is not followed")


class Folder:
    """All methods raise ``OSError``, of which ``Misplaced`` is one. Names have slashes, and no dots for folders."""

    def __init__(self, path: Path, mode: int = PRIVATE) -> None:
        """``mode``: the rights of files that are made."""
        self._root = os.path.realpath(path)
        self.path = Path(self._root)
        self.mode = mode
        self.folder_mode = mode | (mode & 0o444) >> 2

    def open(self, name: str, flags: int) -> int:
        """``flags`` are ``PLACE``, ``LIST`` or others with O_NOFOLLOW. Raises ``Misplaced`` for a link."""
        try:
            return (_open_at_once if _has_openat2() else _open_part_by_part)(self._root, name, flags)
        except OSError as problem:
            link = self._link_in(name) if problem.errno in (errno.ELOOP, errno.ENOTDIR) else ""
            if link:
                raise Misplaced.link(link) from None
            raise

    def open_file(self, name: str) -> tuple[int, os.stat_result]:
        """Opens a file to be read. Raises ``Misplaced`` for what is no file."""
        file = self.open(name, _READ)
        return file, _check_file(file, name)

    def is_file(self, name: str) -> bool:
        """False for what is behind a link, or is one."""
        try:
            found = self.open(name, _PATH | _BARE)
        except (FileNotFoundError, NotADirectoryError, Misplaced):
            return False
        try:
            return stat.S_ISREG(os.fstat(found).st_mode)
        finally:
            os.close(found)

    @contextmanager
    def place_of(self, name: str) -> Iterator[tuple[int, str]]:
        """The folder that a name lies in, for calls that take ``dir_fd``, and the name in it."""
        folder, _, leaf = name.rpartition("/")
        place = self.open(folder, PLACE) if folder else os.open(self.path, PLACE)
        try:
            yield place, leaf
        finally:
            os.close(place)

    def write(self, name: str, fill: Callable[[int], None]) -> None:
        """Makes a file that ``fill`` writes, as ``NAME#number``, and gives it its name; if anything fails it goes."""
        folder, _, leaf = name.rpartition("/")
        place, staging = self._made(folder), f"{leaf}#{secrets.randbits(48)}"
        try:
            file = os.open(staging, _WRITE, self.mode, dir_fd=place)
            try:
                try:
                    self._grant(file)
                    fill(file)
                finally:
                    os.close(file)
                os.rename(staging, leaf, src_dir_fd=place, dst_dir_fd=place)
            except BaseException:
                with suppress(OSError):
                    os.unlink(staging, dir_fd=place)
                raise
        finally:
            os.close(place)

    def open_lock(self, name: str) -> int:
        """A file right in the directory, made if it is not there. Raises ``Misplaced`` for what is no file."""
        try:
            file = os.open(self.path / name, _LOCK, self.mode)
        except OSError as problem:
            if problem.errno in _NO_FILE:
                raise Misplaced(f"{self.path / name} is no file") from None
            raise
        _check_file(file, str(self.path / name))
        with suppress(PermissionError):  # somebody else's
            self._grant(file)
        return file

    # --- what is made -----------------------------------------------------------------------------

    def make(self) -> None:
        """Makes the directory, unless it is there."""
        try:
            self.path.mkdir(self.folder_mode, parents=True)
        except FileExistsError:
            if not self.path.is_dir():
                raise
            return
        self._grant_folder(os.open(self.path, LIST))

    def _made(self, name: str) -> int:
        """A folder as ``PLACE``, made with all before it."""
        try:
            return self.open(name, PLACE)
        except FileNotFoundError:
            self.make()
        parts = name.split("/")
        for k in range(len(parts)):
            self._make_one("/".join(parts[: k + 1]))
        return self.open(name, PLACE)

    def _make_one(self, name: str) -> None:
        with self.place_of(name) as (place, leaf):
            try:
                os.mkdir(leaf, self.folder_mode, dir_fd=place)
            except FileExistsError:
                return
            self._grant_folder(os.open(leaf, LIST, dir_fd=place))

    def _grant(self, file: int) -> None:
        if self.mode != PRIVATE:  # which no umask widens
            os.fchmod(file, self.mode)

    def _grant_folder(self, folder: int) -> None:
        """Gives a folder its rights; closes it. Who shares a backend may hand its group on from folder to folder."""
        try:
            os.fchmod(folder, self.folder_mode | os.fstat(folder).st_mode & stat.S_ISGID)
        finally:
            os.close(folder)

    def _link_in(self, name: str) -> str:
        """The first part of a name that is a link now; "" if none is."""
        parts = name.split("/")
        heads = ("/".join(parts[: k + 1]) for k in range(len(parts)))
        return next((head for head in heads if (self.path / head).is_symlink()), "")


def _check_file(file: int, name: str) -> os.stat_result:
    """What the system tells of an open file. Closes what is none, and raises ``Misplaced``."""
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Misplaced(f"{name} is no file")
    except OSError:
        os.close(file)
        raise
    return found


# --- ways to open a name ----------------------------------------------------------------------------


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_SIZE = ctypes.c_size_t(ctypes.sizeof(_How))
_SYS_OPENAT2 = 437  # on all machines
_RESOLVE_NO_SYMLINKS = 4
_system = ctypes.CDLL(None, use_errno=True)


@cache
def _has_openat2() -> bool:
    """Linux 5.6 has it; a container may forbid it."""
    if sys.platform != "linux":
        return False
    try:
        os.close(_open_at_once("", "", PLACE))
    except OSError:
        return False
    return True


def _open_at_once(folder: str, name: str, flags: int) -> int:
    path, how = os.fsencode(f"{folder}/{name}"), _How(flags, 0, _RESOLVE_NO_SYMLINKS)
    file = _system.syscall(_SYS_OPENAT2, -1, path, ctypes.byref(how), _SIZE)
    if file < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return int(file)


def _open_part_by_part(folder: str, name: str, flags: int) -> int:
    place = os.open(folder, PLACE)
    *folders, leaf = name.split("/")
    try:
        for part in folders:
            inner = os.open(part, PLACE, dir_fd=place)
            os.close(place)
            place = inner
        return os.open(leaf, flags, dir_fd=place)
    finally:
        os.close(place)
