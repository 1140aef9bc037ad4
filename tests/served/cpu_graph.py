"""A CUDA graph on a CPU: kernels recorded once with the addresses of what they read and write, and replayed.

Every torch operation of a forward is recorded with its tensors; a replay runs the operations again, in order, on those
tensors, and no Python of the model. What a graph cannot do is refused as CUDA does: reading a value on the host
(``.item()``, ``nonzero``, a comparison in an ``if``). FlashInfer's stand-in kernels are recorded as one operation each;
planning while a graph is captured is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attention.flashinfer_standin import Gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
NOT_CAPTURABLE = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.masked_select.default,
}


class _Recorder(TorchDispatchMode):
    """Runs operations and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NOT_CAPTURABLE:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        results = func(*args, **kwargs)
        kept = [x for x in tree_leaves(results) if isinstance(x, Tensor)]

        def again() -> None:
            new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, fresh in zip(kept, new, strict=True):
                if old.data_ptr() != fresh.data_ptr():  # neither a view nor in place
                    old.copy_(fresh)

        self.work.append(again)
        return results


class CpuGraphs:
    """Captures forwards; what ``DecodeGraphs`` takes as its ``capture``."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __call__(self, forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        forward()
        recorder = _Recorder()
        self._gpu.recorded = recorder.work
        try:
            with recorder:
                logits = forward()
        finally:
            self._gpu.recorded = None

        def replay() -> None:
            for work in recorder.work:
                work()

        return replay, logits
