"""FA3, Hopper's own kernels: on which steps they run instead of FA2's, and the trials before they do.

Owns       what each trial has found, and the plans that both kinds of steps need.
Promises   no answer comes from kernels that have not given what FA2 gives. What speaks against them is logged once.
Does not   plan or run wrappers itself, or decide by machine (choice.py).

FA3 reads up to two tiles before a window, and has no switch that fixes the split of keys. For each decode it computes a
tile of 128 queries or more. So it takes eager steps of prompts over full groups. Two trials judge each kernel, on steps
as they come: one with full tiles, one without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kvtier.attention._flashinfer_batch import Batch, PagedBatch
from kvtier.attention._flashinfer_plan import Lane, PlanKey, Wrappers
from kvtier.machine.errors import AttentionUnavailable, MemoryUnavailable

_log = logging.getLogger("kvtier.attention")

HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
"""Head sizes of K and V for which there are kernels that read pages."""
Given = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What a wrapper is run with: queries [T, Hq, D], K and V of a layer's views, sinks [Hq]."""
Lanes = Callable[[Batch, PlanKey, int], Lane]
"""The wrapper that is planned for a batch, a key, and the pool's number of blocks."""
_TOLERANCE = 1e-2
"""The most that the RMS of a difference between FA3's output and FA2's may be, relative."""


class Prompts:
    """FA3 for steps of prompts. ``wrappers`` and ``lanes``: the backend's."""

    def __init__(self, wrappers: Wrappers, lanes: Lanes) -> None:
        self._wrappers, self._lane = wrappers, lanes
        self._trials: dict[PlanKey, dict[bool, str]] = {}
        """What speaks against a kernel, by trials on steps of prompts (True) and on others; "": nothing."""
        self.expected: set[PlanKey] = set()
        """Keys that steps of prompts and others have or will have, as far as was seen since the last ``clear``."""

    def key(self, batch: Batch, key: PlanKey, given: Given, out: Tensor) -> PlanKey:
        """``key``, or FA3's for the same work, if the step is one of prompts and FA3 stands its trials.

        A trial overwrites ``out`` [T, Hq, Dv] and waits for the device.
        """
        sizes = key.head_dim, key.head_dim_v
        if not isinstance(batch, PagedBatch) or key.q_dtype is not key.kv_dtype or sizes not in HEAD_DIMS:
            return key
        fast = key._replace(kernels="fa3")
        kernel = fast._replace(group="", num_qo_heads=0, num_kv_heads=0, softcap=key.softcap and 1.0, scale=1.0)
        prompts = batch.fills(_tile(key.head_dim_v))
        trials = self._trials.setdefault(kernel, {})
        if prompts not in trials and not any(trials.values()):
            self.expected |= {key, fast}
            trials[prompts] = self._differs(batch, key, fast, given, out)
        if any(trials.values()):
            if fast in self.expected:  # of this group, or of another one with the same kernel
                self.expected.remove(fast)
                self._wrappers.drop(fast)
            return key
        self.expected |= {key, fast}
        return fast if prompts else key

    def _differs(self, batch: PagedBatch, key: PlanKey, fast: PlanKey, given: Given, out: Tensor) -> str:
        """What speaks against FA3 on this step; "": nothing. Waits for the device."""
        blocks = given[1].shape[0]
        self._lane(batch, key, blocks).run(batch, *given, out)
        try:
            fast_out = torch.empty_like(out)
            self._lane(batch, fast, blocks).run(batch, *given, fast_out)
            fast_out -= out  # in place: a long prompt leaves little room
            found = float(_norm(fast_out) / _norm(out).clamp_min(1e-12))
            why = "" if found <= _TOLERANCE else f"differs by {found:.2g}"
        except AttentionUnavailable as problem:
            why = f"does not run: {problem}"
        except (MemoryUnavailable, torch.OutOfMemoryError) as problem:
            why = f"has no memory for its trial: {problem}"
        if why:
            _log.warning("prompts stay with FlashInfer's FA2 kernels: FA3 %s", why)
        return why


def _norm(x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return found


def _tile(head_dim_v: int) -> int:
    """Queries of one head that a thread block of FA3 computes at once."""
    return 192 if head_dim_v == 64 else 128
