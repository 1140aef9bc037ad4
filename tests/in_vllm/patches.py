"""What vLLM 0.32 lacks on CPUs, in this process alone: Mamba2's states inside a prompt's chunk.

With prefix caching Mamba2 asks its kernel for the states at the ends of its own chunks, and stores one of them. The
kernel for CPUs returns none, and what stores them is written for GPUs: vLLM dies in its first prompt. Other layers, and
all of kvtier, are as they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def give_mamba2_its_states() -> None:
    """Once in a process, before the engine is made."""
    import torch
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm

    whole = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu
    if whole.__module__ == __name__:
        return

    def scan(
        x: Any,
        dt: Any,
        a: Any,
        b: Any,
        c: Any,
        chunk_size: int,
        out: Any,
        return_intermediate_states: bool = False,
        initial_states: Any = None,
        cu_seqlens: Any = None,
        cu_chunk_seqlens: Any = None,
        last_chunk_indices: Any = None,
        **more: Any,
    ) -> Any:
        """Chunk by chunk, if the states at their ends are asked for."""
        if not return_intermediate_states:
            return whole(x, dt, a, b, c, chunk_size, out, initial_states=initial_states, cu_seqlens=cu_seqlens, **more)
        ends, starts, states, sequence, state = cu_chunk_seqlens.tolist(), cu_seqlens.tolist(), [], 0, None
        for first, end in pairwise(ends):
            while sequence + 1 < len(starts) - 1 and first >= starts[sequence + 1]:
                sequence += 1
            if first == starts[sequence]:
                state = None if initial_states is None else initial_states[sequence : sequence + 1]
            cut = slice(first, end)
            of = torch.tensor([0, end - first], dtype=torch.int32)
            given = x[cut], dt[cut], a, b[cut], c[cut], chunk_size, out[cut]
            state = whole(*given, initial_states=state, cu_seqlens=of, **more)
            states.append(state)
        return torch.cat(states)

    mamba_mixer2.store_prefill_checkpoint = _store
    mamba_ssm._mamba_chunk_scan_combined_fwd_cpu = scan
    if hasattr(ssd_combined, "_mamba_chunk_scan_combined_fwd"):
        ssd_combined._mamba_chunk_scan_combined_fwd = scan


def _store(
    checkpoints: Any,
    chunk_of: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    starts: Any,
    *,
    state_len: int,
) -> None:
    """What vLLM's kernel for GPUs stores: the state at the end of a chunk, and the inputs before it."""
    for row in range(chunk_of.numel()):
        offset = int(checkpoints.checkpoint_offsets[row])
        if offset > 0:
            block, end = int(checkpoints.state_indices[row]), int(starts[row]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[int(chunk_of[row])]


def do_without_torchvision() -> None:
    """Qwen3.5's module has its images' too, and these import torchvision, which text does not need."""
    import sys
    from types import ModuleType

    from vllm import ModelRegistry

    def anything(what: str) -> type:
        if what.startswith("__"):
            raise AttributeError(what)
        return type(what, (), {})

    parts = ["torchvision", "transforms", "v2", "functional"]
    names = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        module.__getattr__ = anything  # type: ignore[method-assign]
        if "." in name:
            setattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    if "torchvision" in sys.modules:
        return
    sys.modules.update(modules)
    try:
        from vllm.model_executor.models import qwen3_5
    finally:
        for name in names:
            del sys.modules[name]
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        if hasattr(qwen3_5, name):
            ModelRegistry.register_model(name, getattr(qwen3_5, name))
