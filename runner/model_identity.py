"""A model's identity for caches that share a store: a name with a digest of the weights and of how they are computed.

Promises   equal identities have equal weights and an equal config, byte by byte, but for a chance of 2^-64; also the
           same dtype, attention backend and kind of device, whose K and V else differ in rounding. Every byte of the
           weights is read: two fine-tunes may differ in a few numbers of one tensor. From memory that takes about a
           second for 10 GB a core; files that are not in the page cache are read from the disk.
Does not   tell apart versions of torch, transformers or a kernel library, nor GPUs of two kinds. Give ``model_id``
           where that matters. It is no defence against weights that were made to have the digest of others.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtier.remote.envelope import WORD, checksum_of
from runner.checkpoint import weight_files
from runner.errors import ModelLoadError

_PIECE_BYTES = 4 << 20
_MOST_THREADS = 8
_SAYS_NOTHING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Fields of config.json that do not change K and V of given weights in a given dtype."""


def model_id(model: Any, folder: Path) -> str:
    """``folder``: the folder or GGUF file that ``model``, a ``HybridModel``, was loaded from. Raises
    ``ModelLoadError``."""
    computed = [str(model.dtype), str(model.attention.name), str(model.device.type)]
    whole = hashlib.blake2b(json.dumps([weights_digest(folder), *computed]).encode(), digest_size=16)
    return f"{model.name or 'model'}@{whole.hexdigest()}"


def weights_digest(folder: Path) -> str:
    """32 hexadecimal digits, of the weights and config.json in a folder, or of a GGUF file."""
    files = [folder] if folder.is_file() else weight_files(folder)
    if not files:
        raise ModelLoadError(f"{folder} has no weights: no *.safetensors")
    try:
        parts = [(file.name, file.stat().st_size) for file in files]
        sums = _sums(files)
    except OSError as problem:
        raise ModelLoadError(f"the weights in {folder} cannot be read ({problem})") from problem
    config = {} if folder.is_file() else _config(folder)
    return hashlib.blake2b(json.dumps([parts, sums, config], sort_keys=True).encode(), digest_size=16).hexdigest()


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text("utf-8"))
        return {name: value for name, value in found.items() if name not in _SAYS_NOTHING}
    except (OSError, ValueError, AttributeError) as problem:
        raise ModelLoadError(f"{folder / 'config.json'} cannot be read ({problem})") from problem


def _pieces(files: list[Path]) -> Iterator[tuple[Path, int, int]]:
    for file in files:
        size = file.stat().st_size
        for at in range(0, size, _PIECE_BYTES):
            yield file, at, min(_PIECE_BYTES, size - at)


def _sums(files: list[Path]) -> list[int]:
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
