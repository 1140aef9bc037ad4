"""A digest of a checkpoint's bytes, for the names of what was computed with it.

Promises   every byte of the files is read: two fine-tunes may differ in a few numbers of one tensor. From memory that
           takes about a second for 10 GB a core; files that are not in the page cache are read from the disk.
Does not   withstand weights that were made to have the digest of others.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtier.remote.envelope import WORD, checksum_of

_PIECE_BYTES = 4 << 20
_MOST_THREADS = 8
SAYS_NOTHING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Fields of config.json that do not change K and V of given weights in a given dtype."""


def weights_digest(files: Sequence[Path], config: Mapping[str, Any]) -> str:
    """32 hexadecimal digits, of these files and of a model's config. Raises ``OSError``."""
    parts = [(file.name, file.stat().st_size) for file in files]
    told = {name: value for name, value in config.items() if name not in SAYS_NOTHING}
    whole = json.dumps([parts, _sums(files), told], sort_keys=True)
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def _pieces(files: Sequence[Path]) -> Iterator[tuple[Path, int, int]]:
    for file in files:
        size = file.stat().st_size
        for at in range(0, size, _PIECE_BYTES):
            yield file, at, min(_PIECE_BYTES, size - at)


def _sums(files: Sequence[Path]) -> list[int]:
    """The checksum of each piece, read side by side."""
    mine = threading.local()

    def of(piece: tuple[Path, int, int]) -> int:
        file, at, size = piece
        if not hasattr(mine, "room"):
            mine.room = memoryview(bytearray(_PIECE_BYTES))
        padded = -(-size // WORD) * WORD
        mine.room[size:padded] = bytes(padded - size)
        with file.open("rb", buffering=0) as source:
            read = os.preadv(source.fileno(), [mine.room[:size]], at)
        if read != size:
            raise OSError(f"{file} became shorter")
        return checksum_of([mine.room[:padded]])

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(of, _pieces(files)))
