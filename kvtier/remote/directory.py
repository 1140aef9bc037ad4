"""``DirectoryStore``: a ``BlockStore`` in a directory, of one machine or shared by several.

Promises   an object is there as a whole or not at all: obstore writes a staging file, ``NAME#1``, and renames it.
           A hit makes an object young again, once an hour at most, so that ``kvtier store gc`` takes what nobody reads.
Does not   wait for the disk: after a power cut an object may be torn, which its trailer tells. Does not evict.

Reads go by the system's own calls. Small pieces are read straight into the buffers. Large ones are read into a little
memory that stays in the CPU's cache; from there one pass copies them into the buffers and sums them up. That takes less
CPU time than to read straight into the buffers and to sum up later.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.remote.block_store import DAMAGED, Buffers, Outcome
from kvtier.remote.obstore_store import ObstoreStore, check_size, load_obstore
from kvtier.remote.summing import WORD, Summing, Words, words_of
from kvtier.remote.threads import Failure

RENEW_S = 3600.0
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait at a pipe of that name
SCRATCH_BYTES = 512 << 10
LARGE_PIECE = 96 << 10
"""On average, the trailer among them: each piece costs a call, so that smaller ones gain nothing."""
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
        self._scratch = threading.local()
        super().__init__(store, "file", threads)

    def _exists(self, names: Sequence[str]) -> list[bool]:
        return [self._is_file(name) for name in names]

    def _is_file(self, name: str) -> bool:
        try:
            return stat.S_ISREG((self.folder / name).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _get(self, name: str, buffers: Buffers) -> int | None:
        file = os.open(self.folder / name, _READ)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise Failure(Outcome.FAILED, "it is no file")
            check_size(found.st_size, buffers)
            targets = words_of(buffers) if found.st_size >= len(buffers) * LARGE_PIECE else None
            total = None
            if targets is None:
                _read(file, buffers)
            else:
                total = self._read_words(file, found.st_size, targets)
            if abs(time.time() - found.st_mtime) > RENEW_S:
                _renew(file)
            return total
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


def _read(file: int, buffers: Buffers) -> None:
    """Fills all buffers, whatever their lengths are, from the file's beginning."""
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
