"""Layers that read compressed entries (DeepSeek-V4) or pick tokens by an index (V3.2), with all they keep in the pools.

Owns       what an attention layer with a ``compressor`` or an ``indexer`` gets for a cache in our forward: for each
           request of a step an object that answers from the pools as transformers' own cache layers do, and writes what
           is new to them.
Promises   the family's own code compresses, scores and picks. Each request is one call, so that no result depends on
           its neighbours in the step. A row, an entry and an index key is written once. A family that asks its cache
           for something else fails the trial at load, and is refused. Latents that an index picks are attended to
           where they lie, if the backend can (``attend_picked``).
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
from kvtier.machine.errors import AttentionUnavailable

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

    def slots_of(self, r: int, entries: Tensor) -> Tensor:
        """The slots of entries [n, k] of request r, int64."""
        block = self.block_entries
        return self.table[r, entries // block] * block + entries % block

    def write(self, pool: Tensor, r: int, rows: Tensor) -> None:
        """The new entries of request r, [1, n, D], go to the pool."""
        slots = self.slots[self.new[r] : self.new[r + 1]]
        pool[slots // self.block_entries, slots % self.block_entries, 0] = rows[0].to(pool.dtype)


def has_own(module: torch.nn.Module) -> bool:
    """Whether this is an attention layer that keeps more than keys and values, or one beside such layers."""
    return hasattr(module, "layer_idx") and (hasattr(module, "compressor") or hasattr(module, "indexer"))


class Compressed:
    """The attention layers of a loaded model that ``has_own``, and what they keep."""

    @classmethod
    def of(cls, model: torch.nn.Module, spec: CacheSpec) -> Compressed:
        """Those of ``model``, which has one set of them, however often it is asked for; none for other models."""
        found: Compressed | None = vars(model).get(_ATTRIBUTE)
        if found is None:
            found = cls(model if any((*spec.places("entries"), *spec.places("index"))) else torch.nn.Module())
            object.__setattr__(model, _ATTRIBUTE, found)
        return found

    def __init__(self, model: torch.nn.Module) -> None:
        self.step: Any = None
        """The StepContext of the forward under way; None: the family's own forward."""
        self.layers: set[int] = set()
        """Indices of these layers."""
        module: Any
        for module in model.modules():
            if has_own(module):
                self.layers.add(int(module.layer_idx))
                module.forward = _Layer(self, module)

    def groups(self, spec: CacheSpec) -> set[str]:
        """Names of the groups with places of these layers."""
        return {name for i in self.layers for name, _ in spec.layers[i].values()}


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
        positions, turns, picked = (given.pop(name, None) for name in ("position_ids", "position_embeddings", _PICKED))
        made = []
        for request in _requests(context, self._module):
            at = slice(request.first, request.end)
            made.append(
                self._inner(
                    hidden_states[:, at],
                    position_embeddings=_cut(turns, at),
                    position_ids=positions[:, at],
                    attention_mask=request.mask(hidden_states),
                    cache=request,
                    kvtier=request,
                    **({} if picked is None else {_PICKED: picked[request.row]}),
                    **given,
                )
            )
        context.served.append(int(self._module.layer_idx))
        outs, _, *more = zip(*made, strict=True)
        return torch.cat(outs, 1), None, *more  # what a layer has picked goes on to the next one request by request


_PICKED = "prev_topk_indices"
"""The family's argument for the picks of another layer, which shares its index."""


def _cut(turns: Any, at: slice) -> Any:
    """cos and sin [1, T, n] of these tokens, which some families have by name."""
    if isinstance(turns, dict):
        return {name: _cut(pair, at) for name, pair in turns.items()}
    return tuple(x[:, at] for x in turns)


def _requests(context: Any, module: Any) -> Iterator[OneRequest]:
    for r, (first, end) in enumerate(pairwise(context.starts)):
        yield OneRequest(context, module, r, first, end)


class OneRequest:
    """What one layer's code asks of its cache, for one request of a step: tokens [first, end) of the step's."""

    def __init__(self, context: Any, module: Any, r: int, first: int, end: int) -> None:
        self._module, self.row = module, r
        self.first, self.end = first, end
        self._start = context.before[r]
        """Tokens of the text before the step."""
        self._layer = int(module.layer_idx)
        self._roles = {}
        self._backend, self._absorbed = context.backend, context.latents.get(self._layer)
        for role, (name, index) in context.spec.layers[self._layer].items():
            self._roles[role] = context.batches[name], context.cache.kv(name, index), context.spec.group(name)

    # --- what transformers' attention asks ------------------------------------------------------------

    @property
    def layers(self) -> dict[int, OneRequest]:
        """The cache's layers, of which this is one."""
        return {self._layer: self}

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the new tokens see of K and V, [1, 1, n, D] of it new; what keeps K alone has it for V, too.

        Of latents that a backend picks from the pools, the new ones alone.
        """
        places, pools, group = self._roles["kv"]
        if self._absorbed is not None:
            for pool, new in zip(pools, (key, value), strict=True):
                places.write(pool, self.row, new[:, 0])
            return key, value
        first, seen = group.attention.first_visible(self._start), []
        for pool, new in zip(pools, (key, value), strict=True):
            if pool.shape[-1]:
                before = places.read(pool, self.row, first, self._start).to(new.dtype)
                places.write(pool, self.row, new[:, 0])
                seen.append(torch.cat([before[:, None], new], 2))
        return seen[0], seen[-1]

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        """All index keys of the text, [1, n, D]; ``keys`` [1, new, D] are the new ones."""
        places, (pool, _), _ = self._roles["index"]
        before = places.read(pool, self.row, 0, self._start).to(keys.dtype)
        places.write(pool, self.row, keys)
        return torch.cat([before, keys], 1)

    def mask(self, hidden: Tensor) -> Tensor:
        """Which keys of ``update`` the new tokens see, before an index picks some: [1, 1, n, keys], 0 or -inf."""
        see = self._roles["kv"][2].attention
        queries = torch.arange(self._start, self._start + self.end - self.first, device=hidden.device)[:, None]
        keys = torch.arange(see.first_visible(self._start), int(queries[-1]) + 1, device=hidden.device)
        seen = keys <= queries
        if see.span_tokens:
            seen &= keys > queries - see.span_tokens
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
            rows.append(torch.cat([places.read(own, self.row, first, self._start).to(new.dtype), new], 1))
            places.write(own, self.row, new)
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
            places.read(self._own(pool, name, kv.shape[3]), self.row, first - whole, first)[..., :head_dim]
            for pool in pools
        )
        owner = self._module.compressor if name == "compressor" else self._module.compressor.indexer
        return rows, gates + owner.position_bias[:, :head_dim]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """All entries of the text, [1, n, D]; ``compressed`` [1, new, D] are the new ones."""
        places, (pool, _), group = self._roles[_NAMES[name]]
        before = places.read(pool, self.row, 0, self._start // group.entry_tokens)
        places.write(pool, self.row, compressed)
        return torch.cat([before.to(compressed.dtype), compressed], 1)

    # --- what our attention function is called with ----------------------------------------------------

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        """The family's own plain attention, [1, n, Hq, D]. ``indices`` [1, n, k]: the keys that an index has picked."""
        picked = more.pop("indices", None)
        if self._absorbed is not None:
            return self._attend_picked(query, picked, more["scaling"], more.get("s_aux"))
        if picked is not None:
            others = torch.ones(mask.shape, dtype=torch.bool, device=mask.device).scatter(-1, picked[:, None].long(), 0)
            mask = mask.masked_fill(others, -torch.inf)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, **more)

    def _attend_picked(self, query: Tensor, picked: Tensor, scale: float, sinks: Tensor | None) -> Any:
        """The same by a backend that reads what is picked where it lies."""
        places, pools, group = self._roles["kv"]
        assert self._absorbed is not None
        if sinks is not None:
            raise AttentionUnavailable(f"group {group.name!r}: no kernel attends to picked latents with sinks")
        end = self._start + self.end - self.first
        picks = picked[0].long().sort(-1).values  # where fewer tokens are seen than picked, later ones are behind them
        slots = places.slots_of(self.row, picks)
        rows = self._absorbed.query(query[0].transpose(0, 1))
        lengths = [min(n, picked.shape[2]) for n in range(self._start + 1, end + 1)]
        mixed = self._backend.attend_picked(rows, *pools, slots, lengths, group, scale=scale)
        return self._absorbed.output(mixed)[None], None
