"""The exact backend: right (against the oracle of ``test_reference``), and the same bits however a text is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.test_reference import FLOAT8, MIXED, Case, sinks_of
from kvtier.attention import _decode, exact
from kvtier.attention._exact_loops import SPLIT, TILE
from kvtier.geometry.kinds import Attention, ChunkedLocal, FullAttention, SlidingWindow
from kvtier.machine.errors import StepError

pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = [1, 3, TILE - 1, TILE, TILE + 1, SPLIT - 1, SPLIT, SPLIT + 1, 720, 2 * SPLIT + TILE + 5]
KINDS = [
    FullAttention(),
    SlidingWindow(SPLIT + 7),
    SlidingWindow(24),
    SlidingWindow(1),
    ChunkedLocal(720),
    ChunkedLocal(48),
]
LENGTH = 2 * SPLIT + 40
CUTS = {
    "prompt": [LENGTH],
    "chunks of 64": [64] * (LENGTH // 64) + [LENGTH % 64],
    "a hit of 3 tokens, chunks of 200": [3, *[200] * 5, LENGTH - 1003],
    "its end": [LENGTH - 3, 1, 2],
    "decodes": [SPLIT - 4, *[1] * 8, LENGTH - SPLIT - 4],
}


@pytest.fixture(params=["products", "loops"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Many queries of an entry as this machine takes them, or one by one."""
    if request.param == "loops":
        monkeypatch.setattr(exact, "products_agree", lambda dim, dim_v: False)
    return str(request.param)


def batch_of(case: Case, **changes: Any) -> exact.PagedBatch:
    b = case.batch
    names = "attention", "block_tokens", "query_start", "seq_lens", "block_table", "slot_mapping"
    return exact.PagedBatch(**{name: getattr(b, name) for name in names} | changes)


def run(case: Case, **options: Any) -> Tensor:
    batch = batch_of(case)
    exact.write_kv(case.k, case.v, case.new_k, case.new_v, batch)
    return exact.attend(case.query, case.k, case.v, batch, scale=0.25, **options)


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize(("block_tokens", "softcap", "heads"), [(16, None, (8, 1)), (3, 2.0, (6, 2)), (1, 2.0, (8, 2))])
def test_it_is_right(
    way: str, attention: Attention, block_tokens: int, softcap: float | None, heads: tuple[int, int]
) -> None:
    entries = [*MIXED, *[(1, end) for end in ENDS], (SPLIT + 9, 2 * SPLIT + 3), (7, 700)]
    case = Case(attention, entries, *heads, (20, 37), block_tokens=block_tokens, layers=1)
    sinks = sinks_of(heads[0]) if softcap else None
    want = case.oracle(0.25, softcap, sinks)
    assert (run(case, softcap=softcap, sinks=sinks).double() - want).abs().max() < 2e-5


def cut(case: Case, sizes: list[int], **options: Any) -> Tensor:
    """The rows of an only entry, computed in steps of ``sizes`` queries."""
    parts, done = [], 0
    for n in sizes:
        batch = batch_of(
            case, query_start=[0, n], seq_lens=[done + n], slot_mapping=case.batch.slot_mapping[done : done + n]
        )
        parts.append(exact.attend(case.query[done : done + n], case.k, case.v, batch, scale=0.25, **options))
        done += n
    assert done == LENGTH
    return torch.cat(parts)


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FLOAT8], ids=str)
def test_no_bit_depends_on_how_a_text_is_cut(attention: Attention, dtype: torch.dtype) -> None:
    case = Case(attention, [(LENGTH, LENGTH)], 6, 2, (16, 24), dtype, block_tokens=16, layers=1)
    case.query = case.query.float()
    options: dict[str, Any] = {"softcap": 5.0, "sinks": sinks_of(6)} if dtype is torch.float32 else {}
    want = run(case, **options)
    for name, sizes in CUTS.items():
        assert torch.equal(cut(case, sizes, **options), want), name


@pytest.mark.parametrize("end", [SPLIT + 1, 2 * SPLIT + 1])
def test_a_split_that_one_query_sees_alone_has_no_other_bits(end: int) -> None:
    """With as many KV heads as heads it is a product of one row."""
    case = Case(FullAttention(), [(end, end)], 4, 4, (64, 64), block_tokens=16, layers=1)
    want = run(case)
    for first in (SPLIT - 9, SPLIT, end - 20):
        batch = batch_of(
            case, query_start=[0, end - first], seq_lens=[end], slot_mapping=case.batch.slot_mapping[first:end]
        )
        assert torch.equal(exact.attend(case.query[first:], case.k, case.v, batch, scale=0.25), want[first:]), first


@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_the_rest_of_the_step(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_decode, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(exact, "_LOT_BYTES", 1 << 14)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    case = Case(FullAttention(), [*MIXED, *[(1, end) for end in ENDS]], layers=1)
    together, row = run(case), 0
    for entry, (n, end) in enumerate(case.entries):
        batch = batch_of(case, query_start=[0, n], seq_lens=[end], block_table=case.table[entry : entry + 1],
                         slot_mapping=case.batch.slot_mapping[row : row + n])  # fmt: skip
        assert torch.equal(
            exact.attend(case.query[row : row + n], case.k, case.v, batch, scale=0.25), together[row : row + n]
        )
        row += n


def test_products_and_loops_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not exact.products_agree(64, 64):
        pytest.skip("nothing is missing: on this machine products sum in another order, and loops take all queries")
    case = Case(SlidingWindow(600), [(LENGTH, LENGTH), (70, 130)], 9, 3, (64, 64), layers=1)
    want = run(case)
    monkeypatch.setattr(exact, "products_agree", lambda dim, dim_v: False)
    assert torch.equal(run(case), want)


def test_ids_that_are_not_in_the_pool_are_refused(way: str) -> None:
    case = Case(FullAttention(), [(1, 20), (1, 9)])
    run(case)
    table = case.table.clone()
    for block in (-1, 10**6):
        table[0, 1] = block
        with pytest.raises(StepError, match="block table"):
            exact.attend(case.query, case.k, case.v, batch_of(case, block_table=table), scale=1.0)
    with pytest.raises(StepError, match="block table"):
        exact.attend(case.query, case.k, case.v, batch_of(case, block_table=case.table[:, :2]), scale=1.0)
    with pytest.raises(StepError):
        exact.attend(case.query[:1], case.k, case.v, batch_of(case), scale=1.0)
