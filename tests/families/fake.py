"""A cache and a step builder that hold no opinion on scheduling: what a model's forward needs, and traps around it.

Owns       plain tensors per group and layer, block tables with scattered ids, teacher-forced ragged steps.
Promises   everything that attention must not read is NaN: unwritten slots, the null block, and blocks that the mask
           can no longer reach, which are freed (null in the table) and handed out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.coordinator.step import Entries
from kvtier.geometry.kinds import RecurrentState
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.gpu_pool.exports import States

NULL = 0


class FakeCache:
    """``kv(group, layer)`` views [blocks, block_tokens, heads, head_dim], NaN until written."""

    def __init__(self, spec: CacheSpec, blocks: int = 40) -> None:
        self.spec = spec
        self.blocks = blocks
        self._kv = {
            (g.name, i): tuple(
                torch.full((blocks, g.block_entries, g.num_kv_heads, d), torch.nan, dtype=getattr(torch, g.dtype))
                for d in g.head_dims
            )
            for g in spec.groups
            if not isinstance(g.attention, RecurrentState)
            for i in range(g.num_layers)
        }
        self._states = {
            (g.name, i): tuple(
                torch.full((blocks, *part.shape), torch.nan, dtype=getattr(torch, part.dtype))
                for part in g.attention.parts
            )
            for g in spec.groups
            if isinstance(g.attention, RecurrentState)
            for i in range(g.num_layers)
        }

    def state(self, group: str, layer: int) -> tuple[torch.Tensor, ...]:
        return self._states[group, layer]

    def kv(self, group: str, layer: int) -> tuple[torch.Tensor, ...]:
        return self._kv[group, layer]

    def poison(self, group: GroupSpec, block: int) -> None:
        for i in range(group.num_layers):
            is_state = isinstance(group.attention, RecurrentState)
            for tensor in self.state(group.name, i) if is_state else self.kv(group.name, i):
                tensor[block] = torch.nan


@dataclass(frozen=True)
class View:
    block_table: np.ndarray
    slot_mapping: np.ndarray
    starts: Sequence[int]
    ends: Sequence[int]
    block_tokens: int
    entry_tokens: int

    def entries(self) -> Entries:
        """Those whose last tokens are among the step's."""
        m, spans = self.entry_tokens, zip(self.starts, self.ends, strict=True)
        positions = np.concatenate([np.arange(a, b) for a, b in spans])
        token = np.flatnonzero(positions % m == m - 1)
        return Entries(token, self.slot_mapping[token] // m)

    def states(self) -> States:
        """A state at each block's end, and at each entry's."""
        table, bt = self.block_table, self.block_tokens
        kept = [
            (k, n)
            for k, (a, b) in enumerate(zip(self.starts, self.ends, strict=True))
            for n in sorted({*range(a // bt * bt + bt, b, bt), b})
        ]
        return States(
            np.array([table[k, (a - 1) // bt] if a else 0 for k, a in enumerate(self.starts)], np.int32),
            np.array([k for k, _ in kept], np.int32),
            np.array([n for _, n in kept], np.int64),
            np.array([table[k, (n - 1) // bt] for k, n in kept], np.int32),
        )


@dataclass(frozen=True)
class Step:
    """The engine's view of a step (design: public API); ``rows`` are the sequences it runs."""

    rows: tuple[int, ...]
    token_ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    sample_rows: np.ndarray
    views: dict[str, View]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def group(self, name: str) -> View:
        return self.views[name]


class FakeSteps:
    """Ragged steps over fixed token sequences."""

    def __init__(self, cache: FakeCache, sequences: Sequence[np.ndarray], *, keep: bool = False) -> None:
        """``keep``: free nothing, so that a mask that looks too far meets old tokens instead of NaN."""
        self.cache = cache
        self._keep = keep
        self.sequences = sequences
        self.done = [0] * len(sequences)
        rng = np.random.default_rng(0)
        self._free = {name: list(1 + rng.permutation(cache.blocks - 1)) for name in cache.spec.names}
        self._tables: dict[str, list[list[int]]] = {name: [[] for _ in sequences] for name in cache.spec.names}

    def step(self, counts: dict[int, int], sample: Sequence[int] | None = None) -> Step:
        """The next ``counts[row]`` tokens of each sequence; ``sample``: sequences to sample, all by default."""
        rows = tuple(counts)
        starts = [self.done[r] for r in rows]
        ends = [self.done[r] + counts[r] for r in rows]
        for group in self.cache.spec.groups:
            for r, start, end in zip(rows, starts, ends, strict=True):
                self._make_room(group, r, start, end)
        for r, end in zip(rows, ends, strict=True):
            self.done[r] = end
        wanted = rows if sample is None else sample
        return Step(
            rows=rows,
            token_ids=np.concatenate([self.sequences[r][a:b] for r, a, b in zip(rows, starts, ends, strict=True)]),
            positions=np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)]),
            query_start=np.cumsum([0, *counts.values()]).astype(np.int32),
            seq_lens=np.array(ends, np.int32),
            sample_rows=np.array([i for i, r in enumerate(rows) if r in wanted], np.int64),
            views={g.name: self._view(g, rows, starts, ends) for g in self.cache.spec.groups},
        )

    def _make_room(self, group: GroupSpec, row: int, start: int, end: int) -> None:
        """Frees what no token from ``start`` on can see, then takes blocks up to ``end``."""
        table = self._tables[group.name][row]
        dead = 0 if self._keep else group.attention.first_visible(start) // group.block_tokens
        for j in range(min(len(table), dead)):
            if table[j] != NULL:
                self.cache.poison(group, table[j])
                self._free[group.name].append(table[j])
                table[j] = NULL
        while len(table) * group.block_tokens < end:
            table.append(int(self._free[group.name].pop(0)))

    def _view(self, group: GroupSpec, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> View:
        tables = [self._tables[group.name][r] for r in rows]
        block_table = np.full((len(rows), max(map(len, tables)) + 1), NULL, np.int32)
        slots = []
        for i, (table, start, end) in enumerate(zip(tables, starts, ends, strict=True)):
            block_table[i, : len(table)] = table
            tokens = np.arange(start, end)
            slots.append(
                block_table[i, tokens // group.block_tokens] * group.block_tokens + tokens % group.block_tokens
            )
        sizes = group.block_tokens, group.entry_tokens
        return View(block_table, np.concatenate(slots).astype(np.int64), starts, ends, *sizes)
