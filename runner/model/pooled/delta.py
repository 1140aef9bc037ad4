"""The gated delta rule (Qwen3-Next, Qwen3.5, OLMo-Hybrid) by FlashInfer: states [blocks, HV, V, K] in float32.

A decode reads and writes states by block. A prompt's piece is computed from a copy of its state, in chunks of 64 tokens
whatever the step has beside it, so that a state does not depend on cuts at multiples of 64.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvtier.geometry.kinds import Part
from runner.model.states import Pooled

_DECODE, _PROMPT = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"
_SIZE = 128
"""Of heads of K and V, which the kernels are written for."""


def refuses(parts: tuple[Part, ...]) -> str:
    """Why the kernels cannot take such states; "" if they can."""
    state = next(part for part in parts if part.name.startswith("recurrent"))
    if state.shape[1:] != (_SIZE, _SIZE):
        return f"heads of {state.shape[1]} and {state.shape[2]}, and FlashInfer's delta rule takes {_SIZE} and {_SIZE}"
    if state.dtype != "float32":
        return f"states in {state.dtype}, and FlashInfer's delta rule is used for float32"
    return ""


def functions(own: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """What takes the places of a family's two functions; their arguments and results are transformers'."""
    decode: Any = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    prefill: Any = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule

    def of_decode(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **named: Any) -> Any:
        states = named["initial_state"]
        if not isinstance(states, Pooled):
            return own[_DECODE](query, key, value, g=g, beta=beta, **named)
        # The kernel works decay and beta out from what gives them: -exp(0) softplus(x + 0) is g for this x.
        zeros = torch.zeros(value.shape[2], device=value.device)
        decay = -g.float()
        out, _ = decode(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            state=None,
            A_log=zeros,
            a=decay + torch.log(-torch.expm1(-decay)),
            dt_bias=zeros,
            b=torch.logit(beta.float()),
            use_qk_l2norm=named["use_qk_l2norm_in_kernel"],
            initial_state=states.pool,
            initial_state_indices=states.source,
            output_state_indices=states.target,
            backend="flashinfer",
        )
        return out, states

    def of_prompt(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **named: Any) -> Any:
        state, tokens = named["initial_state"], query.shape[1]
        if len(query) > 1 or not named["output_final_state"]:
            return own[_PROMPT](query, key, value, g=g, beta=beta, **named)
        out, after = prefill(
            query[0].contiguous(),
            key[0].contiguous(),
            value[0].contiguous(),
            g=g[0].float().exp().contiguous(),
            beta=beta[0].float().contiguous(),
            initial_state=None if state is None else state.transpose(-1, -2).contiguous(),
            output_final_state=True,
            cu_seqlens=torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=query.device),
            use_qk_l2norm_in_kernel=named["use_qk_l2norm_in_kernel"],
            use_cp=False,
        )
        return out[None], after.transpose(-1, -2)

    return {_DECODE: of_decode, _PROMPT: of_prompt}
