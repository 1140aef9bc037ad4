"""The index arrays of a step, in numbers that can be checked by hand; check_step compares them everywhere else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from core.driving import check_step, prompt
from kvtier import ChunkedLocal, ConfigError, FullAttention, SlidingWindow, StepError
from kvtier.audit.run import AuditLevel

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def started(make_serving, lengths, **options):
    """A serving whose next step computes all these prompts at once."""
    serving = make_serving(GROUPS, 40, scheduler={"max_batched_tokens": 256, "max_running": 8}, **options)
    for i, length in enumerate(lengths):
        serving.add(str(i), prompt(i, length), 6)
    return serving


def test_a_step_packs_requests_one_after_the_other(make_serving):
    serving = started(make_serving, [5, 3, 9])
    step, ids = serving.begin()
    assert step.request_ids == ["0", "1", "2"]
    assert step.query_start.tolist() == [0, 5, 8, 17]
    assert step.seq_lens.tolist() == [5, 3, 9]
    assert step.positions.tolist() == [*range(5), *range(3), *range(9)]
    assert step.token_ids.tolist() == [*prompt(0, 5), *prompt(1, 3), *prompt(2, 9)]
    assert step.sample_rows.tolist() == [0, 1, 2]
    serving.end(step, ids)
    step, more = serving.begin()
    assert step.token_ids.tolist() == ids.tolist()
    assert step.positions.tolist() == [5, 3, 9]
    serving.end(step, more)


def test_a_chunk_of_a_longer_prompt_is_not_sampled(make_serving):
    serving = make_serving(GROUPS, 40, scheduler={"max_batched_tokens": 6})
    serving.add("A", prompt(0, 10), 2)
    step = serving.step()
    assert (step.num_tokens, step.sample_rows.tolist()) == (6, [])
    step = serving.step()
    assert (step.num_tokens, step.sample_rows.tolist()) == (4, [0])


def test_a_chunked_group_comes_as_one_entry_per_request_and_chunk(make_serving):
    serving = started(make_serving, [21, 8, 3])
    step, ids = serving.begin()
    qo, kv, indices, last = step.group("chunk").paged()
    assert qo.tolist() == [0, 8, 16, 21, 29, 32]
    assert kv.tolist() == [0, 2, 4, 6, 8, 9]
    assert last.tolist() == [4, 4, 1, 4, 3]
    table = step.group("chunk").block_table
    assert indices.tolist() == [*table[0, :6], *table[1, :2], table[2, 0]]
    serving.end(step, ids)
    step, ids = serving.begin()
    assert step.group("chunk").paged()[0].tolist() == [0, 1, 2, 3]
    serving.end(step, ids)


@pytest.mark.parametrize("budget", [3, 7, 9])
def test_a_step_that_begins_just_before_a_border_is_cut_there(make_serving, budget):
    """Chunks of 8 tokens; some step begins with the last token of one, or with the second."""
    serving = make_serving(GROUPS, 40, scheduler={"max_batched_tokens": budget})
    serving.add("A", prompt(0, 30), 1)
    starts = set()
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        starts.add(int(step.positions[0]) % 8)
        qo = step.group("chunk").paged()[0]
        for a, b in pairwise(qo.tolist()):
            assert step.positions[a] // 8 == step.positions[b - 1] // 8, "an entry of two chunks"
        serving.end(step, ids)
    assert starts & {1, 7}


def test_a_window_group_names_only_pages_that_its_mask_reaches(make_serving):
    serving = started(make_serving, [21])
    serving.step()
    step, ids = serving.begin()  # token 21 sees 16..21
    assert np.flatnonzero(step.group("win").block_table[0]).tolist() == [4, 5]
    qo, kv, indices, last = step.group("win").paged()
    assert (qo.tolist(), kv.tolist(), last.tolist()) == ([0, 1], [0, 2], [2])
    assert indices.tolist() == step.group("win").block_table[0, 4:6].tolist()
    serving.end(step, ids)


@pytest.mark.parametrize("name", GROUPS)
def test_flashinfer_conditions_hold(make_serving, name):
    """Monotone int32 indptr that end at len(indices), ids inside the pool, 1 <= last <= page, lengths add up."""
    serving = started(make_serving, [1, 4, 5, 17, 30])
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        if step.num_tokens:
            group, bt = serving.spec.group(name), serving.spec.group(name).block_tokens
            qo, kv, indices, last = step.group(name).paged()
            assert qo[0] == kv[0] == 0
            assert np.all(np.diff(qo) > 0)
            assert np.all(np.diff(kv) > 0)
            assert (qo[-1], kv[-1]) == (step.num_tokens, len(indices))
            assert np.all((indices > 0) & (indices <= 40))
            assert np.all((last >= 1) & (last <= bt))
            keys = (np.diff(kv) - 1) * bt + last
            assert np.all(keys >= np.diff(qo)), f"{group.name}: more queries than keys"
        serving.end(step, ids)


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize("name", GROUPS)
def test_padding_appends_entries_of_one_token_on_the_null_block(make_serving, name, rows):
    serving = started(make_serving, [3, 9, 2])
    step, ids = serving.begin()
    plain, padded = step.group(name).paged(), step.group(name).padded(rows)
    entries, pages = len(plain[3]), len(plain[2])
    for before, after in zip(plain, padded, strict=True):
        assert after[: len(before)].tolist() == before.tolist()
        assert after.dtype == np.int32
        assert after.flags.c_contiguous
    assert len(padded[3]) == rows
    assert not padded[2][pages:].any()
    assert (padded[3][entries:] == 1).all()
    serving.end(step, ids)


def test_a_step_with_more_entries_than_the_graph_has_is_refused(make_serving):
    serving = started(make_serving, [3, 9, 2])
    step, ids = serving.begin()
    with pytest.raises(StepError, match=r"4.*3"):
        step.group("chunk").padded(3)
    assert len(step.group("full").padded(3)[3]) == 3
    serving.end(step, ids)


def test_an_unknown_group_is_answered_with_those_there_are(make_serving):
    serving = started(make_serving, [3])
    step, ids = serving.begin()
    with pytest.raises(ConfigError, match="win"):
        step.group("window")
    serving.end(step, ids)


def test_a_step_without_tokens_has_empty_arrays(make_serving):
    serving = started(make_serving, [])
    step = serving.scheduler.schedule()
    check_step(serving.cache, step)
    for name in GROUPS:
        view = step.group(name)
        assert view.block_table.shape[0] == 0
        assert len(view.slot_mapping) == 0
        assert [len(x) for x in view.paged()] == [1, 1, 0, 0]
        assert [len(x) for x in view.padded(2)] == [3, 3, 2, 2]
    assert step.query_start.tolist() == [0]
    assert serving.scheduler.commit(step, []) == []


def test_arrays_of_a_step_stay_as_they_are_until_the_next_schedule(make_serving):
    serving = started(make_serving, [5, 9])
    step, ids = serving.begin()
    names = ("token_ids", "positions", "query_start", "seq_lens", "sample_rows")
    before = [getattr(step, name).copy() for name in names]
    views = [step.group(name).block_table.copy() for name in GROUPS]
    serving.end(step, ids)
    assert all(np.array_equal(getattr(step, name), old) for name, old in zip(names, before, strict=True))
    assert all(np.array_equal(step.group(name).block_table, old) for name, old in zip(GROUPS, views, strict=True))


def test_an_entry_that_another_row_takes_over_names_that_rows_blocks(make_serving):
    """Tables are kept from step to step: the row that moves up has changed as often as the one that was there."""
    serving = make_serving({"full": GROUPS["full"]}, 40, scheduler={"max_batched_tokens": 256, "max_running": 2})
    serving.add("first", prompt(1, 13), 12)
    serving.step()
    serving.add("urgent", prompt(2, 3), 2, priority=-1)
    serving.add("last", prompt(3, 3), 2)
    assert [serving.step().request_ids for _ in range(3)] == [
        ["urgent", "first"],
        ["urgent", "first"],
        ["first", "last"],
    ]
    serving.run()


def test_what_the_engine_does_to_a_steps_arrays_changes_no_commit(make_serving):
    """All but the block tables, which are brought up to date from step to step."""
    serving = make_serving(GROUPS, 64)
    serving.cache.checks.level = AuditLevel.OFF  # it would see this
    serving.add("A", prompt(0, 9), 4)
    serving.add("B", prompt(1, 70), 4)
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        for array in (step.seq_lens, step.starts, step.sample_rows, step.prefills, step.rows, step.token_ids):
            array[:] = array[::-1] - 1
        serving.end(step, ids)
    assert sorted(serving.finished) == ["A", "B"]


def test_views_are_built_once(make_serving):
    serving = started(make_serving, [5])
    step, ids = serving.begin()
    assert step.group("full") is step.group("full")
    assert step.group("full").block_table is step.group("full").block_table
    serving.end(step, ids)
