"""Section H of docs/FIELD-BUGS.md: keys, hashes, isolation. Named after the tracker and its number.

What is asserted is how many tokens were reused, not how a key is encoded.
"""

from __future__ import annotations

import inside
import numpy as np
import pytest
from core.driving import prompt

from kvtier import ChunkedLocal, FullAttention, InvalidRequest, Request, SlidingWindow
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools, Mark
from kvtier.testing import canary_spec

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
TIERS = ["device", "host"]
TOKENS = prompt(0, 21)


def reused(serving, name: str, tier: str = "device", **options: object) -> int:
    """Serves the prompt in this context; returns how many of its tokens were found. "host": the device is emptied."""
    if tier == "host":
        inside.pools(serving.cache).forget_all()
    return sum(serving.serve(name, TOKENS, 1, **options).cached_tokens.values())


# --- hashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", range(0, 128, 5))
def test_h1_cve_2025_25183_a_key_that_differs_in_one_bit_is_a_miss(bit):
    """All 128 bits are compared, not only those that the index keeps in its slots."""
    pools, group = BlockPools(Layout.fixed([64], [4])), np.zeros(1, np.int32)
    key = np.array([[0x0123456789ABCDEF, 0xFEDCBA9876543210]], np.uint64)
    block = pools.take(group)
    pools.publish(group, block, key, Mark.READY)
    other = key.copy()
    other[0, bit // 64] ^= np.uint64(1 << bit % 64)
    assert pools.find(group, key).tolist() == block.tolist()
    assert pools.find(group, other).tolist() == [0]


@pytest.mark.parametrize("at", [0, 1, 3, 7, 30])
@pytest.mark.parametrize("change", [(31, -1), (-31, 1), (1, -31), (1, -1)])
def test_h1_megatron_4158_changes_that_cancel_in_a_polynomial_give_other_keys(at, change):
    tokens = np.full(32, 100, np.int32)
    changed = tokens.copy()
    changed[at : at + 2] += np.array(change, np.int32)
    chain = KeyChain(canary_spec(FULL), "m", b"secret")
    root, none = chain.root(None, None, ()), np.empty((0, 2), np.uint64)
    a, b = chain.extend(root, tokens, none), chain.extend(root, changed, none)
    assert not np.any(np.all(a[at // 4 :] == b[at // 4 :], axis=1))


def test_h1_vllm_12621_nobody_can_compute_keys_without_the_secret(make_cache):
    """A cache without a given secret has one of its own, so a collision found elsewhere is none here."""
    seen = set()
    for secret in (None, None, b"a", b"b"):
        chain = inside.coordinator(make_cache(GROUPS, 4, key_secret=secret)).chain
        root = chain.root(None, None, ())
        keys = chain.extend(root, np.array(TOKENS, np.int32), np.empty((0, 2), np.uint64))
        seen |= {key.tobytes() for key in keys}
    assert len(seen) == 4 * 5, "four caches, five full blocks each"


# --- contexts -------------------------------------------------------------------------------------

CONTEXTS = {
    "plain": {},
    "adapter X": {"adapter": "X"},
    "salt X": {"cache_salt": "X"},
    "extra X": {"extra_keys": ("X",)},
    "adapter X, salt Y": {"adapter": "X", "cache_salt": "Y"},
    "adapter Y, salt X": {"adapter": "Y", "cache_salt": "X"},
    "adapter X, extra Y": {"adapter": "X", "extra_keys": ("Y",)},
    "salt Y, extra X": {"cache_salt": "Y", "extra_keys": ("X",)},
    "empty adapter": {"adapter": ""},
    "empty salt": {"cache_salt": ""},
    "image": {"extra_keys": (("image", 0, b"\x01"),)},
    "audio": {"extra_keys": (("audio", 0, b"\x01"),)},
    "image elsewhere": {"extra_keys": (("image", 1, b"\x01"),)},
    "two images": {"extra_keys": (("image", 0, b"\x01"), ("image", 1, b"\x01"))},
    "embeddings": {"extra_keys": (b"\x01",)},
    "embeddings, salt": {"extra_keys": (b"\x01",), "cache_salt": "\x01"},
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("groups", [FULL, GROUPS], ids=["full", "all"])
def test_h2_vllm_44701_no_two_contexts_share_a_token_in_either_tier(make_serving, groups, tier):
    """All pairs: each context finds nothing of all before it, and later all of its own."""
    serving = make_serving(groups, 8 * len(CONTEXTS), 8 * len(CONTEXTS), hold=[])
    for name, context in CONTEXTS.items():
        assert reused(serving, name, tier, **context) == 0, name
    for name, context in CONTEXTS.items():
        assert reused(serving, f"{name} again", tier, **context) == 20, name


@pytest.mark.parametrize("context", ["plain", "salt X", "adapter X", "image"])
def test_h3_sglang_37160_both_tiers_know_a_block_by_the_same_key(make_serving, context):
    serving = make_serving(GROUPS, 32, 32, hold=[])
    inside.pass_nothing(serving.cache)  # which stays on the device
    serving.serve("A", TOKENS, 1, **CONTEXTS[context])
    found = []
    for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
        a, keys = pools.arrays, set()
        for g in range(pools.num_groups):
            base, rows = int(a.meta[g, 0]), int(a.meta[g, 1])
            keys |= {(g, a.key[i].tobytes()) for i in range(base, base + rows) if a.mark[i]}
        found.append(keys)
    assert found[0] == found[1]
    assert len(found[0]) > 5


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("groups", [FULL, GROUPS, {"a": (FullAttention(), 6), "b": (SlidingWindow(5), 4)}], ids=str)
def test_h3_vllm_53495_a_hit_is_never_negative_or_unaligned(make_serving, groups, tier):
    """For each length, 1 too; embeddings without tokens are refused, so there is no hit that is less than nothing."""
    serving = make_serving(groups, 24, 60, hold=[])
    unit = serving.spec.hit_tokens
    for n in (1, 3, 4, 5, 11, 12, 13, 24, 25):
        serving.serve(f"{n} first", prompt(n, n), 1)
        if tier == "host":
            inside.pools(serving.cache).forget_all()
        hits = serving.serve(f"{n} again", prompt(n, n), 1).cached_tokens
        assert sum(hits.values()) == (n - 1) // unit * unit
        assert all(hit >= 0 and hit % serving.spec.hash_tokens == 0 for hit in hits.values())
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        Request("embeddings only", [], 1, extra_keys=(b"embeddings",))


RELOADS = {
    "same name, nothing said": ("v1", (), False, 20),
    "same name, version in extra_keys": ("v1", ("reloaded",), False, 0),
    "other name": ("v2", (), False, 0),
    "same name, reset": ("v1", (), True, 0),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", RELOADS)
def test_h4_vllm_53194_an_adapter_reloaded_in_place_needs_a_new_key_or_a_reset(make_serving, how, tier):
    """kvtier cannot see that an adapter's weights have changed under its name: whoever reloads it must say so."""
    adapter, extra, reset, expected = RELOADS[how]
    serving = make_serving(GROUPS, 32, 64, hold=[])
    assert reused(serving, "before", adapter="v1") == 0
    if reset:
        serving.cache.reset()
    assert reused(serving, "after", tier, adapter=adapter, extra_keys=extra) == expected
