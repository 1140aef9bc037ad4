"""Content names of blocks: one chain of 128-bit keyed hashes per request.

Owns       SipHash-2-4 with 128-bit output (Aumasson and Bernstein, 2012) in compiled form, and the seed of a chain.
Promises   two contexts get equal keys only if every field that shapes the KV is equal. These are format, model,
           geometry, adapter, salt, extra keys and every token so far. Keeps I14.
Does not   know groups beyond their geometry: group g's key i is the chain's value at token (i + 1) * block_tokens_g.

The hash is keyed with a secret, random per process unless given. So an outsider cannot build a collision
(CVE-2025-25183 was a prefix cache with a predictable hash).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import InvalidRequest
from kvtier.machine.integers import integer
from kvtier.machine.loops.jit import inlined, jit

KeyArray = npt.NDArray[np.uint64]
"""uint64 [n, 2]: low and high word of n keys."""

FORMAT_VERSION = 1
MOST_NESTED = 32
"""Tuples of extra keys within each other: more are a mistake, such as a list that holds itself."""
MOST_VALUES = 2**16
"""Extra keys of one request, tuples and what is in them. Tuples that share others have many in few bytes."""

_U = np.uint64


@inlined
def _rotl(x: Any, bits: Any) -> Any:
    return (x << _U(bits)) | (x >> _U(64 - bits))


@inlined
def _round(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0 = v0 + v1
    v1 = _rotl(v1, 13) ^ v0
    v0 = _rotl(v0, 32)
    v2 = v2 + v3
    v3 = _rotl(v3, 16) ^ v2
    v0 = v0 + v3
    v3 = _rotl(v3, 21) ^ v0
    v2 = v2 + v1
    v1 = _rotl(v1, 17) ^ v2
    v2 = _rotl(v2, 32)
    return v0, v1, v2, v3


@inlined
def _absorb(v0: Any, v1: Any, v2: Any, v3: Any, word: Any) -> Any:
    v3 ^= word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@inlined
def sip_link(secret: Any, lo: Any, hi: Any, tokens: Any, start: Any, count: Any) -> Any:
    """SipHash-2-4-128 of (lo, hi, tokens[start:start + count] as little-endian uint32); returns (lo, hi)."""
    k0, k1 = secret[0], secret[1]
    v0 = k0 ^ _U(0x736F6D6570736575)
    v1 = k1 ^ _U(0x646F72616E646F6D) ^ _U(0xEE)
    v2 = k0 ^ _U(0x6C7967656E657261)
    v3 = k1 ^ _U(0x7465646279746573)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, lo)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, hi)
    for pair in range(count // 2):
        at = start + 2 * pair
        word = _U(np.uint32(tokens[at])) | (_U(np.uint32(tokens[at + 1])) << _U(32))
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
    last = _U((16 + 4 * count) & 0xFF) << _U(56)
    if count % 2:
        last |= _U(np.uint32(tokens[start + count - 1]))
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, last)
    v2 ^= _U(0xEE)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    out_lo = v0 ^ v1 ^ v2 ^ v3
    v1 ^= _U(0xDD)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return out_lo, v0 ^ v1 ^ v2 ^ v3


@jit
def _extend(secret: Any, root: Any, tokens: Any, unit: Any, keys: Any, first: Any, end: Any) -> None:
    lo, hi = root[0], root[1]
    if first > 0:
        lo, hi = keys[first - 1, 0], keys[first - 1, 1]
    for i in range(first, end):
        lo, hi = sip_link(secret, lo, hi, tokens, i * unit, unit)
        keys[i, 0] = lo
        keys[i, 1] = hi


class KeyChain:
    """Makes chains for one cache: holds the secret and the fields that all its requests share."""

    def __init__(self, spec: CacheSpec, model_id: str = "", key_secret: bytes | None = None) -> None:
        if key_secret is None:
            key_secret = secrets.token_bytes(16)
        self._seed_secret = hashlib.blake2b(key_secret, digest_size=32, person=b"kvtier-seed").digest()
        words = hashlib.blake2b(key_secret, digest_size=16, person=b"kvtier-chain").digest()
        self.secret: npt.NDArray[np.uint64] = np.frombuffer(words, "<u8").astype(np.uint64)
        self.unit_tokens = spec.hash_tokens
        self.model_id = model_id
        geometry = repr(
            [
                (g.name, g.attention, g.num_layers, g.num_kv_heads, g.head_dims, g.dtype, g.kv_scales, g.block_tokens)
                + ((g.entry_tokens,) if g.entry_tokens > 1 else ())  # else as before there were entries
                for g in spec.groups
            ]
        )
        self.fixed = encoded_fields(
            ("format", FORMAT_VERSION), ("model", model_id), ("geometry", geometry), ("unit", self.unit_tokens)
        )
        """What all keys of this cache have in common, encoded."""

    def root(self, adapter: str | None, salt: str | None, extra_keys: Sequence[Any]) -> npt.NDArray[np.uint64]:
        """The chain's value before its first token; uint64 [2]."""
        fields = self.fixed + encoded_fields(("adapter", adapter), ("salt", salt), ("extra", tuple(extra_keys)))
        digest = hashlib.blake2b(fields, digest_size=16, key=self._seed_secret).digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64)

    def extend(self, root: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32], keys: KeyArray) -> KeyArray:
        """The keys of all full units of ``tokens``, given the known keys; uint64 [len(tokens) // unit, 2]."""
        end = len(tokens) // self.unit_tokens
        known = min(len(keys), end)
        if known == end:
            return keys[:end]
        out = np.empty((end, 2), np.uint64)
        out[:known] = keys[:known]
        self.fill(root, tokens, out, known)
        return out

    def fill(self, root: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32], out: KeyArray, known: int) -> int:
        """Writes the keys of all full units of ``tokens`` to ``out``, which has ``known`` already; returns their
        number."""
        end = len(tokens) // self.unit_tokens
        ids = np.require(tokens, np.int32, ["C", "W"])  # the loop is compiled for this form only
        _extend(self.secret, root, ids, self.unit_tokens, out, known, end)
        return end


class Text:
    """A request's tokens, int32, and the keys of their full units, uint64 [units, 2]; both grow at the end in place."""

    def __init__(self, chain: KeyChain, root: npt.NDArray[np.uint64], prompt: npt.NDArray[np.int32]) -> None:
        self.root = root
        """The chain's value before the first token, uint64 [2]."""
        self._chain = chain
        self._token_room = np.empty(0, np.int32)
        self._key_room = np.empty((0, 2), np.uint64)
        self.tokens, self.keys = self._token_room, self._key_room
        self.head = b""
        """The first unit's key, if the unit is full: texts of different heads share nothing."""
        self.append(prompt)  # a copy: tokens with keys must not change

    def append(self, tokens: npt.NDArray[np.int32]) -> None:
        """Adds ``tokens`` and the keys of the units that they fill."""
        known, units = len(self.tokens), len(self.keys)
        end = known + len(tokens)
        if end > len(self._token_room):
            room = end + end // 8 + 64
            self._token_room = np.concatenate([self.tokens, np.empty(room - known, np.int32)])
            keys = np.empty((room // self._chain.unit_tokens - units, 2), np.uint64)
            self._key_room = np.concatenate([self.keys, keys])
        self._token_room[known:end] = tokens
        self.tokens = self._token_room[:end]
        self.keys = self._key_room[: self._chain.fill(self.root, self.tokens, self._key_room, units)]
        if not units:
            self.head = self.keys[:1].tobytes()


def plain_text(value: str) -> str:
    """The same text, of no class of somebody's own."""
    return str.__str__(value)


def plain_extra_keys(values: Sequence[Any]) -> tuple[Any, ...]:
    """The same values in Python's own types. Raises ``InvalidRequest`` for what cannot be part of a key."""
    count = 0

    def plain(value: object, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > MOST_NESTED or count > MOST_VALUES:
            raise InvalidRequest(
                f"extra_keys are nested more than {MOST_NESTED} deep, or have more than {MOST_VALUES:,} values"
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return plain_text(value)
        if isinstance(value, (bytes, bytearray)):
            return bytes(value)
        if isinstance(value, (tuple, list)):
            return tuple([plain(inner, depth + 1) for inner in value])
        number = integer(value)
        return _refuse(value) if number is None else number

    return tuple([plain(value, 0) for value in values])


def _refuse(value: object) -> NoReturn:
    raise InvalidRequest(
        f"extra_keys may hold str, bytes, int, bool, None and tuples of them, not {type(value).__name__}"
    )


def encoded_fields(*pairs: tuple[str, object]) -> bytes:
    """Tagged, length-prefixed bytes: no two field lists encode alike (vLLM issue 44701 was an untagged tuple)."""
    out = bytearray()
    for name, value in pairs:
        for part in (name.encode(), _encode(value)):
            out += len(part).to_bytes(8, "little") + part
    return bytes(out)


def _encode(value: object) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray)):
        return b"y" + bytes(value)
    if (number := integer(value)) is not None:
        return b"i" + (str(number) if abs(number) < 2**64 else hex(number)).encode()  # str refuses very long integers
    if isinstance(value, (tuple, list)):
        return b"t" + encoded_fields(*((str(i), item) for i, item in enumerate(value)))
    _refuse(value)
