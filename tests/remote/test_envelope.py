"""The trailer: nothing wrong passes, and each wrong thing has its reason."""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvtier.cpu_offload.engines._blocks import checksum_blocks
from kvtier.remote.envelope import FORMAT, TRAILER_BYTES, Envelope, checksum_of, read_trailer
from kvtier.remote.keeper.upkeep import check_object
from remote.driving import NAMESPACE, key, name, pattern

Pieces = list[memoryview]
BLOCKS = 4
SECRET = b"secret of the fleet"


def views(*pieces: bytes) -> Pieces:
    return [memoryview(bytearray(piece)) for piece in pieces]


def sealed(secret: bytes | None = None) -> tuple[Pieces, memoryview]:
    pieces, trailer = views(*(pattern(i, 16) for i in range(BLOCKS))), memoryview(bytearray(TRAILER_BYTES))
    Envelope(NAMESPACE, secret).seal(key(1), "t", pieces, trailer)
    return pieces, trailer


def check(pieces: Pieces, trailer: memoryview, secret: bytes | None = None) -> str:
    return Envelope(NAMESPACE, secret).check(key(1), "t", pieces, trailer)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_was_sealed_passes_and_only_that(secret: bytes | None) -> None:
    pieces, trailer = sealed(secret)
    assert check(pieces, trailer, secret) == ""
    for place in [*pieces, trailer]:
        for i in range(len(place)):
            for bit in range(8):
                place[i] ^= 1 << bit
                assert check(pieces, trailer, secret), (i, bit)
                place[i] ^= 1 << bit
    assert check(pieces, trailer, secret) == ""


def test_each_damage_has_its_reason() -> None:
    pieces, trailer = sealed()
    pieces[2][3] ^= 4
    assert check(pieces, trailer) == "its payload has another checksum"
    pieces, trailer = sealed()
    for i in range(TRAILER_BYTES):
        trailer[i] ^= 1
        reason = check(pieces, trailer)
        assert reason.startswith("torn" if i < 8 else "its trailer has another sum"), i
        trailer[i] ^= 1


def test_every_truncation_is_seen() -> None:
    pieces, trailer = sealed()
    whole = b"".join([*pieces, trailer])
    assert check_object(name(1), memoryview(bytearray(whole))) == ""
    for end in range(len(whole)):
        assert check_object(name(1), memoryview(bytearray(whole[:end]))).startswith("torn"), end
    longer = memoryview(bytearray(bytes(16) + whole))
    assert check_object(name(1), longer).startswith("torn: its payload has 80 bytes, not 64")


def test_a_tail_that_was_never_written_is_seen() -> None:
    """As after a power cut: the length is right, the end is zeros."""
    pieces, trailer = sealed()
    whole = b"".join([*pieces, trailer])
    for end in range(len(whole) - 1):
        torn = memoryview(bytearray(whole[:end] + bytes(len(whole) - end)))
        assert check(views(torn[:64]), torn[64:]) and check_object(name(1), torn), end


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda p, t: Envelope(bytes(16)).check(key(1), "t", p, t), f"of another namespace, {NAMESPACE.hex()}: "),
        (lambda p, t: Envelope(NAMESPACE).check(key(2), "t", p, t), f"under a wrong name: it is t/{key(1).hex()}"),
        (lambda p, t: Envelope(NAMESPACE).check(key(1), "e", p, t), f"under a wrong name: it is t/{key(1).hex()}"),
        (lambda p, t: Envelope(NAMESPACE).check(key(1), "t", p[:3], t), "of 4 blocks in 64 bytes, not 3 in 48"),
        (lambda p, t: Envelope(NAMESPACE).check(key(1), "t", p, t, 5), "of 4 blocks in 64 bytes, not 5 in 64"),
        (lambda p, t: check_object(name(2), memoryview(b"".join([*p, t]))), "under a wrong name: it is "),
        (lambda p, t: check_object(name(1, "e"), memoryview(b"".join([*p, t]))), "under a wrong name: it is "),
    ],
)
def test_an_object_of_another_name_says_whose_it_is(other: Callable[[Pieces, memoryview], str], reason: str) -> None:
    assert other(*sealed()).startswith(reason)


def test_blocks_and_words_that_changed_places_are_seen() -> None:
    pieces, trailer = sealed()
    for i in range(BLOCKS):
        for j in range(i):
            swapped = pieces.copy()
            swapped[i], swapped[j] = pieces[j], pieces[i]
            assert check(swapped, trailer)
    words = np.frombuffer(b"".join(pieces), np.uint64)
    for i in range(len(words)):
        for j in range(i):
            order = np.arange(len(words))
            order[[i, j]] = j, i
            assert check(views(words[order].tobytes()), trailer)


@given(st.lists(st.integers(1, 6), max_size=8))
def test_the_checksum_is_that_of_the_whole_however_it_is_cut(words: list[int]) -> None:
    whole = bytearray(pattern(len(words), 8 * sum(words)))
    expected = np.zeros(1, np.uint64)
    checksum_blocks(np.frombuffer(whole, np.uint64), np.zeros(1, np.int64), np.array([len(whole)]), expected)
    ends = np.cumsum([0, *words]) * 8
    view = memoryview(whole)
    assert checksum_of([view[a:b] for a, b in pairwise(ends)]) == int(expected[0])
    odd = memoryview(bytearray(b"x" + whole))[1:]  # a start that is no multiple of 8
    assert checksum_of([odd, memoryview(b"")]) == checksum_of([memoryview(bytes(whole))]) == int(expected[0])


def reframed(trailer: memoryview, at: int, value: bytes) -> memoryview:
    """A trailer with other bytes and a right sum, as another program would write it."""
    raw = bytearray(trailer)
    raw[at : at + len(value)] = value
    raw[120:] = hashlib.blake2b(raw[:120], digest_size=8).digest()
    return memoryview(raw)


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (8, struct.pack("<I", 0), f"of an older format, 0; this kvtier reads {FORMAT}"),
        (8, struct.pack("<I", 9), f"of a newer format, 9; this kvtier reads {FORMAT}"),
        (12, (0x01020304).to_bytes(4, sys.byteorder)[::-1], "written by a machine of another byte order"),
        (64, struct.pack("<Q", 72), "of 4 blocks in 72 bytes, not 4 in 64"),
        (64, struct.pack("<Q", 63), "with a trailer that no kvtier has written"),
        (76, struct.pack("<I", 2), "with a trailer that no kvtier has written"),
        (48, b"\xff", "with a trailer that no kvtier has written"),
        (80, bytes(8), "its payload has another checksum"),
    ],
)
def test_trailers_of_other_programs_are_told_apart(at: int, value: bytes, reason: str) -> None:
    pieces, trailer = sealed()
    assert check(pieces, reframed(trailer, at, value)) == reason


def test_the_places_that_later_formats_must_keep() -> None:
    _, trailer = sealed()
    raw = bytes(trailer)
    assert (raw[:8], raw[8:12]) == (b"\x8bkvtier\n", struct.pack("<I", 1))
    assert raw[120:] == hashlib.blake2b(raw[:120], digest_size=8).digest()
    found = read_trailer(raw)
    assert not isinstance(found, str)
    assert (found.namespace, found.key, found.kind, found.num_blocks) == (NAMESPACE, key(1), "t", BLOCKS)


def test_without_the_secret_nobody_makes_an_object_that_passes() -> None:
    pieces, trailer = sealed(SECRET)
    assert check(pieces, trailer) == ""  # who demands no digest reads it like any other
    assert check(*sealed(None), SECRET) == "without a digest, which this remote demands"
    other = "not from a holder of the secret: its digest is another"
    assert check(*sealed(b"a guess"), SECRET) == other
    pieces[0][0] ^= 1  # a new text under the old digest, with all sums made anew
    forged = reframed(trailer, 80, struct.pack("<Q", checksum_of(pieces)))
    assert (check(pieces, forged), check(pieces, forged, SECRET)) == ("", other)


def test_what_cannot_be_sealed_is_refused() -> None:
    trailer = memoryview(bytearray(TRAILER_BYTES))
    for key_bytes, kind in ((b"short", "t"), (key(1), "k" * 17)):
        with pytest.raises(ValueError, match="a key has 16 bytes and a kind at most 16"):
            Envelope(NAMESPACE).seal(key_bytes, kind, [], trailer)
    with pytest.raises(ValueError, match="not whole 8-byte words"):
        Envelope(NAMESPACE).seal(key(1), "t", views(b"123"), trailer)
