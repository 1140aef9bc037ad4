"""Puts K and V of new tokens into their slots.

Owns       the checks of the tensors, and the twin in torch.
Promises   only slots of usable blocks are written: not rows of padding (slot -1), the null block, or slots past the
           pool. Values that e4m3 cannot hold saturate at +-448, NaN stays NaN.
Does not   know requests or groups: a slot is block_id * block_tokens + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier.attention.fp8 import quantize
from kvtier.attention.kernels.choice import runs_kernel
from kvtier.machine.errors import StepError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By size: integers that stand in for a pool's values, to move them bit by bit."""


@torch.no_grad()
def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    audit: bool = False,
) -> None:
    """Writes key [T, Hkv, D] and value [T, Hkv, Dv] to the slots of int64 ``slot_mapping`` [T].

    ``k_cache``, ``v_cache``: a layer's views [blocks, block_tokens, Hkv, D or Dv] of the pool, last stride 1, any other
    strides. In float8 they take value / scale, with one float32 scale per KV head, [Hkv] (None: 1). Else values are
    cast. No two tokens may have the same slot.

    Slots < block_tokens (the null block) or past the pool are not written. With ``audit`` such a slot raises
    ``StepError`` instead, and nothing is written. Exceptions are -1, the slot of padding, and slots that can only be
    read by waiting for a device. Shapes that do not fit raise ``StepError`` too.
    """
    _check(k_cache, v_cache, key, value, slot_mapping, k_scale, v_scale)
    if audit and slot_mapping.device.type == "cpu":
        _check_slots(k_cache, slot_mapping)
    if runs_kernel(k_cache.device) and k_cache.dtype is not torch.float8_e5m2:
        from kvtier.attention.kernels.triton_write_kv import launch

        launch(k_cache, v_cache, key, value, slot_mapping, k_scale, v_scale)
        return
    write_kv_torch(k_cache, v_cache, key, value, slot_mapping, k_scale, v_scale)


def write_kv_torch(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """The kernel's twin, on any device. Shapes alone decide its launches, so that a graph can capture it."""
    blocks, block_tokens = k_cache.shape[:2]
    kept = (slot_mapping >= block_tokens) & (slot_mapping < blocks * block_tokens)
    slots = slot_mapping.masked_fill(~kept, 0)
    at = slots // block_tokens, slots % block_tokens
    bits = _BITS[k_cache.dtype.itemsize]
    for cache, new, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
        pool = cache.view(bits)
        rows = quantize(new, scale, cache.dtype).view(bits)
        pool[at] = torch.where(kept[:, None, None], rows, pool[at])  # rows that are not kept put the old content back


def _check(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    tokens = len(slot_mapping)
    tensors = (k_cache, v_cache, key, value, slot_mapping, k_scale, v_scale)
    if len({x.device for x in tensors if x is not None}) > 1:
        raise StepError("pools, keys, values, slots and scales must be on one device")
    for what, cache, new, scale in (("key", k_cache, key, k_scale), ("value", v_cache, value, v_scale)):
        if new.shape != (tokens, *cache.shape[2:]):
            raise StepError(
                f"{what} is {list(new.shape)}, but {tokens} slots and a pool of {list(cache.shape)} take "
                f"{[tokens, *cache.shape[2:]]}"
            )
        if scale is not None and tuple(scale.shape) != (cache.shape[2],):
            raise StepError(f"{what[0]}_scale is {list(scale.shape)}, but there are {cache.shape[2]} KV heads")
        if scale is not None and scale.dtype is not torch.float32:
            raise StepError(f"{what[0]}_scale must be float32, not {scale.dtype}")
        if scale is not None and cache.dtype.itemsize != 1:
            raise StepError(f"{what[0]}_scale is for float8 pools, this one is {cache.dtype}")
        if cache.stride(3) != 1:
            raise StepError(f"the pool of {what}s has stride {cache.stride(3)} in its last dimension, not 1")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise StepError(f"K is {k_cache.dtype} {list(k_cache.shape)}, V {v_cache.dtype} {list(v_cache.shape)}")
    if slot_mapping.dtype is not torch.int64:
        raise StepError(f"slot_mapping must be int64, not {slot_mapping.dtype}")


def _check_slots(k_cache: Tensor, slot_mapping: Tensor) -> None:
    blocks, block_tokens = k_cache.shape[:2]
    bad = (slot_mapping != -1) & ((slot_mapping < block_tokens) | (slot_mapping >= blocks * block_tokens))
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise StepError(
            f"token {row} goes to slot {int(slot_mapping[row])}, which is in no usable block: those of this pool are "
            f"{block_tokens} to {blocks * block_tokens - 1}, and -1 is for padding"
        )
