"""The head of a GGUF file: its metadata, and the place of its tensors.

Owns       the format up to the first weight, of versions 2 and 3.
Promises   a file that is cut off, or whose head makes no sense, is ``ModelLoadError``. Whatever it holds, reading ends,
           in time and memory of the file's own size at most; the words of a vocabulary are passed over.
Does not   read weights.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from runner.errors import MissingPackage, ModelLoadError

_PACKAGES = ("gguf", "accelerate")
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The format's numbers of types of metadata, as ``struct`` spells them."""
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
    """A tensor by name: its number of elements, and the format's number of their type."""

    name: str
    elements: int
    type: int


@dataclass(frozen=True, eq=False)
class Header:
    """The part before the weights. ``metadata``: by key; of an array its length."""

    file: Path
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        """The family, by llama.cpp's name."""
        return str(self.metadata["general.architecture"])

    def of_model(self, key: str) -> Any:
        """The value under ``key`` of this architecture; None if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")


def checked_header(file: Path) -> Header:
    """The head of a file that can be loaded here.

    Raises ``MissingPackage`` without the packages that read it, ``ModelLoadError`` for a damaged file or a part of one.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"{file} is a GGUF file, and to read it {' and '.join(missing)} must be installed: "
            "pip install 'kvtier[gguf]'"
        )
    found = read_header(file)
    parts = found.metadata.get("split.count", 1)
    if parts > 1:
        raise ModelLoadError(
            f"{file} is one of {parts} parts of a model; join them with llama.cpp's `llama-gguf-split --merge`"
        )
    return found


def read_header(file: Path) -> Header:
    """The head of ``file``. Raises ``ModelLoadError``."""
    try:
        stat = file.stat()
    except OSError as problem:
        raise ModelLoadError(f"{file} cannot be read ({problem})") from problem
    return _read(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1)
def _read(file: Path, _changed_ns: int, size: int) -> Header:
    try:
        with file.open("rb") as opened:
            if size < len(MAGIC) or opened.read(len(MAGIC)) != MAGIC:
                raise ModelLoadError(f"{file} is no GGUF file: it does not begin with GGUF; fetch it again")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(file, _Reader(data, len(MAGIC)))
    except ModelLoadError:  # an OSError too, which says all that there is to say
        raise
    except (OSError, EOFError, ValueError, RecursionError, struct.error) as problem:
        raise ModelLoadError(f"{file} is a damaged GGUF file ({problem}); fetch it again") from problem


def _header(file: Path, reader: _Reader) -> Header:
    version, num_tensors, num_keys = reader.numbers("IQQ")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0:
            raise ValueError("its numbers are big-endian, which is not read here")
        raise ValueError(f"version {version}, and those that there are: {_VERSIONS}")
    metadata = {}
    for _ in range(num_keys):
        key = reader.text()
        metadata[key] = reader.value(*reader.numbers("I"))
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError("it has no general.architecture")
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    tensors, end = [], 0
    for _ in range(num_tensors):
        name = reader.text()
        (num_dims,) = reader.numbers("I")
        shape = reader.numbers(f"{min(num_dims, reader.left)}Q")
        kind, offset = reader.numbers("IQ")
        tensors.append(Tensor(name, math.prod(shape), kind))
        end = max(end, offset + _bytes(tensors[-1]))
    begin = -(-reader.at // alignment) * alignment
    if begin + end > reader.size:
        raise ValueError(f"it ends {begin + end - reader.size:,} bytes before its last weight does")
    return Header(file, metadata, tuple(tensors))


def _bytes(tensor: Tensor) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    return tensor.elements // elements * size


class _Reader:
    """Reads on from ``at``, and never past the end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at
        self.size = len(data)

    @property
    def left(self) -> int:
        return self.size - self.at

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Numbers one after the other, little-endian and without gaps."""
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self._bytes(*self.numbers("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}, which the format has not")
        kind, length = self.numbers("IQ")
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(f"<{_SCALARS[kind]}"))
        else:
            for _ in range(length):
                if kind == _STRING:
                    self._skip(*self.numbers("Q"))
                else:
                    self.value(kind)
        return length

    def _bytes(self, number: int) -> bytes:
        begin = self.at
        self._skip(number)
        return self._data[begin : self.at]

    def _skip(self, number: int) -> None:
        if number > self.left:
            raise EOFError("it ends in the middle of its head")
        self.at += number
