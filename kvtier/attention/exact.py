"""Paged attention on a CPU whose bits depend on a query, its keys and its position alone.

Owns       which queries go through loops and which through products, and what both read.
Promises   a query's output has the same bits in a prompt, in a chunk of it of any length, and as a decode among any
           others. So it has after a hit: splits begin at multiples of ``SPLIT`` tokens of the text. Unseen content
           never reaches the output, be it NaN. float32 arithmetic, whatever the pools store.
Does not   run on other devices, or know requests.

Few queries of an entry go one by one through compiled loops, in place in float32 pools. Many are rows of oneDNN's
products, where a trial finds that these sum in the loops' order (``products_agree``); elsewhere they, too, go one by
one. It is a backend, as ``kvtier.attention.reference`` is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.attention import _exact_loops as loops, reference
from kvtier.attention._decode import Pools, spread, takes
from kvtier.attention._decode_loops import END, ENTRY, FIRST
from kvtier.attention._exact_loops import SPLIT, TILE
from kvtier.attention._plan import Keys
from kvtier.attention.fp8 import fold_output, fold_query
from kvtier.attention.reference import Reader
from kvtier.geometry.kinds import Kind
from kvtier.machine.errors import StepError
from kvtier.machine.loops.chains import HEADS, KEYS

Ints = npt.NDArray[np.int64]

name = "exact"
write_kv = reference.write_kv

_FEW_QUERIES = 4
_FEW_PAIRS = 2048
"""Queries of an entry, or queries times tokens, up to which loops are as fast as products."""
_PRODUCT_ROWS = 512
"""Rows of a product, about: its scores stay in the cache."""
_LOT_BYTES = 4 << 20
"""Bytes of scores, or of K read for loops, at once."""
_TRIED_ROWS = 1, 2, 3, 9, 70
_TRIED_TOKENS = TILE, 3 * TILE, SPLIT
_NO_SINKS: npt.NDArray[np.float32] = np.empty(0, np.float32)


class Stretch(NamedTuple):
    """Some queries of an entry, and what they see of a split."""

    rows: slice
    """Rows of the step."""
    columns: slice
    """Columns of the split: from a multiple of ``TILE`` to another."""
    seen: Ints
    """[queries, 2]: the first column that a query sees and the one after the last, counted from the first column."""


class Split(NamedTuple):
    """A split of one entry's text: its visible tokens ``keys`` are the columns from ``before`` on, of ``width``."""

    keys: Keys
    before: int
    width: int
    stretches: list[Stretch]


class Lot(NamedTuple):
    """Pieces of single queries, [n, 4], whose blocks are ``blocks`` where pools are not read in place.

    ``table`` names them by their index in ``blocks``, and each piece is an entry of it.
    """

    pieces: Ints
    blocks: Tensor
    table: Ints


@dataclass(frozen=True, eq=False)
class PagedBatch(reference.PagedBatch):
    """``reference.PagedBatch``, whose work is planned for few queries of an entry, and for many."""

    _works: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def pieces(self, products: bool) -> Ints:
        """[n, 4] of the queries that go through loops: if there are ``products``, those of entries with few."""
        if ("pieces", products) not in self._works:
            starts, lens = np.array(self.query_start, np.int64), np.array(self.seq_lens, np.int64)
            counts, chosen = np.diff(starts), self._by_loops(products)
            room = np.empty((int((counts * (lens // SPLIT + 2))[chosen].sum()), 4), np.int64)
            chunked = self.attention.kind is Kind.CHUNK
            count = loops.plan(room, starts, lens, chosen, self.attention.span_tokens, chunked)
            self._works["pieces", products] = room[:count]
        found: Ints = self._works["pieces", products]
        return found

    def lots(self, products: bool, at_once: int) -> list[Lot]:
        """The same, ``at_once`` pieces each."""
        if ("lots", products, at_once) not in self._works:
            pieces = self.pieces(products)
            lots = [self._lot(pieces[i : i + at_once]) for i in range(0, len(pieces), at_once)]
            self._works["lots", products, at_once] = lots
        found: list[Lot] = self._works["lots", products, at_once]
        return found

    def splits(self, group: int) -> list[Split]:
        """The work of products, for ``group`` query heads on a KV head. An entry's splits are in order."""
        if ("splits", group) not in self._works:
            entries = np.flatnonzero(~self._by_loops(True)).tolist()
            at_once = max(1, _PRODUCT_ROWS // group)
            found = [split for e in entries for split in self._splits(e, self.seq_lens[e], at_once)]
            self._works["splits", group] = found
        splits: list[Split] = self._works["splits", group]
        return splits

    def _by_loops(self, products: bool) -> npt.NDArray[np.bool_]:
        counts, lens = np.diff(np.array(self.query_start, np.int64)), np.array(self.seq_lens, np.int64)
        return (counts <= _FEW_QUERIES) | (counts * lens <= _FEW_PAIRS) | (not products)

    @cached_property
    def table(self) -> Ints:
        """The block table, for loops."""
        return np.ascontiguousarray(self.block_table.numpy(), np.int64)

    def _lot(self, pieces: Ints) -> Lot:
        table, bt, names = self.table, self.block_tokens, []
        own = np.zeros((len(pieces), table.shape[1]), np.int64)
        count = 0
        for i, (_, entry, first, end) in enumerate(pieces.tolist()):
            columns = slice(first // bt, -(-end // bt))
            names.append(table[entry, columns])
            own[i, columns] = np.arange(count, count + len(names[-1]))
            count += len(names[-1])
        pieces = pieces.copy()
        pieces[:, ENTRY] = np.arange(len(pieces))
        return Lot(pieces, torch.from_numpy(np.concatenate(names)), own)

    def _splits(self, entry: int, end: int, at_once: int) -> Iterator[Split]:
        a, b = self.query_start[entry : entry + 2]
        last, bt, span = np.arange(end - (b - a), end), self.block_tokens, self.attention.span_tokens
        first = np.zeros_like(last)  # of the tokens that each query sees
        if self.attention.kind is Kind.CHUNK:
            first = last // span * span
        elif self.attention.kind is Kind.WINDOW:
            first = np.maximum(last - span + 1, 0)
        for split in range(int(first[0]) // SPLIT * SPLIT, end, SPLIT):
            sees = np.flatnonzero((last >= split) & (first < split + SPLIT))
            lo = max(split, int(first[sees[0]]))
            hi = min(split + SPLIT, int(last[sees[-1]]) + 1)
            origin, skip = lo // TILE * TILE, lo % bt
            keys = Keys(self.block_table[entry, lo // bt : -(-hi // bt)], skip, hi - lo)
            stretches = []
            for i in range(int(sees[0]), int(sees[-1]) + 1, at_once):
                j = min(i + at_once, int(sees[-1]) + 1)
                seen = np.stack((np.maximum(first[i:j], split), np.minimum(last[i:j] + 1, split + SPLIT)), 1) - origin
                begin, stop = int(seen[0, 0]) // TILE * TILE, -(-int(seen[-1, 1]) // TILE) * TILE
                stretches.append(Stretch(slice(a + i, a + j), slice(begin, stop), seen - begin))
            yield Split(keys, lo - origin, -(-(hi - origin) // TILE) * TILE, stretches)


@torch.no_grad()
def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attends as ``reference.attend`` does."""
    if query.shape[0] != batch.query_start[-1]:
        raise StepError(f"got {len(query)} tokens for a step of {batch.query_start[-1]}")
    q = fold_query(query.float(), k_scale) * (scale if softcap is None else scale / softcap)
    tokens, heads, dim = q.shape
    kv_heads, dim_v = k_cache.shape[2], v_cache.shape[3]
    products = products_agree(dim, dim_v)
    of = _Of(
        q.contiguous(),
        torch.zeros(tokens, heads, dim_v),
        _nothing_seen(tokens, heads),
        np.float32(0 if softcap is None else softcap),
    )
    reader = Reader(k_cache, v_cache, batch._scratch)
    if len(batch.pieces(products)):
        _by_loops(of, k_cache, v_cache, reader, batch, products)
    for split in batch.splits(heads // kv_heads) if products else ():
        _by_products(of, reader, split)
    extra = _NO_SINKS if sinks is None else sinks.detach().float().contiguous().numpy()
    loops.finish(of.sums.numpy(), of.state, extra)
    return fold_output(of.sums, v_scale).to(query.dtype)


attend_latent = partial(reference.attend_latent, attend=attend)
"""``reference.attend_latent`` with this module's ``attend``."""


def _nothing_seen(tokens: int, heads: int) -> npt.NDArray[np.float32]:
    state = np.zeros((tokens, heads, 2), np.float32)
    state[:, :, 0] = -np.inf
    return state


class _Of(NamedTuple):
    """The queries [T, H, D], scaled, and their pieces so far: ``loops.merge``'s sums and state."""

    query: Tensor
    sums: Tensor
    state: npt.NDArray[np.float32]
    softcap: np.float32


def _by_loops(of: _Of, k_cache: Tensor, v_cache: Tensor, reader: Reader, batch: PagedBatch, products: bool) -> None:
    in_place = takes(k_cache, v_cache)
    numbers = of.query.shape[1] if in_place else k_cache.shape[2] * max(k_cache.shape[3], v_cache.shape[3])
    at_once = max(1, _LOT_BYTES // (4 * SPLIT * numbers))
    if in_place:
        pools, table, pieces = batch.in_place.pools(k_cache, v_cache), batch.table, batch.pieces(products)
        for i in range(0, len(pieces), at_once):
            _lot_by_loops(of, pools, table, pieces[i : i + at_once])
        return
    for lot in batch.lots(products, at_once):
        k, v = reader.blocks(lot.blocks)
        _lot_by_loops(of, Pools(k, v), lot.table, lot.pieces)


def _lot_by_loops(of: _Of, pools: Pools, table: Ints, pieces: Ints) -> None:
    heads, dim = of.query.shape[1:]
    scores = np.empty((len(pieces), heads, SPLIT), np.float32)
    state = np.empty((len(pieces), heads, 2), np.float32)
    mixed = np.empty((len(pieces), heads, pools.dim_v), np.float32)
    bounds = np.ascontiguousarray(pieces[:, FIRST : END + 1] - pieces[:, FIRST, None] // SPLIT * SPLIT)
    query = of.query.numpy()

    def compute(begin: int, end: int) -> bool:
        mine = slice(begin, end)
        room, at = np.empty(HEADS * (dim + KEYS), np.float32), np.empty((2, SPLIT + KEYS), np.int64)
        if not loops.score(scores[mine], query, pools.k, table, pieces[mine], pools.sizes, room, at):
            return False
        loops.weigh(scores[mine], state[mine], bounds[mine], of.softcap)
        return bool(loops.mix(mixed[mine], scores[mine], pools.v, table, pieces[mine], pools.sizes, at))

    if not spread(compute, pieces, heads * (dim + pools.dim_v)):
        raise StepError("the block table is too narrow, or names a block that is not in the pool")
    loops.merge(of.sums.numpy(), of.state, mixed, state, np.ascontiguousarray(pieces[:, 0]), 0)


def _by_products(of: _Of, reader: Reader, split: Split) -> None:
    k, v = reader.read(split.keys)
    tokens, kv_heads, dim = k.shape
    group = of.query.shape[1] // kv_heads
    there = slice(split.before, split.before + tokens)
    keys = torch.zeros(kv_heads, split.width, dim)
    keys[:, there] = k.transpose(0, 1)
    values = torch.zeros(kv_heads, v.shape[2], split.width)
    values[:, :, there] = v.permute(1, 2, 0)
    for rows, columns, seen in split.stretches:
        numbers = np.arange(rows.start, rows.stop)
        state = np.empty((len(numbers), group, 2), np.float32)
        for h in range(kv_heads):
            head = h * group
            queries = of.query[rows, head : head + group].reshape(-1, dim)
            scores = _product(queries, keys[h, columns])
            loops.weigh(scores.view(len(numbers), group, -1).numpy(), state, seen, of.softcap)
            mixed = _product(scores, values[h, :, columns].contiguous()).view(len(numbers), group, -1)
            loops.merge(of.sums.numpy(), of.state, mixed.numpy(), state, numbers, head)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, K] times the transpose of ``weight`` [n, K], both contiguous; one row as two: alone it has other bits."""
    operations: Any = torch.ops.mkldnn
    rows = x if len(x) > 1 else x.expand(2, -1).contiguous()
    product: Tensor = operations._linear_pointwise(rows, weight, None, "none", [], "")
    return product[: len(x)]


@cache
def products_agree(dim: int, dim_v: int) -> bool:
    """Whether oneDNN's products have the bits of the loops for heads of these sizes, for which both are tried once."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, SPLIT, 1, size, generator=generator) for size in (dim, dim_v))
    pools, table = Pools(k, v), np.zeros((1, 1), np.int64)
    room, at = np.empty(HEADS * (dim + KEYS), np.float32), np.empty((2, SPLIT + KEYS), np.int64)
    try:
        for rows in _TRIED_ROWS:
            for tokens in _TRIED_TOKENS:
                query = torch.randn(rows, 1, dim, generator=generator)
                pieces = np.array([(row, 0, 0, tokens) for row in range(rows)], np.int64)
                scores = np.zeros((rows, 1, SPLIT), np.float32)
                loops.score(scores, query.numpy(), pools.k, table, pieces, pools.sizes, room, at)
                seen = torch.from_numpy(scores[:, 0, :tokens])
                if not torch.equal(seen, _product(query[:, 0], k[0, :tokens, 0])):
                    return False
                mixed = np.empty((rows, 1, dim_v), np.float32)
                loops.mix(mixed, scores, pools.v, table, pieces, pools.sizes, at)
                by_product = _product(seen.contiguous(), v[0, :tokens, 0].t().contiguous())
                if not torch.equal(torch.from_numpy(mixed[:, 0]), by_product):
                    return False
    except (AttributeError, RuntimeError):  # a torch without these private operations
        return False
    return True
