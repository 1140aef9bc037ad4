"""Writing K and V of new tokens into their slots: the one place where a faster kernel is put in.

Owns       how a slot mapping becomes writes.
Promises   slots get their token's K and V, cast to the pool's dtype, and nothing else changes; a slot below 0 belongs
           to no token and writes nothing.
Does not   read blocks, or know steps.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def write_kv(
    k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, *, padded: bool = False
) -> None:
    """Puts ``key`` [T, Hkv, D] and ``value`` [T, Hkv, Dv] into ``slot_mapping`` [T] (int64, on the caches' device).

    ``k_cache`` and ``v_cache``: a layer's views [blocks, block_tokens, Hkv, D or Dv]. ``padded``: slots may be
    below 0. Shapes decide alone what is launched, so that it can be captured.
    """
    block_tokens = k_cache.shape[1]
    slots = slot_mapping.clamp(min=0) if padded else slot_mapping
    at = slots // block_tokens, slots % block_tokens
    for cache, new in ((k_cache, key), (v_cache, value)):
        new = new.to(cache.dtype)
        if padded:  # a captured index_put_ cannot skip rows: those of no token put back what they find
            new = torch.where((slot_mapping >= 0)[:, None, None], new, cache[at])
        cache.index_put_(at, new)
