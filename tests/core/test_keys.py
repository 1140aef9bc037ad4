"""Keys: the hash against its reference, and that every field that shapes the KV separates two chains."""

from __future__ import annotations

import struct

import inside
import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, InvalidRequest, KVScales, SlidingWindow
from kvtier.geometry.keys import KeyChain, _extend

REFERENCE = {  # SipHash-2-4-128, key 00 01 .. 0f, message 00 01 .. n-1; the authors' vectors.h
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    20: "9e25fc833f2290733e9344a5e83839eb",
    24: "2db479ae78bd50d8882a8a178a6132ad",
    28: "0664da1668574b88b935f3027358aef4",
    32: "7c3956ca5eeafc3e363e9d556546eb68",
    60: "e3040c00eb28f15366ca73cbd872e740",
}
M = (1 << 64) - 1


def siphash128(key: bytes, message: bytes) -> bytes:
    """SipHash-2-4-128 from its paper, in plain integers."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rounds(n: int) -> None:
        rot = lambda x, b: ((x << b) | (x >> (64 - b))) & M  # noqa: E731
        for _ in range(n):
            v[0] = (v[0] + v[1]) & M
            v[2] = (v[2] + v[3]) & M
            v[1], v[3] = rot(v[1], 13) ^ v[0], rot(v[3], 16) ^ v[2]
            v[0] = rot(v[0], 32)
            v[2] = (v[2] + v[1]) & M
            v[0] = (v[0] + v[3]) & M
            v[1], v[3] = rot(v[1], 17) ^ v[2], rot(v[3], 21) ^ v[0]
            v[2] = rot(v[2], 32)

    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return struct.pack("<QQ", low, v[0] ^ v[1] ^ v[2] ^ v[3])


def link(key: bytes, message: bytes) -> bytes:
    """The compiled hash of a message of 16 bytes and whole tokens."""
    secret = np.frombuffer(key, "<u8").astype(np.uint64)
    root = np.frombuffer(message[:16], "<u8").astype(np.uint64)
    tokens = np.frombuffer(message[16:], "<i4").astype(np.int32)
    keys = np.zeros((1, 2), np.uint64)
    _extend(secret, root, tokens, len(tokens), keys, 0, 1)
    return struct.pack("<QQ", *map(int, keys[0]))


@pytest.mark.parametrize("length", REFERENCE)
def test_the_hash_gives_the_reference_vectors(length):
    key, message = bytes(range(16)), bytes(range(length))
    assert siphash128(key, message).hex() == REFERENCE[length]
    assert link(key, message).hex() == REFERENCE[length]


@given(
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.lists(st.integers(0, 2**31 - 1), max_size=70),
)
def test_the_hash_agrees_with_plain_python_for_any_tokens(key, parent, tokens):
    message = parent + struct.pack(f"<{len(tokens)}I", *tokens)
    assert link(key, message) == siphash128(key, message)


FULL = FullAttention()


def group(name="full", attention=FULL, bt=4, layers=2, heads=1, dim=2, dtype="float32", dim_v=None, scales=None):
    scales = scales and KVScales(*scales)
    return GroupSpec(name, attention, layers, heads, dim, dtype, bt, dim_v, scales)


def fp8(k=((2.0,), (1.0,)), v=((1.0,), (1.0,)), **geometry):
    """Two layers of one head, with scales."""
    return CacheSpec([group(dtype="fp8", scales=(k, v), **geometry)])


def keys_of(spec=None, tokens=range(64), model="m", secret=b"s", adapter=None, salt=None, extra=()):
    chain = KeyChain(spec or CacheSpec([group()]), model, secret)
    return chain.extend(chain.root(adapter, salt, extra), np.array(tokens, np.int32), np.empty((0, 2), np.uint64))


CONTEXTS = [
    {},
    {"model": "n"},
    {"model": ""},
    {"secret": b"t"},
    {"adapter": "X"},
    {"adapter": ""},
    {"adapter": "m"},
    {"salt": "X"},
    {"salt": ""},
    {"extra": ("X",)},
    {"extra": (b"X",)},
    {"extra": (1,)},
    {"extra": (True,)},
    {"extra": ("1",)},
    {"extra": (None,)},
    {"extra": (("X",),)},
    {"extra": ("X", "Y")},
    {"extra": ("XY",)},
    {"extra": (("X", "Y"),)},
    {"extra": (("X",), "Y")},
    {"adapter": "X", "salt": "Y"},
    {"adapter": "Y", "salt": "X"},
    {"adapter": "XY"},
    {"salt": "X", "extra": ("Y",)},
    {"spec": CacheSpec([group(name="other")])},
    {"spec": CacheSpec([group(layers=3)])},
    {"spec": CacheSpec([group(heads=2)])},
    {"spec": CacheSpec([group(dim=4)])},
    {"spec": CacheSpec([group(dim_v=4)])},
    {"spec": CacheSpec([group(dtype="float16")])},
    {"spec": CacheSpec([group(dtype="float8_e5m2")])},
    {"spec": CacheSpec([group(dtype="fp8")])},
    {"spec": fp8()},
    {"spec": fp8(k=((2.0,), (2.0,)))},
    {"spec": fp8(k=((1.0,), (2.0,)))},
    {"spec": fp8(k=((float(np.nextafter(np.float32(2), np.float32(3))),), (1.0,)))},
    {"spec": fp8(k=((1.0,), (1.0,)), v=((2.0,), (1.0,)))},
    {"spec": fp8(k=((1.0,), (1.0,)), v=((1.0,), (2.0,)))},
    {"spec": fp8(heads=2, k=((1.0, 2.0), (1.0, 1.0)), v=((1.0, 1.0),) * 2)},
    {"spec": fp8(heads=2, k=((2.0, 1.0), (1.0, 1.0)), v=((1.0, 1.0),) * 2)},
    {"spec": CacheSpec([group(bt=8)])},
    {"spec": CacheSpec([group(attention=SlidingWindow(8))])},
    {"spec": CacheSpec([group(attention=SlidingWindow(9))])},
    {"spec": CacheSpec([group(attention=ChunkedLocal(8))])},
    {"spec": CacheSpec([group(), group(name="win", attention=SlidingWindow(8))])},
    {"spec": CacheSpec([group(), group(name="win", attention=SlidingWindow(8), bt=8)])},
]


def test_no_two_contexts_share_a_key():
    seen: dict[bytes, int] = {}
    for i, context in enumerate(CONTEXTS):
        for key in keys_of(**context):
            assert seen.setdefault(key.tobytes(), i) == i, f"{CONTEXTS[seen[key.tobytes()]]} and {context}"


def test_equal_contexts_have_equal_keys():
    for context in CONTEXTS:
        assert np.array_equal(keys_of(**context), keys_of(**context))


def test_scales_of_one_are_no_scales():
    plain = keys_of(spec=CacheSpec([group(dtype="fp8")]))
    assert np.array_equal(plain, keys_of(spec=fp8(k=((1.0,), (1.0,)))))
    assert np.array_equal(plain, keys_of(spec=CacheSpec([group(dtype="float8_e4m3fn")])))


def test_a_secret_is_random_per_cache_unless_given():
    assert not np.array_equal(keys_of(secret=None), keys_of(secret=None))


@given(st.lists(st.integers(0, 9), min_size=4, max_size=40), st.integers(0, 39), st.integers(0, 9))
def test_a_key_names_every_token_up_to_its_end_and_none_after(tokens, at, other):
    at %= len(tokens)
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    a, b = keys_of(tokens=tokens), keys_of(tokens=changed)
    assert len(a) == len(tokens) // 4
    same = len(a) if tokens == changed else at // 4
    assert np.array_equal(a[:same], b[:same])
    assert not np.any(np.all(a[same:] == b[same:], axis=1))


@given(st.lists(st.integers(0, 99), min_size=0, max_size=50), st.lists(st.integers(0, 50), max_size=4))
def test_a_chain_extended_in_pieces_equals_one_made_at_once(tokens, cuts):
    chain = KeyChain(CacheSpec([group()]), "m", b"s")
    root, array = chain.root(None, None, ()), np.array(tokens, np.int32)
    keys = np.empty((0, 2), np.uint64)
    for cut in [*sorted(min(c, len(tokens)) for c in cuts), len(tokens)]:
        keys = chain.extend(root, array[:cut], keys)
    assert np.array_equal(keys, chain.extend(root, array, np.empty((0, 2), np.uint64)))


def test_the_chain_runs_at_the_gcd_of_the_blocks():
    spec = CacheSpec([group(bt=6), group(name="win", attention=SlidingWindow(8), bt=4)])
    assert len(keys_of(spec, tokens=range(13))) == 6


@pytest.mark.parametrize("value", [1.5, object(), {"a": 1}, {1}])
def test_an_extra_key_of_another_type_is_refused(value):
    with pytest.raises(InvalidRequest, match="extra_keys"):
        keys_of(extra=(value,))


@pytest.mark.parametrize("first", CONTEXTS[4:24])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_requests_of_different_contexts_never_share_blocks_in_either_tier(make_serving, tier, first):
    """The same tokens twice: once with these fields, once without. Nothing is found; the third time all of it is."""
    names = {"adapter": "adapter", "salt": "cache_salt", "extra": "extra_keys"}
    options = {names[k]: v for k, v in first.items()}
    serving = make_serving({"full": (FullAttention(), 4)}, 32, 64, hold=[])

    def push_out() -> None:
        if tier == "host":
            inside.pools(serving.cache).forget_all()

    serving.serve("with", range(21), 1, **options)
    push_out()
    assert sum(serving.serve("without", range(21), 1).cached_tokens.values()) == 0
    push_out()
    assert serving.serve("with again", range(21), 1, **options).cached_tokens[tier] == 20
