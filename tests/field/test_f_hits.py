"""Section F: how long a prefix hit may be where groups see different tokens."""

from __future__ import annotations

from itertools import pairwise

import inside
import numpy as np
import pytest
from breadth import covering
from core.driving import Serving, prompt, visible_blocks
from field.hosted import CHUNK, FULL, GROUPS, WINDOW, books_only, device_forgets

from kvtier import CacheSpec, ChunkedLocal, ConfigError, FullAttention, GroupSpec, RequestTooLarge, SlidingWindow
from kvtier.testing import expected_tokens


def chain_of(serving: Serving, tokens: list[int]) -> np.ndarray:
    """The key chain of a prompt, uint64 [units, 2]."""
    chain = inside.coordinator(serving.cache).chain
    return chain.extend(chain.root(None, None, ()), np.array(tokens, np.int32), np.empty((0, 2), np.uint64))


def found(serving: Serving, g: int, tokens: list[int]) -> list[int]:
    """The device block of every full block of these tokens in group g; 0 where there is none."""
    units = serving.spec.groups[g].block_tokens // serving.spec.hash_tokens
    keys = chain_of(serving, tokens)[units - 1 :: units]
    return inside.pools(serving.cache).find(np.full(len(keys), g, np.int32), keys).tolist()


def keep_only(serving: Serving, g: int, tokens: list[int], logical: set[int]) -> None:
    """Group g forgets all blocks of these tokens but the ``logical`` ones."""
    blocks = [b for j, b in enumerate(found(serving, g, tokens)) if b and j not in logical]
    inside.pools(serving.cache).unpublish(np.full(len(blocks), g, np.int32), np.array(blocks, np.int32))


@pytest.mark.parametrize(
    ("resident", "hit"), [({2, 3}, 8), ({2}, 0), ({1, 2}, 6), ({0}, 2), ({0, 2, 3}, 8), ({0, 1, 3}, 4), (set(), 0)]
)
def test_f1_vllm_17398_a_window_needs_an_unbroken_run_that_ends_at_the_hit(make_serving, resident, hit):
    """W = 4 in blocks of 2 is two blocks: [-, -, A, B] is a hit of 8, [-, -, A] is none, and not one of 6."""
    groups = {"full": (FullAttention(), 2), "win": (SlidingWindow(4), 2)}
    serving = make_serving(groups, 32)
    tokens = prompt(1, 9)
    for n in (3, 5, 7, 9):  # each leaves the window's blocks that end there
        serving.serve(f"{n}", tokens[:n], 1)
    assert all(found(serving, 1, tokens))
    keep_only(serving, 1, tokens, resident)
    assert serving.serve("again", tokens, 3).cached_tokens["device"] == hit


@pytest.mark.parametrize("seed", range(6))
def test_f2_vllm_39171_a_hit_is_found_in_one_descent_over_all_groups(make_serving, seed):
    """Groups that lower each other's bound end at the longest common one: nothing is taken off twice."""
    groups = {**FULL, **WINDOW, **CHUNK, "win 2": (SlidingWindow(10), 4), "chunk 2": (ChunkedLocal(12), 4)}
    serving = make_serving(groups, 64)
    tokens = prompt(seed, 41)
    for n in (9, 17, 21, 33, 41):
        serving.serve(f"{n}", tokens[:n], 1)
    rng = np.random.default_rng(seed)
    for g in range(1, 5):
        keep_only(serving, g, tokens, {j for j in range(10) if rng.random() < 0.7})
    resident = [{j for j, b in enumerate(found(serving, g, tokens)) if b} for g in range(5)]
    valid = [
        n
        for n in range(0, 41, 4)
        if all(
            visible_blocks(group, n, n + 1) - {n // 4} <= have
            for group, have in zip(serving.spec.groups, resident, strict=True)
        )
    ]
    assert serving.serve("again", tokens, 3).cached_tokens["device"] == max(valid)


@pytest.mark.parametrize("length", [24_576, 24_577])
def test_f4_vllm_51295_one_token_of_prompt_does_not_cost_a_hit_of_23040(make_serving, length):
    groups = [
        GroupSpec("full", FullAttention(), 1, 1, 8),
        GroupSpec("win", SlidingWindow(1024), 1, 1, 8, block_tokens=32),
        GroupSpec("chunk", ChunkedLocal(8192), 1, 1, 8, block_tokens=64),
    ]
    serving = books_only(make_serving, {"full": 2000, "win": 600, "chunk": 400}, None, *groups)
    tokens = prompt(1, 24_577)
    serving.serve("first turn", tokens[:23_040], 1)
    assert serving.serve("second turn", tokens[:length], 1).cached_tokens["device"] == 23_040


@pytest.mark.parametrize(
    "groups",
    [
        GROUPS,
        {"full": (FullAttention(), 4), "win": (SlidingWindow(5), 2), "chunk": (ChunkedLocal(8), 8)},
        {"full": (FullAttention(), 3), "win": (SlidingWindow(5), 2)},
    ],
)
def test_f4_vllm_51295_a_token_more_never_shortens_a_hit_by_more_than_a_unit(make_serving, groups):
    """Every length around every multiple of every group's block, of two turns of one conversation."""
    serving = make_serving(groups, 200)
    tokens, unit, hits = prompt(1, 40), serving.spec.hit_tokens, []
    serving.serve("first turn", tokens[:25], 1)
    for length in range(2, 41):
        hits.append(serving.serve(f"{length}", tokens[:length], 1).cached_tokens["device"])
    assert all(b >= a - unit for a, b in pairwise(hits)), hits
    assert min(hits[24:]) >= 25 // unit * unit - unit


def test_f5_vllm_46453_a_hit_is_valid_in_all_groups_and_not_the_shortest_of_their_hits(make_serving):
    """Full attention has 1, 2, 3 units, the window only what 4 needs: 3, the least, is no hit."""
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(4), 4)}
    serving = make_serving(groups, 32)
    tokens = prompt(1, 17)
    serving.serve("first", tokens, 1)
    keep_only(serving, 0, tokens, {0, 1, 2})
    keep_only(serving, 1, tokens, {3})
    assert serving.serve("again", tokens, 3).cached_tokens["device"] == 0


def test_f7_trt_llm_2983_the_smallest_window_decides_whether_a_prompt_can_be_reused(make_serving):
    """Windows of 64 and 1,024, a prompt of 200 tokens twice: the second text is the first one."""
    groups = {"small": (SlidingWindow(64), 16), "large": (SlidingWindow(1024), 16)}
    serving = make_serving(groups, 40, scheduler={"max_batched_tokens": 256})
    tokens = prompt(1, 200)
    first = serving.serve("first", tokens, 8)
    again = serving.serve("again", tokens, 8)
    assert again.cached_tokens["device"] == 192
    assert again.token_ids == first.token_ids == expected_tokens(serving.spec, tokens, 8)


@pytest.mark.parametrize("window", [3, 6, 8, 16])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_f8_llama_cpp_13194_the_same_prompt_twice_is_not_processed_again(make_serving, window, tier):
    """A model of windows only, too: at most a window and a block are computed, not the whole prompt."""
    for groups in ({"win": (SlidingWindow(window), 4)}, {**FULL, "win": (SlidingWindow(window), 4)}):
        serving = make_serving(groups, 64, 64, hold=[])
        tokens = prompt(1, 90)
        for name in ("first", "again"):
            done = serving.serve(name, tokens, 2)
            if tier == "host":
                device_forgets(serving)
        computed = len(tokens) - sum(done.cached_tokens.values())
        assert computed <= window + 4
        assert done.cached_tokens[tier] > 0


def test_f9_sglang_29350_a_hit_falls_back_to_the_last_boundary_that_both_have(make_serving):
    """All of the full attention is there and the window's end is not: restoring it leaves shared full blocks alone."""
    serving = make_serving({**FULL, **WINDOW}, 40)
    tokens = prompt(1, 33)
    serving.serve("turn 1", tokens[:17], 1)
    serving.serve("turn 2", tokens, 1)
    keep_only(serving, 1, tokens, {0, 1, 2, 3})
    full = found(serving, 0, tokens)
    assert all(full)
    serving.add("holder", tokens[:30], 20)  # shares full blocks with whoever comes
    serving.step()
    keep_only(serving, 1, tokens, {0, 1, 2, 3})
    serving.add("again", tokens, 4)
    serving.steps_until(lambda: "again" in serving.finished)
    assert serving.finished["again"].cached_tokens["device"] == 16
    assert found(serving, 0, tokens) == full, "no block that others read was replaced"
    assert any(found(serving, 1, tokens)[6:]), "the window's end is there again"
    serving.run()
    assert serving.serve("third", tokens, 1).cached_tokens["device"] == 32


@pytest.mark.parametrize("groups", [{**FULL, **WINDOW}, {**FULL, **CHUNK}, GROUPS])
def test_f9_flexkv_195_a_hit_makes_its_blocks_the_newest_in_every_group(make_serving, groups):
    sizes = {name: {"full": 20, "win": 7, "chunk": 4}[name] for name in groups}
    serving = make_serving(groups, sizes, scheduler={"max_batched_tokens": 4})
    inside.pass_nothing(serving.cache)
    old, new = prompt(1, 29), prompt(2, 29)
    serving.serve("old", old, 1)
    serving.serve("new", new, 1)
    assert serving.serve("old again", old, 1).cached_tokens["device"] == 28
    before = [found(serving, g, old) for g in range(len(groups))]
    serving.serve("flood", prompt(3, 29), 1)
    for g, (name, blocks) in enumerate(zip(serving.spec.names, before, strict=True)):
        assert found(serving, g, old) == blocks, f"{name}: the older of two goes, but it has been read since"
        assert serving.cache.stats().device[name].evicted > 0, f"{name}: something was to go"
    assert sum(serving.serve("new again", new, 1).cached_tokens.values()) < 28


CHUNK_TOKENS = 8
LENGTHS = [k * CHUNK_TOKENS + d for k in (1, 2) for d in (-1, 0, 1)]


@pytest.mark.parametrize("block_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_f10_vllm_21707_a_chunk_keeps_what_its_mask_shows_in_prompt_and_decode(make_serving, block_tokens, length):
    serving = make_serving({"chunk": (ChunkedLocal(CHUNK_TOKENS), block_tokens)}, 32)
    (group,) = serving.spec.groups
    serving.add("A", prompt(1, length), 10)
    while "A" not in serving.finished:
        step, ids = serving.begin()
        start, end = int(step.positions[0]), int(step.seq_lens[0])
        row = step.group("chunk").block_table[0]
        assert set(np.flatnonzero(row).tolist()) == visible_blocks(group, start, end)
        serving.end(step, ids)
    serving.run()


@pytest.mark.parametrize("block_tokens", [2, 4])
def test_f10_sglang_6563_a_hit_at_the_border_of_a_chunk_needs_no_chunk_block(make_serving, block_tokens):
    groups = {"full": (FullAttention(), block_tokens), "chunk": (ChunkedLocal(CHUNK_TOKENS), block_tokens)}
    serving = make_serving(groups, 40)
    for k, length in enumerate(LENGTHS):
        tokens = prompt(k, length + 1)
        serving.serve(f"first {k}", tokens, 1)
        keep_only(serving, 1, tokens, set())
        hit = serving.serve(f"again {k}", tokens, 3).cached_tokens["device"]
        assert hit == length // CHUNK_TOKENS * CHUNK_TOKENS


def test_f10_a_chunk_that_is_no_multiple_of_its_block_is_refused(make_serving):
    with pytest.raises(ConfigError, match="chunk"):
        CacheSpec([GroupSpec("chunk", ChunkedLocal(8), 1, 1, 8, block_tokens=3)])


@pytest.mark.parametrize(("window", "block_tokens"), covering(range(3, 11), [2, 3, 4]))
def test_f11_vllm_48959_an_unaligned_window_never_takes_more_than_admission_said(make_serving, window, block_tokens):
    """cdiv(W - 1 + bt, bt) blocks, from one function, serve a run of any length; a pool of one less refuses."""
    bound = -(-(window - 1 + block_tokens) // block_tokens)
    groups = {"win": (SlidingWindow(window), block_tokens)}
    serving = make_serving(groups, bound)
    for length in range(window, window + 2 * block_tokens + 1):
        assert serving.serve(f"{length}", prompt(length, length), 2 * block_tokens).finish_reason == "length"
    assert serving.cache.stats().device["win"].peak_held <= bound
    less = make_serving(groups, bound - 1) if bound > 1 else None
    if less is not None:
        with pytest.raises(RequestTooLarge):
            less.add("A", prompt(1, window + 2 * block_tokens), 1)


def test_f11_vllm_48959_the_numbers_of_the_report():
    """W = 4,096, blocks of 32, 98,012 tokens cached: 129 blocks, where the bound there said 128."""
    group = GroupSpec("win", SlidingWindow(4096), 1, 1, 8, block_tokens=32)
    assert len(range((98_012 - 4095) // 32, 98_012 // 32 + 1)) == 129
    assert group.blocks_needed(98_012, 98_013) == 129 == group.peak_blocks(98_013)
