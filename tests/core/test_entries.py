"""Groups that keep K alone, and entries that several tokens share: bytes, views, steps, keys, hits in every tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from core.driving import LOAD, prompt
from kvtier import CacheSpec, ChunkedLocal, ConfigError, FullAttention, GroupSpec, SlidingWindow, StepError
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.layout import Layout
from kvtier.pools.arena import Arena
from kvtier.remote.names import namespace

ENTRIES = GroupSpec("entries", FullAttention(), 3, 1, 512, "bfloat16", 128, 0, entry_tokens=4)
COMPRESSED = {  # DeepSeek-V4, small: window, entries of 4 tokens that overlap, their index, entries of 8
    "sliding": (SlidingWindow(6), 4, {"head_dim_v": 0}),
    "entries": (FullAttention(), 8, {"head_dim_v": 0, "entry_tokens": 4}),
    "index": (FullAttention(), 8, {"head_dim_v": 0, "entry_tokens": 4}),
    "rows": (SlidingWindow(8), 4),
    "heavy": (FullAttention(), 8, {"head_dim_v": 0, "entry_tokens": 8}),
    "heavy rows": (ChunkedLocal(8), 4),
}


@given(st.integers(1, 4), st.sampled_from([(1, 8), (8, 0), (16, 0), (4, 2)]), st.integers(1, 4), st.integers(1, 5))
def test_bytes_are_those_of_the_entries(layers: int, dims: tuple[int, int], shared: int, entries: int) -> None:
    g = GroupSpec("g", FullAttention(), layers, 2, dims[0], "float32", shared * entries, dims[1], entry_tokens=shared)
    assert g.block_entries == entries
    assert 0 <= g.block_bytes - entries * layers * 2 * sum(dims) * 4 < 16
    assert g.token_bytes * shared - g.entry_bytes in range(shared)


def test_published_bytes_of_deepseek_v4_flash() -> None:
    assert (ENTRIES.entry_bytes, ENTRIES.token_bytes, ENTRIES.block_bytes) == (3 * 1024, 768, 32 * 3 * 1024)


def test_views_have_the_entries_of_a_block_and_no_v() -> None:
    arena = Arena(CacheSpec([ENTRIES]), Layout.fixed([ENTRIES.block_bytes], [5]), "cpu")
    arena.allocate("a test")
    for i, (k, v) in enumerate(arena.views(0)):
        assert (tuple(k.shape), tuple(v.shape)) == ((6, 32, 1, 512), (6, 32, 1, 0))
        k[2] = i + 1
    block = arena.bytes[2 * ENTRIES.block_bytes : 3 * ENTRIES.block_bytes].view(np.uint16)
    assert block.all(), "the layers lie side by side, and nothing else is in a block"
    assert not arena.bytes[3 * ENTRIES.block_bytes :].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": SlidingWindow(8)}, "entries of 4 tokens are kept of full attention alone, not of SlidingWindow"),
        ({"attention": ChunkedLocal(128)}, "not of ChunkedLocal"),
        ({"block_tokens": 30}, "block_tokens 30 is not a multiple of entry_tokens 4; an entry must not straddle"),
        ({"entry_tokens": 0}, "entry_tokens must be a positive integer"),
        ({"head_dim_v": -1}, "head_dim_v must be a positive integer"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(ENTRIES, **change)


def test_scales_of_k_alone_are_refused() -> None:
    keys = GroupSpec("index", FullAttention(), 1, 1, 16, "fp8", 16, 0)
    with pytest.raises(ConfigError, match=r"kv_scales are of K and V, and this group keeps K alone"):
        CacheSpec([keys]).with_kv_scales({0: {"k": 0.5, "v": 0.5}})
    both = CacheSpec([replace(keys, name="full", head_dim_v=None), keys], layers=[("full", 0)])
    scaled = both.with_kv_scales({0: {"k": 0.5, "v": 0.5}})
    assert [group.kv_scales is None for group in scaled.groups] == [False, True]


def test_a_layer_has_a_place_for_keys_and_one_for_entries() -> None:
    window = GroupSpec("sliding", SlidingWindow(8), 3, 1, 16, head_dim_v=0)
    layer = {"kv": ("sliding", 0), "entries": ("entries", 0), "index": ("entries", 1), "rows": ("sliding", 1)}
    spec = CacheSpec([window, ENTRIES], layers=[layer, ("entries", 2)])
    assert spec.places("entries") == (("entries", 0), ("entries", 2))
    for role, place in (("kv", ("entries", 0)), ("entries", ("sliding", 0))):
        with pytest.raises(ConfigError, match=f"is of role '(entries|kv)', not '{role}'"):
            CacheSpec([window, ENTRIES], layers=[{role: place}])


def test_keys_and_remote_names_differ_by_entries() -> None:
    specs = [CacheSpec([replace(ENTRIES, **change)]) for change in ({}, {"entry_tokens": 8}, {"entry_tokens": 1})]
    specs.append(CacheSpec([replace(ENTRIES, entry_tokens=1, head_dim=256, head_dim_v=256)]))
    chains = [KeyChain(spec, "m", b"s") for spec in specs]
    assert len({chain.root(None, None, ()).tobytes() for chain in chains}) == 4
    assert len({namespace(chain, spec, b"s") for chain, spec in zip(chains, specs, strict=True)}) == 4


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_completes_entries_with_the_last_of_their_tokens(make_serving: Any) -> None:
    serving = make_serving(COMPRESSED, 32, scheduler={"max_batched_tokens": 7})
    serving.add("a", prompt(0, 21), 6)
    made: list[int] = []
    while "a" not in serving.finished:
        step, ids = serving.begin()
        view = step.group("entries")
        made += step.positions[view.entries().token].tolist()
        with pytest.raises(StepError, match="whose tokens share entries has no slot_mapping; ask entries"):
            view.slot_mapping  # noqa: B018
        with pytest.raises(StepError, match="has no pages"):
            view.paged()
        with pytest.raises(StepError, match=r"entries\(\) is of a group whose tokens share entries"):
            step.group("rows").entries()
        serving.end(step, ids)
    assert made == [3, 7, 11, 15, 19, 23], "each entry once, whatever the steps"


def test_entries_that_lie_elsewhere_than_the_rows_say_are_reported(make_serving: Any) -> None:
    serving = make_serving(COMPRESSED, 32)
    serving.add("a", prompt(0, 21), 1)
    step, ids = serving.begin()
    assert serving.cache.audit() == []
    step.group("index").entries().slot[2] += 1
    assert [violation.invariant for violation in serving.cache.audit()] == ["I15"]
    step.group("index").entries().slot[2] -= 1
    serving.end(step, ids)


# --- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [24, 27, 32])
def test_hits_end_where_all_places_of_a_layer_are(make_serving: Any, length: int) -> None:
    """Every text is compared with one computed without a cache, from all that each layer's mask shows."""
    serving = make_serving(COMPRESSED, 16, 32, verify="full")
    text, hit = prompt(0, length), (length - 1) // 8 * 8
    serving.serve("cold", text, 5)
    assert serving.serve("device", text, 5).cached_tokens == {"device": hit, "host": 0}
    for seed in range(1, 5):
        serving.serve(f"other {seed}", prompt(seed, 60), 1)
    assert serving.serve("host", text, 5).cached_tokens == {"device": 0, "host": hit}


@pytest.mark.parametrize("lost", ["sliding", "entries", "index", "rows", "heavy"])
def test_a_restore_that_lacks_one_place_is_no_hit(make_serving: Any, lost: str) -> None:
    """An index without its keys, rows without entries: nothing of the torn restore is used."""
    serving = make_serving(COMPRESSED, 16, 32, hold=[LOAD], verify="full")
    text = prompt(0, 30)
    serving.serve("cold", text, 5)
    for seed in range(1, 5):
        serving.serve(f"other {seed}", prompt(seed, 60), 1)
    serving.add("torn", text, 5)
    serving.steps_until(lambda: serving.engine.live)
    (load,) = serving.engine.live.values()
    places = np.flatnonzero(load.groups == serving.spec.index(lost))
    assert len(places), "a hit takes blocks of each group but rows of entries that are complete"
    serving.engine.end(load.ticket, error="torn", bad=places[-1:].tolist())
    serving.engine.release()
    done = serving.run()["torn"]
    assert done.finish_reason == "length"
    assert done.cached_tokens == {"device": 0, "host": 0}


def test_a_preempted_request_goes_on_from_its_entries(make_serving: Any) -> None:
    serving = make_serving(COMPRESSED, {**dict.fromkeys(COMPRESSED, 12), "entries": 9}, 64)
    for n in range(3):
        serving.add(f"r{n}", prompt(n, 18), 12)
    done = serving.run()
    assert sum(each.preemptions for each in done.values()) > 0, "the pools were to be too small for all"
