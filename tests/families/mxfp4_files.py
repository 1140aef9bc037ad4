"""gpt-oss's experts in MXFP4, and Triton's product of them for its interpreter, which has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""By the format's definition (OCP MX 1.0, E2M1)."""


def random_weights(shape: tuple[int, int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [experts, columns, inner / 32, 16] of weights [experts, inner, columns], and their scales."""
    experts, inner, columns = shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, columns, inner // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 125, blocks.shape[:-1], dtype=torch.uint8, generator=generator)


def as_published(dense: GptOssExperts) -> tuple[dict[str, torch.Tensor], GptOssExperts]:
    """A layer's tensors by the names that checkpoints give them, and the float32 layer with the weights that they mean.

    transformers' own decoder says what they mean.
    """
    stored = {}
    for i, name in enumerate(("gate_up_proj", "down_proj")):
        weight = getattr(dense, name)
        blocks, scales = random_weights(weight.shape, i)
        weight.data = convert_moe_packed_tensors(blocks, scales, dtype=weight.dtype)
        bias = getattr(dense, f"{name}_bias").normal_(generator=torch.Generator().manual_seed(i)).bfloat16()
        getattr(dense, f"{name}_bias").copy_(bias)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
    return stored, dense


def dot_scaled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Teaches the interpreter ``tl.dot_scaled`` of bfloat16 by MXFP4, from its documentation; returns the shapes.

    Triton's own checks of shapes and formats run before it.
    """
    seen: list[tuple[int, ...]] = []

    def create(
        self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, fast: Any, *rest: Any
    ) -> Any:
        a_k_pack, b_k_pack, acc = rest
        assert (a_scale, a_k_pack, b_k_pack, a.dtype.scalar) == (None, True, True, tl.bfloat16)
        halves = np.stack([b.data & 15, b.data >> 4], 1).reshape(2 * len(b.data), -1)
        scales = np.ldexp(np.float32(1), b_scale.data.astype(np.int32) - 127).repeat(32, 1).T
        x = (a.data.astype(np.uint32) << 16).view(np.float32)
        seen.append((*x.shape, halves.shape[1]))
        return interpreter.TensorHandle(acc.data + x @ (VALUES[halves] * scales), acc.dtype.scalar)

    inner: Any = TritonSemantic.dot_scaled

    def with_formats(
        self: Any, a: Any, a_scale: Any, a_format: str, b: Any, b_scale: Any, b_format: str, *rest: Any
    ) -> Any:
        return inner(self, a, a_scale, tl.constexpr(a_format), b, b_scale, tl.constexpr(b_format), *rest)

    monkeypatch.setattr(TritonSemantic, "dot_scaled", with_formats)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", create, raising=False)
    return seen
