"""Steps of a real scheduler on real pools, in which every slot that no query may see is NaN.

K and V of a token are a function of all tokens up to it, so that shared blocks hold what every reader expects. Before
each step the pools are filled with NaN, null block and stale tails included, and only what some query of the step sees
of the past is put back, through the block tables. The step's own tokens are left to the backend's ``write_kv``.

A group in float8 computes in ``half``; what it holds of the past went through the group's scales.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier import KVCache, Request, Scheduler, Step
from kvtier.attention import reference
from kvtier.attention.fp8 import layer_scales
from kvtier.geometry.spec import GroupSpec

HEADS = 4


@dataclass
class Served:
    """Requests under way, and what each of their tokens has in every layer."""

    cache: KVCache
    scheduler: Scheduler
    seed: int = 0
    half: torch.dtype = torch.float16
    texts: dict[str, list[int]] = field(default_factory=dict)
    _chains: dict[str, list[int]] = field(default_factory=dict)

    def add(self, request_id: str, prompt: list[int], new_tokens: int) -> None:
        self.scheduler.add(Request(request_id, prompt, new_tokens))
        self.texts[request_id], self._chains[request_id] = list(prompt), []

    def steps(self) -> Iterator[Step]:
        """Every step with tokens, its pools laid out; committed with made-up tokens when the caller comes back."""
        rng = np.random.default_rng(self.seed)
        while self.scheduler.has_work():
            step = self.scheduler.schedule()
            if step.num_tokens:
                self._lay_out(step)
                yield step
            ids = rng.integers(3, 100, len(step.sample_rows))
            for r, token in zip(step.sample_rows, ids, strict=True):
                self.texts[step.request_ids[r]].append(int(token))
            self.scheduler.commit(step, ids)

    def new_kv(self, step: Step, group: GroupSpec, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [T, Hkv, D] of the step's tokens."""
        spans = [
            self._kv(group, layer, step.request_ids[r], int(step.starts[r]), int(step.seq_lens[r]))
            for r in range(len(step.request_ids))
        ]
        k, v = (torch.cat(x).to(self.cache.device) for x in zip(*spans, strict=True))
        return k, v

    def assert_written(self, step: Step, group: GroupSpec, layer: int) -> None:
        """The step's tokens are in their slots, bit by bit."""
        slots = torch.from_numpy(step.group(group.name).slot_mapping.copy())
        scales = layer_scales(group, layer, "cpu") or (None, None)
        kv = zip(self.cache.kv(group.name, layer), self.new_kv(step, group, layer), scales, strict=True)
        for pool, new, scale in kv:
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.dtype.itemsize]
            found = pool.view(bits)[slots // group.block_tokens, slots % group.block_tokens]
            assert torch.equal(found.cpu(), _stored(new.cpu(), scale, pool.dtype).view(bits))

    def query(self, step: Step, group: GroupSpec, layer: int) -> Tensor:
        """[T, Hq, D]: large enough that a wrong key moves the output."""
        rng = np.random.default_rng([step.num_tokens, layer, int(step.seq_lens.sum())])
        query = rng.standard_normal((step.num_tokens, HEADS, group.head_dim)) * 2.0
        return torch.from_numpy(query).to(self.cache.device, self.computes_in(group))

    def computes_in(self, group: GroupSpec) -> torch.dtype:
        """Of queries, and of K and V before they are written."""
        stored: torch.dtype = getattr(torch, group.dtype)
        return self.half if stored.itemsize == 1 else stored

    def _lay_out(self, step: Step) -> None:
        for group in self.cache.spec.groups:
            table, bt = step.group(group.name).block_table, group.block_tokens
            for layer in range(group.num_layers):
                views = self.cache.kv(group.name, layer)
                scales = layer_scales(group, layer, "cpu") or (None, None)
                for view in views:
                    view.copy_(torch.full(view.shape, math.nan).to(view.dtype))
                for r, request_id in enumerate(step.request_ids):
                    start = int(step.starts[r])
                    first = group.attention.first_visible(start)
                    past = np.arange(first, start)
                    at = torch.from_numpy(table[r, past // bt].astype(np.int64)), torch.from_numpy(past % bt)
                    past_kv = self._kv(group, layer, request_id, first, start)
                    for view, rows, scale in zip(views, past_kv, scales, strict=True):
                        bits = torch.uint8 if view.dtype.itemsize == 1 else view.dtype
                        view.view(bits)[at] = _stored(rows, scale, view.dtype).view(bits).to(view.device)

    def _kv(self, group: GroupSpec, layer: int, request_id: str, start: int, end: int) -> tuple[Tensor, Tensor]:
        text, chain = self.texts[request_id], self._chains[request_id]
        while len(chain) < end:
            chain.append(zlib.crc32(text[len(chain)].to_bytes(4, "little"), chain[-1] if chain else 0))
        salt = zlib.crc32(group.name.encode(), layer)
        sizes = group.num_kv_heads * sum(group.head_dims)
        rows = np.array([_content(c, salt, sizes) for c in chain[start:end]])
        both = torch.from_numpy(rows.reshape(end - start, group.num_kv_heads, sum(group.head_dims)))
        k, v = both.to(self.computes_in(group)).split(group.head_dims, -1)
        return k, v


def _stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[n, Hkv, D] as a pool of ``dtype`` holds it; none of it is too large for e4m3."""
    return (x if scale is None else x.float() / scale[:, None]).to(dtype)


@lru_cache(maxsize=100_000)
def _content(chain: int, salt: int, size: int) -> Any:
    """What a token has in one layer, K before V of each head."""
    return np.random.default_rng([chain, salt]).standard_normal(size)


def expected(served: Served, step: Step, group: GroupSpec, layer: int, **how: Any) -> Tensor:
    """The reference backend's attention of the same step; its K and V must have been written."""
    k, v = served.cache.kv(group.name, layer)
    batch = reference.PagedBatch.from_step(step, group, served.cache.device)
    return reference.attend(served.query(step, group, layer), k, v, batch, **how)


def assert_close(got: Tensor, want: Tensor, absolute: float = 1e-4) -> None:
    """Equal but for ``absolute`` and twice the rounding of the output's dtype."""
    assert got.dtype == want.dtype and got.shape == want.shape
    error = (got.double() - want.double()).abs()
    limit = absolute + 2 * torch.finfo(got.dtype).eps * want.double().abs()
    assert bool((error <= limit).all()), f"worst {error.max():.3g}"
