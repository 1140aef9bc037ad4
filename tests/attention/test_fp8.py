"""Scales around attention over float8 pools: every head its own, applied once, on any path of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.test_reference import KINDS, MIXED, Case
from kvtier.attention.fp8 import fold_output, fold_query, layer_scales, quantize, widen
from kvtier.attention.reference import attend, write_kv
from kvtier.geometry.kinds import FullAttention
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.machine.errors import StepError

E4M3 = torch.float8_e4m3fn


def scales(heads: int, seed: int = 0) -> Tensor:
    return 2.0 ** (4 * torch.rand(heads, generator=torch.Generator().manual_seed(seed)) - 2)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """What [T, Hkv, D] is after it has been in a pool."""
    return (x / scale[:, None]).clamp(-448, 448).to(E4M3).float() * scale[:, None]


def make(attention: Any, **options: Any) -> tuple[Case, dict[str, Tensor]]:
    """A step over pools of e4m3 whose past and whose oracle's K and V went through the scales."""
    case = Case(attention, MIXED, **options)
    given = {"k_scale": scales(case.kv_heads, 1), "v_scale": scales(case.kv_heads, 2)}
    case.keys = [rounded(x, given["k_scale"]) for x in case.keys]
    case.values = [rounded(x, given["v_scale"]) for x in case.values]
    case.pool = case.pool.to(E4M3)
    d = case.dims[0]
    views = (case.pool[:, -1, 0], case.pool[:, -1, 1])
    case.k, case.v = views if case.dims[0] == case.dims[1] else (case.pool[:, -1, ..., :d], case.pool[:, -1, ..., d:])
    for r, (n, end) in enumerate(case.entries):
        past = torch.arange(case.first[r], end - n)
        at = case.table[r, past // case.block_tokens], past % case.block_tokens
        case.k[at] = quantize(case.keys[r][past], given["k_scale"], E4M3)
        case.v[at] = quantize(case.values[r][past], given["v_scale"], E4M3)
    return case, given


def run(case: Case, given: dict[str, Tensor], **options: Any) -> Tensor:
    write_kv(case.k, case.v, case.new_k, case.new_v, case.batch, **given)
    return attend(case.query, case.k, case.v, case.batch, scale=case.dims[0] ** -0.5, **given, **options)


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (6, 3), (2, 2), (4, 1)])
def test_every_kind_and_sharing_of_heads(attention: Any, heads: tuple[int, int]) -> None:
    case, given = make(attention, heads=heads[0], kv_heads=heads[1])
    torch.testing.assert_close(run(case, given), case.oracle().float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_soft_cap_and_sinks_see_the_true_scores(options: dict[str, Any]) -> None:
    case, given = make(FullAttention())
    torch.testing.assert_close(run(case, given, **options), case.oracle(**options).float(), atol=1e-5, rtol=1e-5)


def test_values_of_another_size() -> None:
    case, given = make(FullAttention(), dims=(24, 16))
    torch.testing.assert_close(run(case, given), case.oracle().float(), atol=1e-5, rtol=1e-5)


def test_wrong_scales_would_be_seen() -> None:
    """What the comparisons above can see: one head's scale left out, or applied to another."""
    case, given = make(FullAttention())
    write_kv(case.k, case.v, case.new_k, case.new_v, case.batch, **given)
    for name, scale in given.items():
        for wrong in (scale * torch.tensor([1.0, 1.01]), scale.flip(0), scale**2, torch.ones(2)):
            out = attend(case.query, case.k, case.v, case.batch, scale=0.25, **{**given, name: wrong})
            assert float((out - case.oracle()).abs().max()) > 1e-3


def test_as_close_to_unrounded_attention_as_vllm_asks() -> None:
    """vLLM's kernel test: q, K and V uniform within 1 / sqrt(head size), scale 1, absolute tolerance 1e-2."""
    for head_dim in (64, 128):
        rng, most = torch.Generator().manual_seed(head_dim), head_dim**-0.5
        case = Case(FullAttention(), [(1, 200), (64, 64), (1, 1)], heads=8, dims=(head_dim, head_dim))
        case.query, case.new_k, case.new_v = (
            (2 * torch.rand(x.shape, generator=rng) - 1) * most for x in (case.query, case.new_k, case.new_v)
        )
        case.keys, case.values = (
            [(2 * torch.rand(x.shape, generator=rng) - 1) * most for x in xs] for xs in (case.keys, case.values)
        )
        for r, (n, end) in enumerate(case.entries):
            rows = slice(case.query_start[r], case.query_start[r + 1])
            case.keys[r][end - n :], case.values[r][end - n :] = case.new_k[rows], case.new_v[rows]
        expected = case.oracle()
        pool = torch.zeros(2, *case.k.shape).to(E4M3)
        for r, (n, end) in enumerate(case.entries):
            past = torch.arange(end - n)
            at = case.table[r, past // case.block_tokens], past % case.block_tokens
            pool[0][at], pool[1][at] = case.keys[r][past].to(E4M3), case.values[r][past].to(E4M3)
        write_kv(pool[0], pool[1], case.new_k, case.new_v, case.batch)
        found = attend(case.query, pool[0], pool[1], case.batch, scale=head_dim**-0.5)
        torch.testing.assert_close(found, expected.float(), atol=1e-2, rtol=1e-5)
        assert float((found - expected).abs().max()) > 1e-4, "nothing was rounded"


# --- the helpers ----------------------------------------------------------------------------------------------------


def test_folding_is_by_the_kv_head_that_a_query_head_reads() -> None:
    q = torch.ones(2, 6, 4)
    folded = fold_query(q, torch.tensor([2.0, 3.0]))
    assert folded[0, :, 0].tolist() == [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert fold_output(q, torch.tensor([2.0, 3.0, 5.0]))[1, :, 3].tolist() == [2.0, 2.0, 3.0, 3.0, 5.0, 5.0]
    assert fold_query(q, None) is q and fold_output(q, None) is q
    with pytest.raises(StepError, match="6 query heads"):
        fold_query(q, torch.ones(4))


def test_folding_keeps_the_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert fold_query(torch.ones(1, 2, 4, dtype=dtype), torch.ones(2)).dtype is dtype


@pytest.mark.parametrize(("dtype", "most"), [(E4M3, 448.0), (torch.float8_e5m2, 57344.0)])
def test_quantising_saturates_and_keeps_nan(dtype: torch.dtype, most: float) -> None:
    x = torch.tensor([1e30, -1e30, torch.inf, torch.nan, 1.0]).view(1, 1, 5)
    assert quantize(x, None, dtype).float().flatten()[:3].tolist() == [most, -most, most]
    assert quantize(x, None, dtype).float().flatten()[3].isnan()
    assert quantize(x, torch.tensor([0.5]), dtype).float().flatten()[4] == 2.0
    assert quantize(x, None, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("numbers", [True, False])
def test_widening_gives_every_value_as_torch_does(dtype: torch.dtype, numbers: bool) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    if numbers:
        x = x.view(torch.uint8)[x.float().isfinite()].view(dtype)
    try:
        torch.set_flush_denormal(True)  # the smallest values must not go through denormal floats
        out = widen(x, torch.empty(len(x)), torch.empty(len(x), dtype=torch.int16))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out.nan_to_num(1e9), x.float().nan_to_num(1e9))
    assert torch.equal(out.signbit(), x.float().signbit())
    assert widen(x[:0], out[:0], torch.empty(0, dtype=torch.int16)).numel() == 0


def test_scales_of_a_layer() -> None:
    spec = CacheSpec([GroupSpec("full", FullAttention(), 2, 2, 8, "fp8")])
    assert layer_scales(spec.groups[0], 0, "cpu") is None
    spec = spec.with_kv_scales({0: {"k": 1, "v": 1}, 1: {"k": [2, 3], "v": 0.5}})
    k, v = layer_scales(spec.groups[0], 1, "cpu") or (None, None)
    assert k is not None and v is not None
    assert (k.tolist(), v.tolist(), k.dtype) == ([2.0, 3.0], [0.5, 0.5], torch.float32)
