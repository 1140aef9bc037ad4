"""``DirectoryStore``: a ``BlockStore`` in a directory, of one machine or shared by several.

Promises   an object is there as a whole or not at all: obstore writes a staging file, ``NAME#1``, and renames it.
           A hit makes an object young again, once an hour at most, so that ``kvtier store gc`` takes what nobody reads.
Does not   wait for the disk: after a power cut an object may be torn, which its trailer tells. Does not evict.

Reads go by the system's own calls, straight into the buffers: half the CPU time of a way through obstore's memory.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.remote.block_store import DAMAGED, Buffers, Outcome
from kvtier.remote.obstore_store import ObstoreStore, check_size, load_obstore
from kvtier.remote.threads import Failure

RENEW_S = 3600.0
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait at a pipe of that name
_MOST_PIECES = 1024
"""The system takes no more in one call."""


class DirectoryStore(ObstoreStore):
    """Objects as files of ``folder``, which is made if it is not there."""

    def __init__(self, folder: Path, threads: int) -> None:
        load_obstore()
        from obstore.store import LocalStore

        try:
            folder.mkdir(parents=True, exist_ok=True)
            store = LocalStore(folder)
        except Exception as problem:
            raise ConfigError(f"the store's directory {folder} cannot be used: {problem}") from problem
        self.folder = folder
        super().__init__(store, "file", threads)

    def _exists(self, names: Sequence[str]) -> list[bool]:
        return [self._is_file(name) for name in names]

    def _is_file(self, name: str) -> bool:
        try:
            return stat.S_ISREG((self.folder / name).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _get(self, name: str, buffers: Buffers) -> None:
        file = os.open(self.folder / name, _READ)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise Failure(Outcome.FAILED, "it is no file")
            check_size(found.st_size, buffers)
            _read(file, buffers)
            if abs(time.time() - found.st_mtime) > RENEW_S:
                _renew(file)
        finally:
            os.close(file)


def _read(file: int, buffers: Buffers) -> None:
    """Fills all buffers from the file's beginning."""
    left, at = [piece for piece in buffers if len(piece)], 0
    while left:
        count = os.preadv(file, left[:_MOST_PIECES], at)
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
