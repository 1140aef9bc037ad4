"""K and V in 8-bit floats: one static scale per layer and KV head, folded into the tensors around attention.

Owns       the arithmetic: the way of values into a float8 pool, and the way of scales out of attention.
Promises   a kernel that reads the raw float8 values needs to know nothing of scales. Let K = k_scale * k8 and V =
           v_scale * v8. Then attention of q to K and V is v_scale times attention of q * k_scale to k8 and v8. This
           holds head by head, soft cap and sinks included (they see the same scores).
Does not   choose scales (kvtier/geometry/kv_scales.py, runner/engine/calibrate.py) or know layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier.geometry.spec import GroupSpec
from kvtier.machine.errors import StepError

Scales = tuple[Tensor, Tensor]
"""float32 [Hkv] of K and of V, of one layer."""


def quantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x`` [T, Hkv, D] in the form of a pool of ``dtype``.

    In float8: x / scale in float32, saturating at the type's largest value, NaN kept. Other dtypes: a cast.
    """
    if dtype.itemsize != 1:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    values = x.float()
    if scale is not None:
        values = values / scale[:, None]
    return values.clamp(-most, most).to(dtype)  # clamp lets NaN through; without it, torch makes NaN of 480 and more


def widen(x: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """``x`` as float32, in ``out``; ``spare`` is int16. All of one shape, contiguous.

    On a CPU, torch's own cast of e4m3 takes some twenty times as long as its cast of half precision (2.13). So e4m3
    goes through half precision: the same bits seven places up are a half that is 2**8 too small, except for NaN.
    """
    if x.device.type != "cpu" or x.dtype is not torch.float8_e4m3fn:
        return out.copy_(x)
    if x.numel() and int(x.view(torch.uint8).bitwise_and(0x7F).amax()) == 0x7F:
        return out.copy_(x)
    spare.copy_(x.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(-0x4080)  # 0xBF80: sign, exponent, mantissa
    return out.copy_(spare.view(torch.float16)).mul_(256)


def fold_query(query: Tensor, k_scale: Tensor | None) -> Tensor:
    """``query`` [T, Hq, D] times the scale of the KV head that each query head reads, in query's dtype."""
    return _times_head(query, k_scale)


def fold_output(out: Tensor, v_scale: Tensor | None) -> Tensor:
    """Attention's ``out`` [T, Hq, Dv] over float8 values, times their scales, in out's dtype."""
    return _times_head(out, v_scale)


def _times_head(x: Tensor, scale: Tensor | None) -> Tensor:
    """A product in float32, rounded once, without a float32 copy of x. Query head h reads KV head h // (Hq / Hkv)."""
    if scale is None:
        return x
    heads, kv_heads = x.shape[1], len(scale)
    if heads % kv_heads:
        raise StepError(f"{heads} query heads cannot share the scales of {kv_heads} KV heads")
    scaled = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    by_kv_head = (len(x), kv_heads, heads // kv_heads, x.shape[2])
    torch.mul(x.view(by_kv_head), scale[:, None, None], out=scaled.view(by_kv_head))
    return scaled


def layer_scales(group: GroupSpec, layer: int, device: torch.device | str) -> Scales | None:
    """A layer's scales (its index in the group), on ``device``; None if all are 1."""
    if group.kv_scales is None:
        return None
    k, v = group.kv_scales.layer(layer)
    return torch.tensor(k, dtype=torch.float32, device=device), torch.tensor(v, dtype=torch.float32, device=device)
