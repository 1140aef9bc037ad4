"""The trailer behind every object: what the payload is, and whether it is whole.

Owns       the format of the trailer, ``TRAILER_BYTES`` long and last in its object.
Promises   ``check`` passes exactly what ``seal`` has sealed: this namespace, this key, this kind, these bytes. Any one
           word that changed is seen for certain, other damage but for a chance of 2^-64. With a secret, no object of
           somebody without it passes. Both run on a remote's thread, without the GIL for what takes time.
Does not   know blocks: a payload is whole 8-byte words, in pieces that may be cut differently at each end.

     0 magic              8 format    12 payload's byte order    16 namespace    32 key    48 kind (ASCII, zeros)
    64 payload's bytes   72 blocks    76 digest's kind           80 checksum     88 digest 120 the trailer's own sum
Numbers are little-endian. Magic, format and the own sum keep their places, 128 bytes and the last 8 from the end, in
any later format.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.remote.backends.contract import Buffers
from kvtier.remote.sums import sum_words

TRAILER_BYTES = 128
MAGIC = b"\x8bkvtier\n"
FORMAT = 1
MOST_KIND = 16
WORD = 8

_HEAD = struct.Struct("<8sI4s16s16s16sQII")
_SUM = struct.Struct("<Q")
_ORDER = (0x01020304).to_bytes(4, sys.byteorder)
_NO_DIGEST, _BLAKE2B = 0, 1
_UINT64 = np.dtype(np.uint64)
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Trailer:
    """A trailer whose own sum is right."""

    order: bytes
    namespace: bytes
    key: bytes
    kind: str
    num_bytes: int
    num_blocks: int
    has_digest: bool
    checksum: int
    digest: bytes


class Envelope:
    """Seals and checks the objects of one namespace. ``secret``: adds a digest that only its holders can make."""

    def __init__(self, namespace: bytes, secret: bytes | None = None) -> None:
        assert len(namespace) == 16
        self.namespace = namespace
        self._secret = None if secret is None else _digest_key(secret)

    def seal(self, key: bytes, kind: str, buffers: Buffers, trailer: memoryview, num_blocks: int | None = None) -> None:
        """Writes ``trailer`` for the payload in ``buffers``. ``num_blocks`` is the number of buffers by default."""
        blocks = len(buffers) if num_blocks is None else num_blocks
        size = sum(len(piece) for piece in buffers)
        digest_kind = _NO_DIGEST if self._secret is None else _BLAKE2B
        name = kind.encode("ascii")
        if len(key) != 16 or len(name) > MOST_KIND:
            raise ValueError(f"a key has 16 bytes and a kind at most {MOST_KIND}: {key!r}, {kind!r}")
        head = _HEAD.pack(MAGIC, FORMAT, _ORDER, self.namespace, key, name, size, blocks, digest_kind)
        head += _SUM.pack(checksum_of(buffers))
        head += bytes(32) if self._secret is None else _digest(self._secret, head, buffers)
        trailer[:] = head + _own_sum(head)

    def check(
        self,
        key: bytes,
        kind: str,
        buffers: Buffers,
        trailer: memoryview,
        num_blocks: int | None = None,
        total: int | None = None,
    ) -> str:
        """What is wrong with an object that was read under this key and kind; "" if nothing is.

        ``total``: the sum of the words of payload and trailer, if it was taken while they were read.
        """
        found = read_trailer(trailer)
        if isinstance(found, str):
            return found
        size, blocks = sum(len(piece) for piece in buffers), len(buffers) if num_blocks is None else num_blocks
        if found.namespace != self.namespace:
            return f"of another namespace, {found.namespace.hex()}: another model, geometry or secret"
        if found.key != key or found.kind != kind:
            return f"under a wrong name: it is {found.kind}/{found.key.hex()}"
        if (found.num_bytes, found.num_blocks) != (size, blocks):
            return f"of {found.num_blocks} blocks in {found.num_bytes:,} bytes, not {blocks} in {size:,}"
        payload = None if total is None else (total - checksum_of([trailer], size // WORD)) & _MASK
        return self.check_payload(found, buffers, trailer, payload)

    def check_payload(self, found: Trailer, buffers: Buffers, trailer: memoryview, checksum: int | None = None) -> str:
        """The part of ``check`` that reads the payload: checksum and digest."""
        if found.order != _ORDER:
            return "written by a machine of another byte order"
        if (checksum_of(buffers) if checksum is None else checksum) != found.checksum:
            return "its payload has another checksum"
        if self._secret is not None:
            if not found.has_digest:
                return "without a digest, which this remote demands"
            if not hmac.compare_digest(_digest(self._secret, bytes(trailer[:88]), buffers), found.digest):
                return "not from a holder of the secret: its digest is another"
        return ""


def read_trailer(trailer: memoryview | bytes) -> Trailer | str:
    """The trailer, or what is wrong with it."""
    raw = bytes(trailer)
    if len(raw) != TRAILER_BYTES or raw[:8] != MAGIC:
        return "torn, or no object of kvtier: there is no trailer at its end"
    _, version, order, namespace, key, kind, size, blocks, digest_kind = _HEAD.unpack_from(raw)
    is_whole = hmac.compare_digest(raw[120:], _own_sum(raw[:120]))
    if version != FORMAT and is_whole:
        return f"of {'an older' if version < FORMAT else 'a newer'} format, {version}; this kvtier reads {FORMAT}"
    if not is_whole:
        return "its trailer has another sum"
    if digest_kind not in (_NO_DIGEST, _BLAKE2B) or size % WORD or not kind.isascii():
        return "with a trailer that no kvtier has written"
    name = kind.rstrip(b"\0").decode("ascii")
    (total,) = _SUM.unpack_from(raw, 80)
    return Trailer(order, namespace, key, name, size, blocks, digest_kind == _BLAKE2B, total, raw[88:120])


def checksum_of(buffers: Buffers, place: int = 0) -> int:
    """The checksum of all buffers in a row, behind ``place`` other words; each is whole 8-byte words."""
    total = 0
    for piece in buffers:
        words = _words(piece)
        total += int(sum_words(words, place))
        place += len(words)
    return total & _MASK


def _words(piece: memoryview) -> npt.NDArray[np.uint64]:
    if len(piece) % WORD:
        raise ValueError(f"a piece of {len(piece)} bytes is not whole {WORD}-byte words")
    words = np.frombuffer(piece, _UINT64)
    return words if words.flags.carray else words.copy()  # the loop is compiled for memory that is aligned and writable


def _digest_key(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=b"kvtier-digest").digest()


def _digest(secret: bytes, head: bytes, buffers: Buffers) -> bytes:
    state = hashlib.blake2b(head, digest_size=32, key=secret)
    for piece in buffers:
        state.update(piece)
    return state.digest()


def _own_sum(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=8).digest()
