"""Defect f: ids of earlier occupants in a row's tail, or of blocks that left the window, reach attention."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from breadth import sized
from core.driving import check_step, prompt
from hypothesis import given, settings, strategies as st

from kvtier import ChunkedLocal, FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.testing import canary_spec
from kvtier.testing.canary import POISON

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
NAN = np.array([np.nan, np.nan], np.float32).view(np.uint64)[0]
LARGE = np.array([1e30, -1e30], np.float32).view(np.uint64)[0]


def test_f_a_row_reused_by_a_shorter_request_names_no_block_of_the_longer_one(make_serving):
    serving = make_serving(GROUPS, 128, scheduler={"max_running": 2, "max_batched_tokens": 512})
    serving.add("stays", prompt(0, 170), 9)
    serving.add("40 blocks", prompt(1, 160), 1)
    serving.steps_until(lambda: "40 blocks" in serving.finished)
    serving.add("3 blocks", prompt(2, 10), 3)
    step, ids = serving.begin()
    r = step.request_ids.index("3 blocks")
    for name in GROUPS:
        table = step.group(name).block_table
        assert table.shape[1] > 40, "the other request makes the table wide"
        assert not table[r, 3:].any()
    serving.end(step, ids)
    serving.run()


def test_f_a_block_that_left_the_window_is_null_from_the_step_in_which_it_is_reused(make_serving):
    serving = make_serving(GROUPS, {"full": 40, "win": 7, "chunk": 7})
    serving.add("long", prompt(0, 9), 60)
    for k in range(14):
        serving.add(f"taker {k}", prompt(k + 1, 7), 2)
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        if "long" in step.request_ids:
            r = step.request_ids.index("long")
            row, length = step.group("win").block_table[r], int(step.seq_lens[r])
            assert not row[: max(0, length - 6) // 4].any()
        serving.end(step, ids)
    assert all(done.finish_reason == "length" for done in serving.finished.values())


@pytest.mark.parametrize("garbage", [NAN, LARGE, POISON])
def test_f_nothing_outside_the_masks_is_read(make_serving, garbage):
    """Garbage in the null block, past the end in the last pages, and in every block that no entry names."""
    serving = make_serving(GROUPS, 24)
    for k in range(3):
        serving.add(f"r{k}", prompt(k, 5 + 6 * k), 12)
    while serving.scheduler.has_work():
        step = serving.scheduler.schedule()
        for g, group in enumerate(serving.spec.groups):
            view, words = step.group(group.name), inside.views(serving.canary)[g]
            tables = inside.coordinator(serving.cache).tables.table(g)
            unused = np.setdiff1d(np.arange(words[0][0].shape[0]), tables[tables > 0])
            for r, length in enumerate(step.seq_lens):
                page, end = (
                    view.block_table[r, (length - 1) // group.block_tokens],
                    (length - 1) % group.block_tokens + 1,
                )
                for k, v in words:
                    k[page, end:] = v[page, end:] = garbage
            for k, v in words:
                k[unused] = v[unused] = garbage
        serving.end(step, serving.canary.forward(step) if step.num_tokens else np.empty(0, int))
        inside.pools(serving.cache).forget_all()  # what the garbage has hit must not be found


def test_f_the_null_block_is_never_written(make_serving):
    serving = make_serving(GROUPS, {"full": 12, "win": 7, "chunk": 7}, 40, verify="full")
    for layers in inside.views(serving.canary):
        for k, v in layers:
            k[0] = v[0] = 12345
    for k in range(8):
        serving.add(f"r{k}", prompt(k % 3, 7 + 5 * k), 6)
    serving.run()
    for layers in inside.views(serving.canary):
        assert all(np.all(x[0] == 12345) for pair in layers for x in pair)


def test_f_padded_rows_are_null_whatever_ran_before(make_serving):
    serving = make_serving(GROUPS, 64, scheduler={"max_running": 8, "max_batched_tokens": 256})
    for k in range(8):
        serving.add(f"r{k}", prompt(k, 9 + k), 1 if k >= 3 else 5)
    serving.step()
    step, ids = serving.begin()
    assert len(step.request_ids) == 3
    for name in GROUPS:
        qo, kv, indices, last = step.group(name).padded(8)
        plain = step.group(name).paged()
        entries = len(plain[3])
        assert len(last) == 8
        assert qo.tolist() == [*plain[0], *(plain[0][-1] + np.arange(1, 9 - entries))]
        assert np.all(np.diff(kv)[entries:] == 1)
        assert not indices[len(plain[2]) :].any()
        assert np.all(last[entries:] == 1)
    serving.end(step, ids)
    serving.run()


@settings(max_examples=sized(20, 60))
@given(
    window=st.integers(1, 14),
    chunk=st.sampled_from([4, 8, 12]),
    bt=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 24),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_f_every_view_of_every_step_agrees_with_the_masks(window, chunk, bt, budget, lengths):
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(window), bt), "chunk": (ChunkedLocal(chunk), 4)}
    with KVCache(canary_spec(groups), device="meta", device_blocks={"full": 30, "win": 60, "chunk": 16}) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=budget, max_running=3)
        for i, length in enumerate(lengths):
            scheduler.add(Request(str(i), prompt(i % 2, length), 4))
        while scheduler.has_work():
            step = scheduler.schedule()
            check_step(cache, step)
            scheduler.commit(step, [7] * len(step.sample_rows))
