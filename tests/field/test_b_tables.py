"""Section B of docs/FIELD-BUGS.md: stale block tables and wrong indices. Named after the tracker and its number."""

from __future__ import annotations

from dataclasses import replace

import inside
import numpy as np
import pytest
import torch
from core.driving import LOAD, prompt, scheduled

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, Request, Scheduler, SlidingWindow
from kvtier.attention.reference import PagedBatch, attend, write_kv
from kvtier.pools.block_pool import Col, Mark

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
KINDS = [FullAttention(), SlidingWindow(6), ChunkedLocal(8)]


def contents(serving) -> list[list[np.ndarray]]:
    """All slots of every group, layer, K and V, copied."""
    return [[x.copy() for pair in layers for x in pair] for layers in inside.views(serving.canary)]


def written_slots(serving, before: list[list[np.ndarray]]) -> list[set[int]]:
    """By group, the slots whose content is not what it was."""
    out = []
    for old, now in zip(before, contents(serving), strict=True):
        changed = np.any([x != y for x, y in zip(old, now, strict=True)], axis=0)
        out.append(set(np.flatnonzero(changed.ravel()).tolist()))
    return out


# --- tails ----------------------------------------------------------------------------------------


def test_b1_vllm_39591_the_tail_of_a_reused_row_shows_nothing_of_its_last_occupant(make_serving):
    """40 blocks, then 3, in one row; read one block too far, and to the end of the row: only the null block is seen."""
    serving = make_serving(GROUPS, 128, scheduler={"max_running": 2, "max_batched_tokens": 512})
    inside.stop_poisoning(serving.canary)  # what the long request wrote stays where it was
    serving.add("stays", prompt(0, 170), 9)
    serving.add("40 blocks", prompt(1, 160), 1)
    serving.step()
    assert "40 blocks" in serving.finished
    serving.add("3 blocks", prompt(2, 10), 3)
    step, ids = serving.begin()
    r = step.request_ids.index("3 blocks")
    for g, name in enumerate(GROUPS):
        row = step.group(name).block_table[r]
        assert len(row) > 40
        assert not row[3:].any()
        for pair in inside.views(serving.canary)[g]:
            for words in pair:
                assert not words[row[3:4]].any(), "one block too long: a canary of somebody else"
                assert not words[row[3:]].any()
    serving.end(step, ids)
    serving.run()


def test_b2_tt_plugin_103_a_padded_chunk_writes_nothing_but_its_own_slots(make_serving):
    """A ends, and B, halfway through its prompt, is alone in front of C; its second chunk runs padded to 8 rows."""
    serving = make_serving(GROUPS, 64, scheduler={"max_batched_tokens": 16})
    inside.stop_poisoning(serving.canary)  # the forward alone writes
    serving.add("A", prompt(0, 7), 1)
    serving.add("C", prompt(2, 5), 20)
    serving.add("B", prompt(1, 17), 4)
    assert scheduled(serving.step()) == {"A": 7, "C": 5, "B": 4}
    assert "A" in serving.finished
    before = contents(serving)
    step, ids = serving.begin()
    assert scheduled(step) == {"C": 1, "B": 13}
    changed = written_slots(serving, before)
    for g, name in enumerate(GROUPS):
        view = step.group(name)
        _, kv, indices, _ = view.padded(8)
        assert not indices[int(view.paged()[1][-1]) :].any(), "padding reads the null block only"
        assert len(kv) == 9
        ends, own = np.cumsum([0, *scheduled(step).values()]), view.block_table
        rows = np.repeat(np.arange(2), np.diff(ends))
        assert own[rows, step.positions // 4].all(), "what it writes is in blocks of its own rows"
        assert view.slot_mapping.tolist() == (own[rows, step.positions // 4] * 4 + step.positions % 4).tolist()
        assert changed[g] == set(view.slot_mapping.tolist())
    serving.end(step, ids)
    serving.run()


@pytest.mark.parametrize("kind", [SlidingWindow(6), SlidingWindow(4), ChunkedLocal(8)], ids=str)
def test_b3_vllm_42273_a_block_that_left_the_window_is_null_though_another_request_has_it(make_serving, kind):
    """Freed blocks are handed out first, so the reuse comes at once; the text is compared at the end."""
    serving = make_serving({**FULL, "local": (kind, 4)}, {"full": 60, "local": 8})
    serving.add("long", prompt(0, 9), 60)
    for k in range(14):
        serving.add(f"taker {k}", prompt(k + 1, 7), 2)
    group, had, reused = serving.spec.group("local"), {}, 0
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        if "long" in step.request_ids:
            table, r = step.group("local").block_table, step.request_ids.index("long")
            first = group.attention.first_visible(int(step.positions[step.query_start[r]])) // 4
            assert not table[r, :first].any()
            had |= {int(table[r, j]): j for j in np.flatnonzero(table[r])}
            others = set(np.delete(table, r, axis=0).ravel().tolist()) - {0}
            reused += sum(j < first for b, j in had.items() if b in others)
        serving.end(step, ids)
    assert reused, "some block of the window was to be in another request's hands"


NAN, LARGE, STALE = float("nan"), 3e38, -7.25


@pytest.mark.parametrize("garbage", [NAN, LARGE, STALE])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_b4_vllm_42494_b8_vllm_53856_attention_does_not_see_tails_of_rows_or_of_pages(make_cache, kind, garbage):
    """The real attention. Garbage in every slot past a length, in the null block, and in a block that every entry
    of a table past an end names; the output is the same to the bit."""
    group = GroupSpec("g", kind, 1, 2, 8, dtype="float32", block_tokens=4)
    cache = make_cache(CacheSpec([group]), 40)
    scheduler = Scheduler(cache, max_batched_tokens=64)
    for i, length in enumerate((1, 3, 4, 5, 11, 18)):
        scheduler.add(Request(str(i), prompt(i, length), 2))
    k, v = cache.kv("g", 0)
    rng, seen = torch.Generator().manual_seed(1), 0
    while scheduler.has_work():
        step = scheduler.schedule()
        batch = PagedBatch.from_step(step, group, "cpu")
        rows = torch.randn(3, step.num_tokens, 2, 8, generator=rng)
        write_kv(k, v, rows[1], rows[2], batch)
        clean = attend(rows[0], k, v, batch, scale=0.35)
        kept = k.clone(), v.clone()
        table = batch.block_table.clone()
        wrong = next(b for b in range(40, 0, -1) if b not in set(table.ravel().tolist()))
        for x in (k, v):
            x[0] = x[wrong] = garbage
            for r, length in enumerate(batch.seq_lens):
                x[table[r, (length - 1) // 4], (length - 1) % 4 + 1 :] = garbage
        for r, length in enumerate(batch.seq_lens):
            table[r, -(-length // 4) :] = wrong
            seen += int((table[r] == wrong).sum())
        dirty = attend(rows[0], k, v, replace(batch, block_table=table), scale=0.35)
        assert torch.equal(clean, dirty)
        k.copy_(kept[0])
        v.copy_(kept[1])
        scheduler.commit(step, [1] * len(step.sample_rows))
    assert seen, "some row was to have a tail"


def test_b6_vllm_37728_a_padded_row_that_somebody_has_left_touches_the_null_block_only(make_serving):
    serving = make_serving(GROUPS, 32, scheduler={"max_running": 2})
    for layers in inside.views(serving.canary):
        for k, v in layers:
            k[0] = v[0] = 12345
    serving.add("goes on", prompt(0, 9), 9)
    serving.add("has finished", prompt(1, 14), 1)
    serving.step()
    step, ids = serving.begin()
    assert step.request_ids == ["goes on"]
    for name in GROUPS:
        qo, kv, indices, last = step.group(name).padded(2)
        assert indices[kv[1] :].tolist() == [0]
        assert (len(qo), len(last)) == (3, 2)
        assert step.group(name).block_table.shape[0] == 1, "a free row is not exported"
    serving.end(step, ids)
    serving.run()
    assert all(np.all(x[0] == 12345) for layers in inside.views(serving.canary) for pair in layers for x in pair)


# --- indices --------------------------------------------------------------------------------------


def test_b9_trtllm_13124_device_and_host_ids_are_never_mixed_up(make_serving):
    """Content whose host block has an id far beyond the device pool comes back: what is exported is where it is now."""
    serving = make_serving(GROUPS, 8, 64, hold=[])
    for k in range(5):
        serving.serve(str(k), prompt(k, 25), 1)
    serving.engine.submitted.clear()
    serving.add("again", prompt(3, 25), 6)
    serving.step()
    (load,) = [t for t in serving.engine.submitted if t.direction is LOAD]
    assert load.host.max() > 8
    assert np.any(load.host != load.device)
    while "again" not in serving.finished:
        step, ids = serving.begin()
        for g, name in enumerate(GROUPS if step.num_tokens else ()):
            view = step.group(name)
            assert view.block_table.max() <= 8
            assert view.paged()[2].max() <= 8
            if int(step.seq_lens[0]) == 25:
                row, at = view.block_table[0], load.groups == g
                assert set(load.device[at].tolist()) <= set(row.tolist()), "it reads what the load has written"
        serving.end(step, ids)


@pytest.mark.usefixtures("unaudited")
def test_b10_flashinfer_3230_slots_and_offsets_beyond_32_bits(make_cache):
    """Block ids are int32, what they are multiplied into is 64 bits wide: slots, bytes, and the views' elements."""
    spec = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 1 << 11, block_tokens=1 << 20)])
    cache = make_cache(spec, 4096, 4096, device="meta")
    scheduler, none = Scheduler(cache, max_batched_tokens=4, max_running=1), np.zeros(4000, np.int32)
    filler = inside.pools(cache).take(none)
    scheduler.add(Request("high", [1, 2, 3], 1))
    step = scheduler.schedule()
    view = step.group("full")
    block = int(view.block_table[0, 0])
    assert block << 20 > 2**31
    assert view.slot_mapping.tolist() == [(block << 20) + i for i in range(3)]
    scheduler.commit(step, [1])
    inside.pools(cache).release(none, filler)
    k, _ = cache.kv("full", 0)
    assert k[block].storage_offset() == block * spec.groups[0].block_bytes // 2 > 2**31
    at, sizes = inside.spans(inside.arena(cache), none[:1], np.array([block], np.int32))
    assert (at.tolist(), sizes.tolist()) == ([block * spec.groups[0].block_bytes], [spec.groups[0].block_bytes])


# --- what a step computes and writes --------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("tier", ["device", "host", "half and half"])
@pytest.mark.parametrize("groups", [FULL, GROUPS], ids=["full", "all"])
def test_b12_nano_vllm_144_a_fully_cached_prompt_computes_a_token_and_writes_no_shared_block(
    make_serving, groups, tier, blocks
):
    """A prompt of exactly ``blocks`` blocks that are all cached in this tier."""
    serving = make_serving(groups, 24, 64, hold=[])
    tokens = prompt(0, 4 * blocks)
    serving.serve("first", tokens, 1)
    if tier != "device":
        inside.pools(serving.cache).forget_all()
    if tier == "half and half" and blocks > 1:
        serving.serve("its first half", tokens[: 4 * (blocks // 2)], 1)
    serving.add("again", tokens, 4)
    while not serving.step().num_tokens:  # until its load has landed
        assert serving.is_running("again") or serving.scheduler.waiting
    assert serving.known("again") == 4 * blocks + 1
    done = serving.run()["again"]
    assert sum(done.cached_tokens.values()) == 4 * (blocks - 1), "a block is left to compute"


def test_b13_nano_vllm_217_preempted_at_257_tokens_with_blocks_of_256(make_serving):
    serving = make_serving({"full": (FullAttention(), 256)}, 2, scheduler={"max_batched_tokens": 512})
    serving.add("A", prompt(0, 254), 6)
    serving.steps_until(lambda: serving.known("A") == 257)
    serving.add("urgent", prompt(1, 300), 1, priority=-1)
    serving.steps_until(lambda: "urgent" in serving.finished)
    step, ids = serving.begin()
    assert step.request_ids == ["A"]
    assert int(step.seq_lens[0]) == 257
    assert np.count_nonzero(step.group("full").block_table[0]) == 2
    serving.end(step, ids)
    assert serving.run()["A"].preemptions == 1


@pytest.mark.parametrize("tier", ["device", "host"])
def test_b15_tt_xla_4190_no_shared_or_published_block_changes_in_a_mixed_batch(make_serving, tier):
    """Rows with a prefix hit beside cold ones and decodes; every findable block keeps its bytes in every step."""
    serving = make_serving(GROUPS, 60, 100, hold=[])
    stem = prompt(0, 21)
    serving.serve("stem", stem, 1)
    if tier == "host":
        inside.pools(serving.cache).forget_all()
    for k in range(3):
        serving.add(f"hit {k}", [*stem, *prompt(10 + k, 3 + k)], 6)
        serving.add(f"cold {k}", prompt(20 + k, 5 + 4 * k), 6)
    mixed = 0
    while serving.scheduler.has_work():
        step = serving.scheduler.schedule()
        a, before = inside.pools(serving.cache).arrays, contents(serving)
        ids = serving.canary.forward(step) if step.num_tokens else np.empty(0, np.int64)
        for g, changed in enumerate(written_slots(serving, before)):
            base, rows = int(a.meta[g, Col.BASE]), int(a.meta[g, Col.ROWS])
            public = np.flatnonzero((a.mark[base : base + rows] != Mark.NONE) | (a.refs[base : base + rows] > 1))
            assert not {slot // 4 for slot in changed} & set(public.tolist())
        mixed += any("hit" in r for r in step.request_ids) and any("cold" in r for r in step.request_ids)
        serving.end(step, ids)
    assert mixed > 3
    assert all(serving.finished[f"hit {k}"].cached_tokens[tier] > 0 for k in range(3 if tier == "device" else 1))
