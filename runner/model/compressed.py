"""Layers that look beyond their window through compressed entries (DeepSeek-V4), with all they keep in the pools.

Owns       what an attention layer with a ``compressor`` gets for a cache in our forward: for each request of a step an
           object that answers from the pools as transformers' own cache layers do, and writes what is new to them.
Promises   the family's own code compresses, scores and picks. Each request is one call, so that no result depends on
           its neighbours in the step. A row, an entry and an index key is written once. A family that asks its cache
           for something else fails the trial at load, and is refused.
Does not   change the family's own forward: without a step, a layer is as it was. It is torch on any device, request by
           request: a reference, not a fast path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvtier.geometry.spec import CacheSpec, GroupSpec

_ATTRIBUTE = "_kvtier_compressed"
_NAMES = {"compressor": "entries", "indexer": "index"}
"""The family's names of what it compresses, and the roles of their places."""


@dataclass(frozen=True)
class PlacesOfStep:
    """Where one group's entries lie in a step: what is there by block table, what is new by slot.

    ``table``: int64 [R, W]. ``slots``: int64 [N], those of the step's new entries; request r's are ``new[r]`` to
    ``new[r + 1]``. ``block_entries``: entries of a block.
    """

    table: Tensor
    slots: Tensor
    new: list[int]
    block_entries: int

    @classmethod
    def from_step(cls, step: Any, group: GroupSpec, device: torch.device) -> PlacesOfStep:
        """``group``'s part of a scheduled step."""
        view, starts = step.group(group.name), torch.from_numpy(step.query_start.astype("int64"))
        table = torch.from_numpy(view.block_table.astype("int64")).to(device)
        if group.entry_tokens == 1:
            slots, new = view.slot_mapping, starts
        else:
            made = view.entries()
            slots, new = made.slot, torch.searchsorted(torch.from_numpy(made.token), starts)
        return cls(table, torch.from_numpy(slots.copy()).to(device), new.tolist(), group.block_entries)

    def read(self, pool: Tensor, r: int, first: int, end: int) -> Tensor:
        """Entries [first, end) of request r, [1, end - first, D], from a pool [blocks, block_entries, 1, D]."""
        at = torch.arange(first, end, device=pool.device)
        return pool[self.table[r, at // self.block_entries], at % self.block_entries, 0][None]

    def write(self, pool: Tensor, r: int, rows: Tensor) -> None:
        """The new entries of request r, [1, n, D], go to the pool."""
        slots = self.slots[self.new[r] : self.new[r + 1]]
        pool[slots // self.block_entries, slots % self.block_entries, 0] = rows[0].to(pool.dtype)


class Compressed:
    """The attention layers of a loaded model that have compressed entries, or lie beside such layers."""

    @classmethod
    def of(cls, model: torch.nn.Module, spec: CacheSpec) -> Compressed:
        """Those of ``model``, which has one set of them, however often it is asked for; none for other models."""
        found: Compressed | None = vars(model).get(_ATTRIBUTE)
        if found is None:
            found = cls(model if any(spec.places("entries")) else torch.nn.Module())
            object.__setattr__(model, _ATTRIBUTE, found)
        return found

    def __init__(self, model: torch.nn.Module) -> None:
        self.step: Any = None
        """The StepContext of the forward under way; None: the family's own forward."""
        self.layers: set[int] = set()
        """Indices of these layers."""
        module: Any
        for module in model.modules():
            if hasattr(module, "compressor") and hasattr(module, "layer_idx"):
                self.layers.add(int(module.layer_idx))
                module.forward = _Layer(self, module)


class _Layer:
    """An attention layer's forward."""

    def __init__(self, of: Compressed, module: Any) -> None:
        self._of, self._module = of, module
        self._inner = type(module).forward.__get__(module)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = self._of.step
        if context is None:
            return self._inner(hidden_states, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in ("cache", "kvtier", "attention_mask")}
        positions, turns = given.pop("position_ids"), given.pop("position_embeddings")
        outs = []
        for request in _requests(context, self._module):
            at = slice(request.first, request.end)
            request.cut = {kind: tuple(x[:, at] for x in pair) for kind, pair in turns.items()}
            out, _ = self._inner(
                hidden_states[:, at],
                position_embeddings=request.cut,
                position_ids=positions[:, at],
                attention_mask=request.mask(hidden_states),
                cache=request,
                kvtier=request,
                **given,
            )
            outs.append(out)
        context.served.append(int(self._module.layer_idx))
        return torch.cat(outs, 1), None


def _requests(context: Any, module: Any) -> Iterator[OneRequest]:
    for r, (first, end) in enumerate(pairwise(context.starts)):
        yield OneRequest(context, module, r, first, end)


class OneRequest:
    """What one layer's code asks of its cache, for one request of a step: tokens [first, end) of the step's."""

    def __init__(self, context: Any, module: Any, r: int, first: int, end: int) -> None:
        self._module, self._r = module, r
        self.first, self.end = first, end
        self._start = context.before[r]
        """Tokens of the text before the step."""
        self._layer = int(module.layer_idx)
        self._roles = {}
        for role, (name, index) in context.spec.layers[self._layer].items():
            self._roles[role] = context.batches[name], context.cache.kv(name, index), context.spec.group(name)
        self.cut: dict[str, Any] = {}

    # --- what transformers' attention asks ------------------------------------------------------------

    @property
    def layers(self) -> dict[int, OneRequest]:
        """The cache's layers, of which this is one."""
        return {self._layer: self}

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The window's keys, [1, 1, n, D] of them new, with those before them; they are the values, too."""
        places, (pool, _), group = self._roles["kv"]
        before = places.read(pool, self._r, group.attention.first_visible(self._start), self._start)
        places.write(pool, self._r, key[:, 0])
        seen = torch.cat([before.to(key.dtype)[:, None], key], 2)
        return seen, seen

    def mask(self, hidden: Tensor) -> Tensor:
        """Which of the window's keys the new tokens see: [1, 1, n, keys], 0 or -inf."""
        see = self._roles["kv"][2].attention
        queries = torch.arange(self._start, self._start + self.end - self.first, device=hidden.device)[:, None]
        keys = torch.arange(see.first_visible(self._start), int(queries[-1]) + 1, device=hidden.device)
        seen = (keys <= queries) & (keys > queries - see.span_tokens)
        return torch.zeros_like(seen, dtype=hidden.dtype).masked_fill(~seen, -torch.inf)[None, None]

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """The rows of all entries that are complete now, [1, n, D] each, and the first token of the first of them.

        The new rows are kept: until their entry is complete, and while it overlaps with the next one.
        """
        whole = self._roles["entries"][2].entry_tokens
        first = self._start // whole * whole
        places, pools, _ = self._roles["rows"]
        rows = []
        for pool, new in zip(pools, (kv, gate), strict=True):
            own = self._own(pool, name, new.shape[-1])
            rows.append(torch.cat([places.read(own, self._r, first, self._start).to(new.dtype), new], 1))
            places.write(own, self._r, new)
        end = rows[0].shape[1] // whole * whole
        return rows[0][:, :end], rows[1][:, :end], first

    def _own(self, pool: Tensor, name: str, size: int) -> Tensor:
        """The part of rows [blocks, tokens, 1, D] that is for ``name``: the compressor's first, then the indexer's."""
        return pool[..., :size] if name == "compressor" else pool[..., -size:]

    def update_overlap_state(
        self, name: str, kv: Tensor, gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of the entry before the first complete one its rows' part in that one, [1, m, D]; None at the beginning."""
        whole = kv.shape[2]
        first = self._start // whole * whole
        if first == 0:
            return None, None
        places, pools, _ = self._roles["rows"]
        rows, gates = (
            places.read(self._own(pool, name, kv.shape[3]), self._r, first - whole, first)[..., :head_dim]
            for pool in pools
        )
        owner = self._module.compressor if name == "compressor" else self._module.compressor.indexer
        return rows, gates + owner.position_bias[:, :head_dim]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """All entries of the text, [1, n, D]; ``compressed`` [1, new, D] are the new ones."""
        places, (pool, _), group = self._roles[_NAMES[name]]
        before = places.read(pool, self._r, 0, self._start // group.entry_tokens)
        places.write(pool, self._r, compressed)
        return torch.cat([before.to(compressed.dtype), compressed], 1)

    # --- what our attention function is called with ----------------------------------------------------

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> Any:
        """The family's own plain attention, [1, n, Hq, D]."""
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, **more)
