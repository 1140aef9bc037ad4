"""Queries that see few keys on a CPU, attended to in place: what the compiled loops add to ``test_reference``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.test_reference import Case, sinks_of
from kvtier.attention import _decode, reference, workers
from kvtier.attention._decode_loops import PIECE, TILE
from kvtier.attention.reference import PagedBatch, attend, write_kv
from kvtier.geometry.kinds import Attention, ChunkedLocal, FullAttention, SlidingWindow
from kvtier.machine.errors import StepError

pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = [1, 3, TILE - 1, TILE, TILE + 1, PIECE - 1, PIECE, PIECE + 1, 720, 2 * PIECE + TILE + 5]
KINDS = [FullAttention(), SlidingWindow(PIECE + 7), SlidingWindow(TILE), ChunkedLocal(720), ChunkedLocal(48)]


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loops do not take fails."""
    monkeypatch.delattr(reference, "_singles")
    monkeypatch.delattr(reference, "_span")
    monkeypatch.delattr(reference, "_bands")


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize(("block_tokens", "softcap", "heads"), [(16, None, (8, 1)), (3, 2.0, (6, 2)), (1, 2.0, (8, 2))])
def test_ends_of_tiles_pieces_and_blocks(
    attention: Attention, block_tokens: int, softcap: float | None, heads: tuple[int, int]
) -> None:
    case = Case(attention, [(1, end) for end in ENDS], *heads, (20, 37), block_tokens=block_tokens, layers=1)
    case.check(softcap=softcap, sinks=sinks_of(heads[0]) if softcap else None)


FEW_PAIRS = [(5, 40), (1, 200), (90, 90), (2, 2000), (9, 420), (1, 1), (3, 3)]


@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_several_queries_that_see_little_have_the_bits_of_single_ones(attention: Attention) -> None:
    case = Case(attention, FEW_PAIRS, layers=1)
    case.check(sinks=sinks_of(4))
    out, batch = attend(case.query, case.k, case.v, case.batch, scale=0.25), case.batch
    for entry, (queries, end) in enumerate(FEW_PAIRS):
        for i in {0, queries // 2, queries - 1}:
            row, seen = batch.query_start[entry] + i, end - queries + i + 1
            table, slots = case.table[entry : entry + 1], batch.slot_mapping[row : row + 1]
            single = replace(batch, query_start=[0, 1], seq_lens=[seen], block_table=table, slot_mapping=slots)
            assert torch.equal(attend(case.query[row : row + 1], case.k, case.v, single, scale=0.25)[0], out[row])


def test_of_a_long_text_only_what_a_window_shows_counts() -> None:
    Case(SlidingWindow(64), [(64, 700), (1, 9)], layers=1).check()


def test_several_queries_that_see_much_are_torch_s() -> None:
    case = Case(FullAttention(), [(91, 91), (1, 9)], layers=1)
    with pytest.raises(NameError):  # see ``no_torch``
        case.run()


def test_the_greatest_score_may_be_in_any_piece() -> None:
    case = Case(FullAttention(), [(1, 4 * PIECE)] * 8, spread=300.0, layers=1)
    assert (case.run().double() - case.oracle()).abs().max() < 3e-3  # the oracle's scores are of hundreds, unrounded


def alone(case: Case, entry: int) -> Tensor:
    """The row of one entry, in a step of its own."""
    batch = replace(
        case.batch,
        query_start=[0, 1],
        seq_lens=case.batch.seq_lens[entry : entry + 1],
        block_table=case.table[entry : entry + 1],
        slot_mapping=case.batch.slot_mapping[entry : entry + 1],
    )
    return attend(case.query[entry : entry + 1], case.k, case.v, batch, scale=0.25)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_bits_depend_on_the_own_query_and_keys_alone(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on what else is in the step, nor on how many threads there are."""
    case = Case(FullAttention(), [(1, end) for end in ENDS], layers=1)
    want = case.run()
    monkeypatch.setattr(_decode, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(case.run(), want)
    assert torch.equal(torch.cat([alone(case, entry) for entry in range(len(ENDS))]), want)


def test_a_key_that_is_not_a_number_is_seen_by_those_that_see_it_and_nobody_else() -> None:
    case = Case(SlidingWindow(24), [(1, 200), (1, 90), (1, 30)])
    want = case.run()
    case.k[case.table[1, 80 // 8], 80 % 8] = float("nan")
    got = attend(case.query, case.k, case.v, case.batch, scale=0.25)
    assert got[1].isnan().all() and torch.equal(got[::2], want[::2])


def test_one_thread_starts_no_other() -> None:
    workers._workers.cache_clear()
    Case(FullAttention(), [(1, 3000)] * 4, 8, 2, (64, 64), layers=1).run()
    assert workers._workers.cache_info().currsize == 0


def swapped(batch: PagedBatch, name: str, index: int, value: int) -> PagedBatch:
    changed = getattr(batch, name).clone()
    changed.view(-1)[index] = value
    return replace(batch, **{name: changed})


@pytest.mark.parametrize("block", [-1, 10**6])
def test_ids_that_are_not_in_the_pool_are_refused(block: int) -> None:
    case = Case(FullAttention(), [(1, 20), (1, 9)])
    case.run()
    before = case.k.clone()
    with pytest.raises(StepError, match="slot mapping"):
        batch = swapped(case.batch, "slot_mapping", 1, block * case.block_tokens)
        write_kv(case.k, case.v, case.new_k + 1, case.new_v, batch)
    assert torch.equal(case.k.nan_to_num(), before.nan_to_num())
    with pytest.raises(StepError, match="block table"):
        attend(case.query, case.k, case.v, swapped(case.batch, "block_table", 1, block), scale=1.0)
    with pytest.raises(StepError, match="block table"):
        attend(case.query, case.k, case.v, replace(case.batch, block_table=case.table[:, :2]), scale=1.0)


def test_shapes_that_are_not_the_pools_are_refused() -> None:
    case = Case(FullAttention(), [(1, 20), (1, 9)])
    case.run()
    k, v, new, batch = case.k, case.v, torch.zeros(2, 2, 16), case.batch
    before = k.clone()
    for key, value in ((new[:, :1], new), (new, new[..., 1:]), (new, new[:1])):
        with pytest.raises(StepError):
            write_kv(k, v, key, value, batch)
    with pytest.raises(StepError):
        write_kv(k, v[1:], new, new, batch)
    with pytest.raises(StepError):
        write_kv(k, v, new, new, replace(batch, slot_mapping=batch.slot_mapping[:1]))
    assert torch.equal(k.nan_to_num(), before.nan_to_num())
    for query, sinks in ((case.query[:, :3], None), (case.query[..., 1:], None), (case.query, torch.zeros(3))):
        with pytest.raises(StepError):
            attend(query, k, v, batch, scale=1.0, sinks=sinks)
    with pytest.raises(StepError):
        attend(case.query, k, v, replace(batch, block_table=case.table[:1]), scale=1.0)


@pytest.mark.parametrize("as_given", [float, np.float32, np.float64, torch.tensor])
def test_a_scale_may_be_any_number(as_given: Callable[[float], Any]) -> None:
    """No loop is compiled for another kind (conftest)."""
    case = Case(FullAttention(), [(1, 40), (1, 7)], layers=1)
    case.check()
    for softcap in (None, 4.0):
        mine = None if softcap is None else as_given(softcap)
        got = attend(case.query, case.k, case.v, case.batch, scale=as_given(0.25), softcap=mine)
        assert torch.equal(got, attend(case.query, case.k, case.v, case.batch, scale=0.25, softcap=softcap))
