"""What the FlashInfer backend refuses: damaged arrays, views in other places, shapes without kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention.conftest import Backend, need_flashinfer
from attention.flashinfer_standin import Gpu
from attention.flashinfer_steps import CHUNK, FULL, SCALE, WINDOW, attend, group_of
from attention.served_steps import HEADS, Served
from kvtier.attention._flashinfer_batch import Batch
from kvtier.attention.flashinfer import check_views
from kvtier.geometry.kinds import Attention
from kvtier.machine.errors import AttentionUnavailable, ConfigError, InvariantBroken, StepError

need_flashinfer()
pytestmark = pytest.mark.usefixtures("one_thread")


# --- what is refused -------------------------------------------------------------------------------------------------


def damaged(array: int, index: int, value: Callable[[int], int]) -> Callable[[Any], None]:
    def damage(arrays: Any) -> None:
        arrays[array][index] = value(int(arrays[array][index]))

    return damage


DAMAGES = {
    "foreign page count": (FULL, damaged(1, 1, lambda n: n + 1), "kv_indptr|tokens|slot|null"),
    "falling kv_indptr": (FULL, damaged(1, 1, lambda n: 0), "kv_indptr does not rise"),
    "queries of another batch": (FULL, damaged(0, -1, lambda n: n + 1), "qo_indptr does not rise"),
    "empty last page": (FULL, damaged(3, 0, lambda n: 0), "no possible length"),
    "overfull last page": (FULL, damaged(3, 0, lambda n: 5), "no possible length"),
    "last page one short": (FULL, damaged(3, 0, lambda n: n - 1 if n > 1 else n + 1), "is written to slot"),
    "a page of nobody": (FULL, damaged(2, 0, lambda n: 10**6), "outside its pool"),
    "the null block": (WINDOW, damaged(2, 0, lambda n: 0), "reads the null block"),
    "another page for a new token": (CHUNK, damaged(2, -1, lambda n: n % 20 + 1), "is written to slot"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_index_arrays_are_refused_before_a_plan(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, damage, message = DAMAGES[name]
    group = group_of("g", attention)
    served, flash = serve([group], requests=2), backend()
    step = next(served.steps())
    take = Batch.take

    def taken(batch: Batch, paged: Any, slots: Any) -> Any:
        paged = tuple(array.copy() for array in paged)
        damage(paged)
        return take(batch, paged, slots)

    monkeypatch.setattr(Batch, "take", taken)
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    with pytest.raises(InvariantBroken, match=message) as caught:
        attend(flash, served, step, group, batch, 0)
    assert gpu.plans == [] and all(str(v).startswith("I15: ") for v in caught.value.violations)


@pytest.mark.parametrize("kind", [WINDOW, CHUNK], ids=str)
def test_pages_that_no_mask_reaches_are_refused(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], kind: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrimmed table: right for FlashInfer's masks, but its first pages are null or someone else's by now."""
    group = group_of("g", kind)
    served, flash = serve([group], requests=1, most=60), backend()
    late = next(step for step in served.steps() if step.starts[0] >= 16)
    view = late.group("g")
    end = int(late.seq_lens[0])
    pages = np.maximum(view.block_table[0, : -(-end // 4)], 1).astype(np.int32)
    whole = np.array([0, late.num_tokens], np.int32), np.array([0, len(pages)], np.int32), pages, view.paged()[3][-1:]
    take = Batch.take
    monkeypatch.setattr(Batch, "take", lambda batch, paged, slots: take(batch, whole, slots))
    batch = flash.PagedBatch.from_step(late, group, "cpu")
    with pytest.raises(InvariantBroken, match="its mask cannot reach"):
        attend(flash, served, late, group, batch, 0)
    assert gpu.plans == []


def test_null_rows_must_be_null(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    batch = flash.GraphBatch(group, 6, torch.zeros(64, dtype=torch.int32))
    k, v = served.cache.kv("g", 0)
    flash.attend(torch.zeros(6, HEADS, 64, dtype=torch.float16), k, v, batch, scale=SCALE)
    step = next(s for s in served.steps() if s.num_tokens == len(s.request_ids) < 6)
    planned = len(gpu.plans)

    class Wrong:
        slot_mapping = step.group("g").slot_mapping

        def padded(self, rows: int) -> Any:
            qo, kv, pages, last = step.group("g").padded(rows)
            return qo, kv, np.where(pages == 0, 1, pages).astype(np.int32), last

    with pytest.raises(InvariantBroken, match="pads the batch"):
        flash.refill(batch, Wrong())
    assert len(gpu.plans) == planned


def test_arrays_are_not_looked_at_unless_asked(
    backend: Backend, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend(check_indices=False)
    monkeypatch.setattr(Batch, "check", lambda batch: pytest.fail("looked at"))
    step = next(served.steps())
    attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)


POOL = torch.zeros(9 * 2 * 4 * 2 * 64 + 64, dtype=torch.float16)


def views(offset: int = 0, extra: int = 0) -> tuple[Any, Any]:
    strides = (2 * 4 * 2 * 64 + extra, 2 * 64, 64, 1)
    k, v = (POOL.as_strided((8, 4, 2, 64), strides, offset + at) for at in (0, 4 * 2 * 64))
    return k, v


@pytest.mark.parametrize(
    "pair, message",
    [
        (views(offset=4), "begins at an address"),
        (views(extra=4), "strides"),
        ((views()[0], views(extra=8)[1]), "must be equal"),
        ((views()[0].transpose(2, 3), views()[1].transpose(2, 3)), "strides"),
        ((views()[0], views()[1].bfloat16()), "must be equal"),
        ((torch.zeros(1, dtype=torch.float16).expand(2**20, 1, 1, 64),) * 2, "strides"),
    ],
)
def test_views_that_cannot_be_read_in_place_are_refused(pair: Any, message: str) -> None:
    check_views(*views())
    check_views(*views(offset=8, extra=8))
    with pytest.raises(ConfigError, match=message):
        check_views(*pair)


def test_views_of_a_page_beyond_32_bits_are_refused() -> None:
    flat = torch.empty(1, dtype=torch.float16, device="meta")
    wide = flat.as_strided((1, 4, 2, 64), (2**32, 128, 64, 1))
    with pytest.raises(ConfigError, match="strides"):
        check_views(wide, wide)


@pytest.mark.parametrize(
    "query, how, message",
    [
        (torch.zeros(0, 3, 64), {}, "multiple of the KV heads"),
        (torch.zeros(0, HEADS, 64), {"softcap": 1.0, "sinks": torch.zeros(HEADS)}, "both sinks and a soft cap"),
        (torch.zeros(0, HEADS, 80), {}, "not 80 with 64"),
        (torch.zeros(0, HEADS, 64, dtype=torch.float32), {}, "dtype='bfloat16'"),
    ],
    ids=["heads", "sinks and soft cap", "head size", "float32"],
)
def test_what_flashinfer_has_no_kernel_for(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], query: Any, how: Any, message: str
) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    query = torch.zeros(
        step.num_tokens,
        *query.shape[1:],
        dtype=torch.float16 if query.shape[2] != 64 or query.shape[1] != HEADS or how else query.dtype,
    )
    with pytest.raises(AttentionUnavailable, match=message):
        flash.attend(query, *served.cache.kv("g", 0), batch, scale=1.0, **how)
    assert gpu.plans == []


def test_wrong_numbers_of_tokens_and_sinks(backend: Backend, serve: Callable[..., Served]) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    k, v = served.cache.kv("g", 0)
    query = torch.zeros(step.num_tokens + 1, HEADS, 64, dtype=torch.float16)
    with pytest.raises(StepError, match="tokens for a step"):
        flash.attend(query, k, v, batch, scale=1.0)
    with pytest.raises(StepError, match="tokens for a step"):
        flash.write_kv(k, v, query[:, :2], query[:, :2], batch)
    with pytest.raises(StepError, match=r"\[3\] sinks for 4"):
        flash.attend(query[1:], k, v, batch, scale=1.0, sinks=torch.zeros(3))


def test_queries_of_any_strides(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    """Models give queries as [1, H, T, D] transposed, or cut out of a fused projection."""
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    k, v = served.cache.kv("g", 0)
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    want = attend(flash, served, step, group, batch, 0)
    query = served.query(step, group, 0)
    shifted = torch.zeros(query.numel() + 1, dtype=query.dtype)[1:].view_as(query).copy_(query)
    fused = torch.cat([query, query[:, :2]], 1)[:, :HEADS]
    for other in (query.transpose(0, 1).contiguous().transpose(0, 1), shifted, fused, query.mT.contiguous().mT):
        out = flash.attend(other, k, v, batch, scale=SCALE)
        gpu.drain()
        assert torch.equal(out, want)
