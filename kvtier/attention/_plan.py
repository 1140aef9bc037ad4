"""Which keys which queries see, cut into work that needs no [queries, keys] mask.

Owns       the geometry of a step: one list of work per step and group, used by every layer of the group.
Promises   every query row is in exactly one work. A work reads only blocks that hold a visible token, and names the
           tokens in them that it must hide. Work on a window is queries * (window + tile).
Does not   touch K, V or queries.

Three shapes of work cover all attention kinds. A ``Span`` is a run of queries that see all from one token up to
themselves: full attention, a chunk, a window back to token 0. It is an unmasked past, tile by tile, and a causal
square. ``Bands`` are queries that each see a whole window, or a whole chunk up to themselves. They are equal tiles of
queries over equal, evenly spaced ranges of keys, run as one batch. Single queries over short ranges are ``Singles``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.geometry.kinds import Attention, Kind
from kvtier.machine.errors import StepError

_MAX_ROWS = 2048  # queries of one Span; its causal square is what the kernel balances badly over threads
_ROW_STEP = 256  # and their unit, if one stretch takes several


@dataclass(frozen=True)
class Keys:
    """``tokens`` consecutive tokens: the tokens after the first ``skip`` of ``blocks`` (int64 [n], physical ids)."""

    blocks: Tensor
    skip: int
    tokens: int


@dataclass(frozen=True)
class Span:
    """The queries in ``rows`` of the step see all of ``past``, and of ``own`` causally.

    ``own`` holds the queries' own tokens; None for a single query, whose past then ends with itself.
    """

    rows: slice
    past: tuple[Keys, ...]
    own: Keys | None


@dataclass(frozen=True)
class Bands:
    """The queries in ``rows`` of the step, in tiles of ``queries``; tile i sees ``width`` keys from i * queries on.

    ``mask`` [1, 1, queries, width] is added to the scores; None means causal (width == queries).
    """

    rows: slice
    queries: int
    width: int
    keys: Keys
    mask: Tensor | None


@dataclass(frozen=True)
class Singles:
    """Entries with one query each, padded to equally many blocks.

    ``rows``: their queries' rows, in order; int64 [B] if others lie between. ``blocks`` int64 [B, n]. ``mask`` [B, 1,
    1, n * block_tokens], -inf on ``hidden`` (int64, indices into B * n * block_tokens). Hidden slots are slots that the
    query does not see; their content is unknown.
    """

    rows: slice | Tensor
    blocks: Tensor
    mask: Tensor
    hidden: Tensor


Work = Span | Bands | Singles


@dataclass(frozen=True)
class Geometry:
    """A step of one group: its attention, its entries and their block table (int64 [R, W], on the pools' device)."""

    attention: Attention
    block_tokens: int
    query_start: Sequence[int]
    seq_lens: Sequence[int]
    block_table: Tensor

    def plan(self, tile_tokens: int, band_queries: int, without: npt.NDArray[np.bool_] | None = None) -> list[Work]:
        """The step's work; it reads about ``tile_tokens`` keys at once, a window's in ``band_queries`` queries.

        ``without``: entries that are left out.
        """
        works: list[Work] = []
        short: list[tuple[int, int]] = []  # (blocks, entry)
        for entry, end in enumerate(self.seq_lens):
            queries = self.query_start[entry + 1] - self.query_start[entry]
            start = end - queries
            if without is not None and without[entry]:
                continue
            if queries > 1:
                works += self._stretch(entry, start, end, tile_tokens, band_queries)
            elif queries == 1:
                first = self.attention.first_visible(start)
                blocks = math.ceil(end / self.block_tokens) - first // self.block_tokens
                if 2 * blocks * self.block_tokens > tile_tokens:
                    past = self._tiles(entry, first, end, tile_tokens)
                    works.append(Span(self._rows(entry, start, end), past, None))
                else:
                    short.append((blocks, entry))
        works += (self._singles(entries) for entries in _similar(short, tile_tokens // self.block_tokens))
        return works

    def _stretch(self, entry: int, start: int, end: int, tile_tokens: int, band_queries: int) -> Iterator[Work]:
        """Queries of tokens [start, end) of one entry."""
        span = self.attention.span_tokens
        if self.attention.kind is Kind.FULL:
            yield from self._spans(entry, 0, start, end, tile_tokens)
        elif self.attention.kind is Kind.WINDOW:
            yield from self._spans(entry, 0, start, min(end, span), tile_tokens)
            start = max(start, span)
            step = min(band_queries, end - start)
            while start < end:
                count = min((end - start) // step, max(1, tile_tokens // step))
                yield self._bands(entry, start, count, step, band_mask(step, span, self.block_table.device))
                start += count * step
                step = min(step, end - start)
        elif self.attention.kind is Kind.CHUNK:
            while start < end:
                count = 0 if start % span else min((end - start) // span, tile_tokens // span)
                if count > 1:
                    yield self._bands(entry, start, count, span, None)
                    start += count * span
                else:
                    stop = min(end, start - start % span + span)
                    yield from self._spans(entry, start - start % span, start, stop, tile_tokens)
                    start = stop
        elif self.attention.kind is Kind.STATE:
            raise StepError("a group of states has no keys to attend to: ask the step for its states()")
        else:
            assert_never(self.attention.kind)

    def _spans(self, entry: int, base: int, start: int, end: int, tile_tokens: int) -> Iterator[Span]:
        """Queries of tokens [start, end), which see everything from ``base`` up to themselves."""
        if start >= end:
            return
        pieces = math.ceil((end - start) / _MAX_ROWS)
        step = math.ceil((end - start) / pieces / _ROW_STEP) * _ROW_STEP
        for first in range(start, end, step):
            stop = min(end, first + step)
            past = self._tiles(entry, base, first, tile_tokens)
            yield Span(self._rows(entry, first, stop), past, self._keys(entry, first, stop))

    def _bands(self, entry: int, start: int, count: int, step: int, mask: Tensor | None) -> Bands:
        """``count`` tiles of ``step`` queries from token ``start`` on."""
        width = step if mask is None else mask.shape[-1]
        end = start + count * step
        return Bands(self._rows(entry, start, end), step, width, self._keys(entry, start + step - width, end), mask)

    def _singles(self, entries: list[int]) -> Singles:
        """One padded batch; padding repeats the entry's last block."""
        bt, device = self.block_tokens, self.block_table.device
        ends = [self.seq_lens[entry] for entry in entries]
        firsts = [self.attention.first_visible(end - 1) for end in ends]
        first, end, entry = np.array([firsts, ends, entries])[:, :, None]
        block, last = first // bt, (end - 1) // bt
        columns = np.minimum(block + np.arange((last - block).max() + 1), last)
        token = block * bt + np.arange(columns.shape[1] * bt)
        hidden = (token < first) | (token >= end)
        mask = np.zeros(hidden.shape, np.float32)
        mask[hidden] = -np.inf
        rows = [self.query_start[e] for e in entries]
        together = rows[-1] - rows[0] == len(rows) - 1  # they are in order
        mine, where = (torch.from_numpy(x).to(device) for x in (entry, columns))
        return Singles(
            slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=device),
            self.block_table[mine, where],
            torch.from_numpy(mask[:, None, None]).to(device),
            torch.from_numpy(np.flatnonzero(hidden)).to(device),
        )

    def _rows(self, entry: int, start: int, end: int) -> slice:
        """The step's query rows of tokens [start, end) of one entry."""
        first = self.query_start[entry + 1] - self.seq_lens[entry]
        return slice(first + start, first + end)

    def _tiles(self, entry: int, start: int, end: int, tile_tokens: int) -> tuple[Keys, ...]:
        return tuple(self._keys(entry, a, min(end, a + tile_tokens)) for a in range(start, end, tile_tokens))

    def _keys(self, entry: int, start: int, end: int) -> Keys:
        first = start // self.block_tokens
        blocks = self.block_table[entry, first : math.ceil(end / self.block_tokens)]
        return Keys(blocks, start - first * self.block_tokens, end - start)


@lru_cache(maxsize=64)
def band_mask(queries: int, window_tokens: int, device: torch.device) -> Tensor:
    """float32 [1, 1, queries, window_tokens - 1 + queries]: query i sees the window_tokens keys from key i on."""
    ones = torch.ones(queries, window_tokens - 1 + queries, dtype=torch.bool, device=device)
    seen = ones.triu() & ones.tril(window_tokens - 1)
    return torch.zeros(seen.shape, device=device).masked_fill_(~seen, -math.inf)[None, None]


def _similar(short: list[tuple[int, int]], max_blocks: int) -> Iterator[list[int]]:
    """``short`` (blocks, entry) in lots of entries of which none is padded by more than a third of its own size."""
    short = sorted(short, reverse=True)
    while short:
        most = short[0][0]
        limit = max(1, max_blocks // most)
        count = next((i for i, (blocks, _) in enumerate(short) if i == limit or 4 * blocks < 3 * most), len(short))
        yield sorted(entry for _, entry in short[:count])
        short = short[count:]
