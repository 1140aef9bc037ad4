"""Mamba2's decodes by FlashInfer: states [blocks, heads, head_dim, state_size], as the family's code has them.

Prompts stay with the family's code: FlashInfer's scan of whole prompts (``ssd_combined``) is for Blackwell.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kvtier.geometry.kinds import Part
from runner.model.states import Pooled

_DECODE = "mamba2_selective_state_update"
_ROWS = 16
"""Rows of a head that the kernel for many requests takes at a time."""


def refuses(parts: tuple[Part, ...]) -> str:
    """Why the kernels cannot take such states; "" if they can."""
    state = next(part for part in parts if part.name.startswith("recurrent"))
    if state.shape[1] % _ROWS:
        return f"heads of {state.shape[1]}, and FlashInfer's selective_state_update takes multiples of {_ROWS}"
    return ""


def functions(own: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """What takes the place of a family's function; its arguments and results are transformers'."""
    update: Any = importlib.import_module("flashinfer.mamba").selective_state_update

    def of_decode(state: Any, hidden: Tensor, *given: Tensor, **named: Any) -> Any:
        if not isinstance(state, Pooled):
            return own[_DECODE](state, hidden, *given, **named)
        if len(state.pool) < len(hidden):  # which the kernel takes for a mistake
            found = state.pool[state.source]
            out = own[_DECODE](found, hidden, *given, **named)
            state.pool[state.target] = found
            return out
        return update(
            state.pool,
            hidden,
            *given,
            dt_bias=named["dt_bias"],
            dt_softplus=named["dt_softplus"],
            state_batch_indices=state.source,
            dst_state_batch_indices=state.target,
        )

    return {_DECODE: of_decode}
