"""From bytes to blocks: budgets are kept, used up, and good for what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from core.driving import prompt
from kvtier import CacheSpec, ChunkedLocal, ConfigError, FullAttention, GroupSpec, MemoryUnavailable, SlidingWindow
from kvtier.geometry.sizing import fixed_blocks, layout_of, parse_bytes, split_bytes
from kvtier.testing import canary_spec
from kvtier.testing.oracle import STATE

KINDS = {"full": FullAttention(), "win": SlidingWindow(512), "chunk": ChunkedLocal(1024)}


def spec(*names: str, bt: int = 16, dim: int = 8) -> CacheSpec:
    return CacheSpec([GroupSpec(name, KINDS[name], 2, 2, dim, block_tokens=bt) for name in names or KINDS])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8_000_000_000),
        ("512 MB", 512_000_000),
        ("1.5KiB", 1536),
        (" 2 t ", 2 << 40),
        ("7b", 7),
    ],
)
def test_bytes_are_read_as_people_write_them(text, expected):
    assert parse_bytes(text, "device_bytes") == expected


@pytest.mark.parametrize("bad", ["", "GiB", "8 GiBs", "-1", "1e9", "8,5GiB", -1, None, 1.5, True, [8]])
def test_other_sizes_are_refused_by_the_name_of_the_setting(bad):
    with pytest.raises(ConfigError, match="host_bytes"):
        parse_bytes(bad, "host_bytes")


@given(st.sets(st.sampled_from(sorted(KINDS)), min_size=1), st.sampled_from([1, 4, 16, 64]), st.integers(0, 40 << 20))
def test_a_split_stays_within_its_bytes_and_uses_them_up(names, bt, num_bytes):
    s = spec(*sorted(names), bt=bt)
    least = sum(2 * g.block_bytes for g in s.groups)
    if num_bytes < least:
        with pytest.raises(MemoryUnavailable, match="device_bytes"):
            split_bytes(s, num_bytes, "device_bytes")
        return
    blocks = split_bytes(s, num_bytes, "device_bytes")
    used = sum((n + 1) * g.block_bytes for n, g in zip(blocks, s.groups, strict=True))
    assert min(blocks) >= 1
    assert num_bytes - max(g.block_bytes for g in s.groups) < used <= num_bytes


@given(st.integers(1 << 14, 40 << 20))
def test_every_local_group_can_serve_what_the_full_group_can_hold(num_bytes):
    """I6: a lone request of the advertised length runs, so no local pool may be the one that refuses it."""
    s = spec()
    blocks = split_bytes(s, num_bytes, "device_bytes")
    tokens = blocks[0] * 16
    for g, n in zip(s.groups, blocks, strict=True):
        assert n >= g.peak_blocks(tokens), g.name


@pytest.mark.parametrize("size", ["100KiB", "1MiB", "6MiB"])
def test_a_lone_request_of_the_advertised_length_is_admitted_and_ends(make_serving, size):
    limits = {"max_batched_tokens": 4096, "audit_every": 64}
    serving = make_serving(spec(), None, device="meta", device_bytes=size, scheduler=limits)
    tokens = serving.cache.stats().device_capacity_tokens
    assert tokens > 0
    done = serving.serve("longest", prompt(1, tokens - 4), 4)
    assert done.finish_reason == "length"
    assert done.preemptions == 0


def test_capacity_is_within_two_percent_of_what_the_attention_pattern_allows():
    """1 GiB: at least 98 % of the tokens that fit if local groups got just their windows for one request."""
    s = spec(dim=64)
    blocks = split_bytes(s, 1 << 30, "device_bytes")
    used = sum(n * g.block_bytes for n, g in zip(blocks, s.groups, strict=True))
    assert used >= 0.98 * (1 << 30)


def test_fixed_blocks_must_name_every_group_with_at_least_one_block():
    s = spec("full", "win")
    assert fixed_blocks(s, {"win": 2, "full": 1}, "device_blocks") == [1, 2]
    for bad in ({"full": 1}, {"full": 1, "win": 1, "other": 1}, [1, 2], 5):
        with pytest.raises(ConfigError, match="device_blocks"):
            fixed_blocks(s, bad, "device_blocks")
    for bad in (0, -1):
        with pytest.raises(MemoryUnavailable, match="win"):
            fixed_blocks(s, {"full": 1, "win": bad}, "device_blocks")


def test_fixed_blocks_take_numpy_integers():
    import numpy as np

    assert fixed_blocks(spec("full"), {"full": np.int64(3)}, "device_blocks") == [3]


@pytest.mark.parametrize("bad", ["3", 1.5, None, True])
def test_a_number_of_blocks_of_the_wrong_type_is_a_configuration_error(bad):
    with pytest.raises((ConfigError, MemoryUnavailable), match="full"):
        fixed_blocks(spec("full"), {"full": bad}, "device_blocks")


@pytest.mark.parametrize("num_bytes", [*range(640, 2000, 16), 4096])
def test_where_a_request_s_states_do_not_all_fit_each_group_has_a_block(num_bytes):
    """A find of the random walks: the other groups had fewer than none."""
    sizes = {"full": (FullAttention(), 4), "window": (SlidingWindow(2), 4), "state": (STATE, 4)}
    spec = canary_spec(sizes, {"full": 3, "window": 1, "state": 2})
    blocks = split_bytes(spec, num_bytes, "device_bytes")
    assert min(blocks) >= 1
    assert sum((n + 1) * group.block_bytes for n, group in zip(blocks, spec.groups, strict=True)) <= num_bytes


@pytest.mark.parametrize("num_bytes", [1, 17, 900])
def test_a_size_that_is_refused_is_told_as_it_was_given(num_bytes):
    """Less the blocks that are set aside it was below zero."""
    group = GroupSpec("state", STATE, 1)
    least = 3 * group.block_bytes
    assert layout_of(CacheSpec([group]), least, "device_bytes", [True]).num_bytes <= least
    with pytest.raises(
        MemoryUnavailable, match=f"device_bytes is {min(num_bytes, least - 1)} bytes, .* take {least:,};"
    ):
        layout_of(CacheSpec([group]), min(num_bytes, least - 1), "device_bytes", [True])
