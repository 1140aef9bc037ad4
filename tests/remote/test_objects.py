"""The cut of texts into objects, against the same cut made block by block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.remote.objects import ObjectPlan

GROUPS = {
    "full": GroupSpec("full", FullAttention(), 1, 1, 8, block_tokens=16, dtype="float32"),
    "wide": GroupSpec("wide", FullAttention(), 1, 1, 64, block_tokens=16, dtype="float32"),
    "long": GroupSpec("long", FullAttention(), 1, 1, 8, block_tokens=32, dtype="float32"),
    "window": GroupSpec("window", SlidingWindow(40), 1, 1, 8, block_tokens=16, dtype="float32"),
    "chunk": GroupSpec("chunk", ChunkedLocal(64), 1, 1, 64, block_tokens=16, dtype="float32"),
}
SPECS = [list(names) for count in (1, 2, 3) for names in itertools.combinations(GROUPS, count)]


def cut(spec: CacheSpec, least: int, keys: np.ndarray, n: int) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """Kind, name and blocks of each object. ``keys``: the low words alone."""

    def blocks(g: int, start: int, end: int) -> list[tuple[int, int]]:
        bt = spec.groups[g].block_tokens
        return [(g, int(keys[(j + 1) * bt // spec.hash_tokens - 1])) for j in range(start // bt, end // bt)]

    def first(g: int) -> int:
        of = spec.groups[g]
        return of.attention.first_visible(n) // of.block_tokens * of.block_tokens

    unit, found = spec.hit_tokens, []
    full = [g for g, of in enumerate(spec.groups) if of.attention == FullAttention()]
    small = [g for g, of in enumerate(spec.groups) if of.block_bytes < least]
    tiled = [g for g in full if g in small]
    tile = unit
    while tiled and sum(spec.groups[g].block_bytes * tile // spec.groups[g].block_tokens for g in tiled) < least:
        tile += unit
    tiles_end = n // tile * tile if tiled else n
    for start in range(0, tiles_end if tiled else 0, tile):
        inside = [block for g in tiled for block in blocks(g, start, start + tile)]
        found.append(("t", int(keys[(start + tile) // spec.hash_tokens - 1]), inside))
    for g in range(len(spec.groups)):
        if g not in small:
            found += [(f"b{g}", key, [(g, key)]) for _, key in blocks(g, 0 if g in full else first(g), n)]
    last = [block for g in tiled for block in blocks(g, tiles_end, n)]
    last += [block for g in small if g not in full for block in blocks(g, first(g), n)]
    if last:
        found.append(("e", int(keys[n // spec.hash_tokens - 1]), last))
    return found


@pytest.mark.parametrize("names", SPECS, ids="-".join)
def test_all_objects_of_a_hit_are_the_same_as_cut_block_by_block(names):
    spec = CacheSpec([GROUPS[name] for name in names])
    keys = np.random.default_rng(len(names)).integers(0, 2**63, (40, 2)).astype(np.uint64)
    for least, units in itertools.product((1, 3000, 10_000, 2**20), (1, 2, 3, 7, 16, 19)):
        plan, n = ObjectPlan(spec, least), units * spec.hit_tokens
        if n > 40 * spec.hash_tokens:
            continue
        wanted = cut(spec, least, keys[:, 0], n)
        whole = plan.of_hit(keys, n)
        for objects in ([whole], list(plan.parts(keys, n, most=3))):
            found = [
                (kind, int(np.frombuffer(key, np.uint64)[0]), blocks_of(part, k))
                for part in objects
                for k, (kind, key) in enumerate(part.names)
            ]
            assert found == wanted
        some = np.arange(len(whole)) % 3 == 1
        picked = [of for of, is_picked in zip(wanted, some, strict=True) if is_picked]
        assert [blocks_of(whole.only(some), k) for k in range(len(picked))] == [blocks for *_, blocks in picked]


def blocks_of(objects, k: int) -> list[tuple[int, int]]:
    mine = objects.of == k
    return list(zip(objects.groups[mine].tolist(), objects.keys[mine, 0].tolist(), strict=True))
