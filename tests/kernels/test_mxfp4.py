"""gpt-oss's experts in MXFP4, against transformers' decoder and its own layer of what that gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
from families import mxfp4_files as mxfp4
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from runner.model.fused import experts, table, triton_experts
from runner.model.mxfp4 import PackedExperts, unpacked

CPU = torch.device("cpu")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    monkeypatch.setattr(table, "runs_kernel", lambda device: True)
    return mxfp4.dot_scaled(monkeypatch)


def layers(hidden: int = 96, middle: int = 160, of: int = 5) -> tuple[PackedExperts, GptOssExperts]:
    """The layer as it is published, and transformers' own of the weights that it means, in float32."""
    config = GptOssConfig(hidden_size=hidden, intermediate_size=middle, num_local_experts=of, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    dense = GptOssExperts(config).requires_grad_(False)
    packed = PackedExperts(dense)
    stored, dense = mxfp4.as_published(dense)
    packed.load_state_dict(stored, assign=True)
    return packed, dense


def step(tokens: int, hidden: int = 96, of: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    scores, ids = torch.randn(tokens, of, generator=generator).topk(2)
    return torch.randn(tokens, hidden, generator=generator).bfloat16(), ids, scores.softmax(1).bfloat16()


def assert_gives(forward: Any, dense: GptOssExperts, *given: Any) -> None:
    """Up to the rounding of bfloat16, which Triton's interpreter cuts off, what ``dense`` does with the same step."""
    x, ids, shares = step(*given)
    expected = dense(x.float(), ids, shares.float())
    difference = (forward(x, ids, shares).float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(difference) < 2e-2, float(difference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_and_scale_means_what_transformers_says(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).repeat(1, 1, 253, 1)
    scales = torch.arange(1, 254, dtype=torch.uint8).expand(1, 16, 253)  # beyond them lie zero and infinity
    found = unpacked(blocks, scales, dtype)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2))
    assert torch.equal(found[0, 2, 126 * 32 :][:4], torch.tensor([0.0, 1.0, 0.5, 1.0]).to(dtype)), "0x20, 0x21"


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_the_kernels_give_what_the_unpacked_layer_gives(products: list[tuple[int, ...]], tokens: int) -> None:
    packed, dense = layers()
    forward = experts.fused(packed)
    assert forward is not None
    assert_gives(forward, dense, tokens)
    assert_gives(packed, dense, tokens)
    assert products


@pytest.mark.parametrize("cuts", ["HOPPER", "SMALLER"])
def test_inner_sizes_that_fill_no_step_and_columns_that_fill_no_tile(
    products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, cuts: str
) -> None:
    """288 is a step of 256 and one scale's numbers more."""
    packed, dense = layers(288, 32, 2)
    for tokens in (3, 60):  # a decode's tiles and a prompt's
        forward = experts.fused(packed, cuts)
        assert forward is not None
        assert_gives(forward, dense, tokens, 288, 2)
    assert {inner for _, inner, _ in products} == {"HOPPER": {256, 128}, "SMALLER": {128, 64}}[cuts]


def test_scales_are_held_once(products: list[tuple[int, ...]]) -> None:
    packed, dense = layers()
    before = packed.down_proj_scales.clone()
    assert table.fuse(nn.Sequential(packed), CPU)["experts"] == 1
    assert torch.equal(packed.down_proj_scales, before)
    assert packed.down_proj_scales.stride(1) == 1, "as the kernel reads them"
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in packed.parameters()}
    assert sum(held.values()) == sum(p.nbytes for p in packed.parameters())
    assert_gives(packed, dense, 7)


def test_wrong_products_leave_the_layer_its_own_forward(
    products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed, dense = layers()
    inner: Any = triton_experts.launch
    monkeypatch.setattr(triton_experts, "launch", lambda weights, *rest: inner(weights, *rest) * 1.1)
    assert table.fuse(nn.Sequential(packed), CPU)["experts"] == 0
    assert "PackedExperts keeps its own forward: differs by 0." in caplog.text, "a warning, since it is slow"
    assert_gives(packed, dense, 7)


def test_half_types_other_than_bfloat16_are_not_multiplied(products: list[tuple[int, ...]]) -> None:
    packed, _ = layers()
    packed.gate_up_proj_bias.data = packed.gate_up_proj_bias.half()
    assert experts.fused(packed) is None
