"""``DirectoryBackend``: a ``Backend`` in a directory, of one machine or shared by several.

Promises   an object is there as a whole or not at all (``folder``, which also says who can read it). A hit makes an
           object young again, once an hour at most, so that ``kvtier remote gc`` takes what nobody reads.
Does not   wait for the disk: after a power cut an object may be torn, which its trailer tells. Does not evict.

Small pieces are read straight into the buffers. Large ones are read into a little memory that stays in the CPU's cache;
from there one pass copies them into the buffers and sums them up. That takes less CPU time than to read straight into
the buffers and to sum up later.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.machine.errors import ConfigError
from kvtier.remote.backends.contract import DAMAGED, Buffers, Outcome
from kvtier.remote.backends.folder import PRIVATE, Folder
from kvtier.remote.backends.threaded import ThreadedBackend, check_size
from kvtier.remote.backends.threads import Failure, reason_of
from kvtier.remote.names import ROOT
from kvtier.remote.summing import WORD, Summing, Words, words_of

log = logging.getLogger("kvtier.remote")

RENEW_S = 3600.0
SCRATCH_BYTES = 512 << 10
LARGE_PIECE = 96 << 10
"""Mean size of a large object's pieces, the trailer among them: each costs a call, so smaller ones gain nothing."""
_MOST_PIECES = 1024
"""The system takes no more in one call."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


class DirectoryBackend(ThreadedBackend):
    """Objects as files of a folder, which is made if it is not there."""

    kind = "file"

    def __init__(self, path: Path, threads: int, mode: int = PRIVATE) -> None:
        """``mode``: the rights of an object's file."""
        self._folder = Folder(path, mode)
        objects = self._folder.path / ROOT
        try:
            self._folder.make()
            if objects.is_symlink():
                raise ConfigError(f"{objects} is a link, and none below the backend's directory is followed: remove it")
            _warn_of_others(self._folder, objects)
        except OSError as problem:
            raise ConfigError(f"the backend's directory {path} cannot be used: {problem}") from problem
        self._scratch = threading.local()
        super().__init__(threads)

    def _exists(self, names: Sequence[str]) -> list[bool]:
        return [self._folder.is_file(name) for name in names]

    def _put(self, name: str, buffers: Buffers) -> None:
        with _refusals():
            self._folder.write(name, lambda file: _move(os.pwritev, file, buffers))

    def _delete(self, name: str) -> None:
        with _refusals(), self._folder.place_of(name) as (place, leaf):
            os.unlink(leaf, dir_fd=place)

    def _get(self, name: str, buffers: Buffers, check: Callable[[int | None], None]) -> None:
        file, found = self._folder.open_file(name)
        try:
            check_size(found.st_size, buffers)
            targets = words_of(buffers) if found.st_size >= len(buffers) * LARGE_PIECE else None
            if targets is None:
                _move(os.preadv, file, buffers)
                check(None)
            else:
                check(self._read_words(file, found.st_size, targets))
            if abs(time.time() - found.st_mtime) > RENEW_S:
                _renew(file)
        finally:
            os.close(file)

    def _read_words(self, file: int, num_bytes: int, targets: list[Words]) -> int:
        """Fills the targets by way of a thread's own memory, which stays in the CPU's cache, and sums up."""
        scratch = getattr(self._scratch, "words", None)
        if scratch is None:
            scratch = self._scratch.words = np.empty(SCRATCH_BYTES // WORD, np.uint64)
        raw, summing, at = scratch.data.cast("B"), Summing(targets), 0
        while at < num_bytes:
            count = os.preadv(file, [raw[: num_bytes - at]], at)
            if count < WORD:
                raise Failure(Outcome.FAILED, f"{DAMAGED}: torn, it ended after {at + count:,} bytes")
            summing.add(scratch[: count // WORD])
            at += count // WORD * WORD
        return summing.total


def _move(call: Callable[[int, Sequence[memoryview], int], int], file: int, buffers: Buffers) -> None:
    """Fills all buffers, whatever their lengths are, from the file's beginning; or writes them."""
    left, at = [piece for piece in buffers if len(piece)], 0
    while left:
        count = call(file, left[:_MOST_PIECES], at)
        if not count:
            raise Failure(Outcome.FAILED, f"{DAMAGED}: torn, it ended after {at:,} bytes")
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _renew(file: int) -> None:
    try:
        os.utime(file)
    except OSError:
        return  # somebody else's file, or a read-only disk: it ages


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises ``Failure`` for what the system does not do."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as problem:
        outcome = Outcome.REFUSED if problem.errno in _FULL else Outcome.FAILED
        raise Failure(outcome, reason_of(problem)) from problem


def _warn_of_others(folder: Folder, objects: Path) -> None:
    """Tells of rights beyond those that the backend gives: who may write can put text there, who may read knows it."""
    beyond = 0o077 & ~folder.folder_mode
    for path, bits, verb in ((folder.path, 0o022, "write"), (objects, 0o022, "write"), (objects, 0o055, "read")):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & bits & beyond:
            told = "the folder %s is one that others may %s: chmod %o %s, or say who shares it with ?mode=0660"
            log.warning(told, path, verb, folder.folder_mode, path)
            return
