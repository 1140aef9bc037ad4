"""Latent attention (MLA): a layer's latents in the pools, in the place of keys and values per head.

Owns       what an MLA layer's ``expand_kv`` does in our forward: nothing, so that attention gets the latents.
Promises   queries and values go through the layer's own weights ("absorbed"). A query meets the latents of all tokens
           as they lie in the pools, and only its result is expanded. The weights are asked of ``expand_kv`` itself, so
           no family has code here. One that is not linear, or not ordered as assumed, is refused by name.
Does not   change the family's own forward: with another attention implementation, ``expand_kv`` is the family's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtier.machine.errors import UnsupportedModel
from runner.model.compressed import has_own

_EXPAND = "expand_kv"


@dataclass(frozen=True, eq=False)
class Absorbed:
    """A layer's expansion of latents of size r and rotated keys of size p, in the weights' dtype.

    ``keys`` [Hq, N, r] and ``values`` [Hq, r, Dv]; ``plain`` and ``rotated``: which of a query's elements meet the
    expanded latent, N of them, and the rotated key. They are copies: of a layer's ``kv_b_proj``, as many bytes again.
    ``times``: [Hq, T, K] times [Hq, K, n].
    """

    keys: Tensor
    values: Tensor
    plain: slice
    rotated: slice
    times: Callable[[Tensor, Tensor], Tensor] = torch.bmm

    def query(self, query: Tensor) -> Tensor:
        """What meets the pools' rows: [T, Hq, r + p] of a query [T, Hq, D]."""
        latent = self.times(query[..., self.plain].transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat([latent, query[..., self.rotated]], -1)

    def output(self, mixed: Tensor) -> Tensor:
        """Values [T, Hq, Dv] of a mixture of latents [T, Hq, r]."""
        return self.times(mixed.transpose(0, 1), self.values).transpose(0, 1)


@torch.no_grad()
def take_latents(model: torch.nn.Module, name: str, indexed: bool = False) -> dict[int, Absorbed]:
    """The expansion of each MLA layer, by layer index, whose ``expand_kv`` is ours from now on; none for other models.

    ``name``: the attention implementation in which it hands on what it gets; in others it is the family's.
    ``indexed``: also of layers that pick tokens by an index, which else expand what they read. Raises
    ``UnsupportedModel``.
    """
    found: dict[int, Absorbed] = {}
    module: Any
    for module in model.modules():
        own = getattr(type(module), _EXPAND, None)
        if own is not None and hasattr(module, "layer_idx") and (indexed or not has_own(module)):
            module.expand_kv = partial(_expand, module, own, name)
            found[int(module.layer_idx)] = _absorbed(module, own)
    return found


def give_back(model: torch.nn.Module, latents: dict[int, Absorbed]) -> dict[int, Absorbed]:
    """Layers that pick tokens by an index expand them again; returns the others' expansions."""
    kept = dict(latents)
    module: Any
    for module in model.modules():
        if has_own(module) and kept.pop(int(module.layer_idx), None) is not None:
            del module.expand_kv
    return kept


def _expand(module: Any, own: Callable[..., Any], name: str, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [1, 1, T, r] and rotated keys [1, 1, T, p] as they are, for our attention function."""
    if module.config._attn_implementation == name:
        return latent, rotated
    expanded: tuple[Tensor, Tensor] = own(module, latent, rotated)
    return expanded


def _absorbed(module: Any, own: Callable[..., Any]) -> Absorbed:
    rank, size = int(module.kv_lora_rank), int(module.qk_rope_head_dim)
    weight = next(weight for weight in module.parameters() if weight.dim() > 1)  # sinks may have a dtype of their own

    def probe(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """K [Hq, n, D] and V [Hq, n, Dv] of n rows [n, r] and [n, p]."""
        k, v = own(module, latent[None, None], rotated[None, None])
        return k[0], v[0]

    zero = weight.new_zeros(1, rank), weight.new_zeros(1, size)
    eye = torch.eye(rank, dtype=weight.dtype, device=weight.device)
    turn = torch.eye(size, dtype=weight.dtype, device=weight.device)
    if any(bool(x.any()) for x in probe(*zero)):
        _refuse(module, "its expand_kv adds something to what it expands")
    keys, values = probe(eye, zero[1].expand(rank, -1))
    turned, moved = probe(zero[0].expand(size, -1), turn)
    if bool(moved.any()):
        _refuse(module, "its values depend on the rotated keys")
    at = int(turned[0].any(0).nonzero()[0]) if bool(turned.any()) else 0
    rotated = slice(at, at + size)
    plain = slice(0, at) if at else slice(size, keys.shape[2])
    other = torch.zeros_like(turned)
    other[..., rotated] = turn
    if not torch.equal(turned, other) or bool(keys[..., rotated].any()) or at not in (0, keys.shape[2] - size):
        _refuse(module, "its keys are not the expanded latent beside the rotated key")
    return Absorbed(keys[..., plain].transpose(1, 2).contiguous(), values.contiguous(), plain, rotated)


def _refuse(module: Any, reason: str) -> None:
    raise UnsupportedModel(f"layer {module.layer_idx} ({type(module).__name__}): {reason}; kvtier cannot keep latents")
