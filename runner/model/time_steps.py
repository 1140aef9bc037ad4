"""Mamba2's time steps in decodes, within the limits that its prompts keep.

transformers' code limits the time step of a prompt's tokens (``time_step_limit``; Nemotron-H: 0.001 at least), and not
that of a decode. So its own decodes differ from its own prompts by 3e-3. Here a token has one result, that of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kvtier.machine.errors import UnsupportedModel

_NO_LIMIT = 0.0, math.inf


def limit_decodes(module: Any, is_ours: Callable[[], bool]) -> None:
    """Limits what a Mamba2 mixer's projection gives for time steps of single tokens; nothing for other mixers.

    ``is_ours``: whether the forward under way is a step of ours; the family's own is left as it is. Raises
    ``UnsupportedModel`` for a mixer with limits whose time steps are not the last columns of ``in_proj``.
    """
    limits = getattr(module, "time_step_limit", None)
    if limits is None or tuple(limits) == _NO_LIMIT:
        return
    projection, bias = getattr(module, "in_proj", None), getattr(module, "dt_bias", None)
    if not isinstance(projection, nn.Linear) or bias is None or hasattr(module, "mup_vector"):
        raise UnsupportedModel(
            f"layer {module.layer_idx} ({type(module).__name__}): its code limits the time steps of prompts to "
            f"{list(limits)} and those of decodes to nothing, so a token would depend on how it was computed"
        )
    low, high = (_before_softplus(limit) for limit in limits)

    def limited(_: Any, args: Any, projected: Tensor) -> Tensor:
        """[B, n, columns], of which the last ones are time steps before bias and softplus."""
        if is_ours() and projected.shape[1] == 1:
            steps = projected[..., -len(bias) :]
            steps.copy_((steps.float() + bias.float()).clamp(low, high) - bias.float())
        return projected

    projection.register_forward_hook(limited)


def _before_softplus(limit: float) -> float:
    """x with softplus(x) = limit."""
    if limit <= 0:
        return -math.inf
    return limit if limit > 30 else math.log(math.expm1(limit))
