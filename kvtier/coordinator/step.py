"""One forward pass as the engine sees it: token ids, positions, and every group's paged index arrays.

Owns       the arrays that are handed out; they are reused, hence valid until the next ``schedule``.
Promises   an entry of a block table is a held block where the mask can look and null elsewhere; every index array
           says the same thing. Built when asked for. Keeps I15, I16.
Does not   change anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier._jit import inlined, jit
from kvtier.errors import StepError
from kvtier.gpu_pool.block_table import BlockTables, Geo, first_block, num_blocks
from kvtier.spec import Kind

_BT, _KIND, _SPAN, _OFFSET, _WIDTH = (
    int(Geo.BLOCK_TOKENS),
    int(Geo.KIND),
    int(Geo.SPAN),
    int(Geo.OFFSET),
    int(Geo.WIDTH),
)
_CHUNK = int(Kind.CHUNK)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Paged = tuple[Int32s, Int32s, Int32s, Int32s]


@jit
def _fill_table(t: Any, g: Any, rows: Any, starts: Any, ends: Any, out: Any) -> None:
    for k in range(len(rows)):
        at = t.geometry[g, _OFFSET] + rows[k] * t.geometry[g, _WIDTH]
        for j in range(first_block(t.geometry, g, starts[k]), num_blocks(t, g, ends[k])):
            out[k, j] = t.table[at + j]


@jit
def _fill_slots(t: Any, g: Any, rows: Any, starts: Any, ends: Any, out: Any) -> None:
    bt, n = t.geometry[g, _BT], 0
    for k in range(len(rows)):
        at = t.geometry[g, _OFFSET] + rows[k] * t.geometry[g, _WIDTH]
        for position in range(starts[k], ends[k]):
            out[n] = np.int64(t.table[at + position // bt]) * bt + position % bt
            n += 1


@inlined
def _next_end(t: Any, g: Any, start: Any, end: Any) -> Any:
    """End of the virtual batch that begins at query ``start``: a chunk's border, or the entry's end."""
    if t.geometry[g, _KIND] != _CHUNK:
        return end
    span = t.geometry[g, _SPAN]
    return min(end, (start // span + 1) * span)


@jit
def _count_paged(t: Any, g: Any, starts: Any, ends: Any) -> Any:
    entries, pages = 0, 0
    for k in range(len(starts)):
        a = starts[k]
        while a < ends[k]:
            b = _next_end(t, g, a, ends[k])
            entries += 1
            pages += num_blocks(t, g, b) - first_block(t.geometry, g, a)
            a = b
    return entries, pages


@jit
def _fill_paged(t: Any, g: Any, rows: Any, starts: Any, ends: Any, qo: Any, kv: Any, indices: Any, last: Any) -> None:
    table, bt, e, n = t.table, t.geometry[g, _BT], 0, np.uint64(0)
    qo[0] = 0
    kv[0] = 0
    for k in range(len(rows)):
        at = t.geometry[g, _OFFSET] + np.int64(rows[k]) * t.geometry[g, _WIDTH]
        a = starts[k]
        while a < ends[k]:
            b = _next_end(t, g, a, ends[k])
            first, count = first_block(t.geometry, g, a), np.uint64(num_blocks(t, g, b) - first_block(t.geometry, g, a))
            source = np.uint64(at + first)
            for j in range(count):  # unsigned indices on flat arrays, so that this becomes a plain copy
                indices[n + j] = table[source + j]
            n += count
            qo[e + 1] = qo[e] + (b - a)
            kv[e + 1] = n
            last[e] = (b - 1) % bt + 1
            e += 1
            a = b


class GroupView:
    """One group's index arrays for a step of R entries and T tokens."""

    def __init__(self, step: Step, g: int, rows: Int32s, starts: Int64s, ends: Int64s) -> None:
        self._step = step
        self._g = g
        self._rows = rows
        self._starts = starts
        self._ends = ends

    @property
    def _tables(self) -> BlockTables:
        """The rows, which the step owns until it is committed: what was not asked for by then cannot be built."""
        return self._step.open_tables()

    @cached_property
    def block_table(self) -> Int32s:
        """int32 [R, W]: logical block j of entry r; null (0) where the mask never looks and past the end."""
        bt = self._tables.spec.groups[self._g].block_tokens
        width = -(-int(self._ends.max(initial=0)) // bt)
        out = np.zeros((len(self._rows), width), np.int32)
        _fill_table(self._tables.arrays, self._g, self._rows, self._starts, self._ends, out)
        return out

    @cached_property
    def slot_mapping(self) -> Int64s:
        """int64 [T]: where the KV of each new token goes, ``block_id * block_tokens + offset``."""
        out = np.empty(int((self._ends - self._starts).sum()), np.int64)
        _fill_slots(self._tables.arrays, self._g, self._rows, self._starts, self._ends, out)
        return out

    @cached_property
    def _paged(self) -> Paged:
        t = self._tables.arrays
        entries, pages = _count_paged(t, self._g, self._starts, self._ends)
        qo, kv = np.empty(entries + 1, np.int32), np.empty(entries + 1, np.int32)
        indices, last = np.empty(pages, np.int32), np.empty(entries, np.int32)
        _fill_paged(t, self._g, self._rows, self._starts, self._ends, qo, kv, indices, last)
        return qo, kv, indices, last

    def paged(self) -> Paged:
        """FlashInfer's form: (qo_indptr [E+1], kv_indptr [E+1], kv_indices, kv_last_page_len [E]), int32.

        Only pages that the mask can reach. Window groups need ``window_left = window_tokens - 1``. A chunked group
        comes as virtual batches, one entry per request and chunk (so E may be more than R), with plain causal masks.
        """
        return self._paged

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the group."""
        return self._tables.spec.groups[self._g].block_tokens

    def built(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that somebody has asked for so far, by name; for auditing."""
        made: dict[str, npt.NDArray[Any]] = {
            name: self.__dict__[name] for name in ("block_table", "slot_mapping") if name in self.__dict__
        }
        if "_paged" in self.__dict__:
            names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
            made |= dict(zip(names, self._paged, strict=True))
        return made

    def padded(self, rows: int) -> Paged:
        """``paged()`` with null rows appended up to ``rows`` entries: one query token on the null block each.

        For a captured graph of fixed size. Raises ``StepError`` if the step has more entries than that.
        """
        qo, kv, indices, last = self._paged
        extra = rows - len(last)
        if extra < 0:
            raise StepError(f"cannot pad {len(last)} entries to {rows}")
        steps = np.arange(1, extra + 1, dtype=np.int32)
        return (
            np.concatenate([qo, qo[-1] + steps]),
            np.concatenate([kv, kv[-1] + steps]),
            np.concatenate([indices, np.zeros(extra, np.int32)]),
            np.concatenate([last, np.ones(extra, np.int32)]),
        )


class Step:
    """What one forward pass computes: R entries (requests), T tokens, packed one after the other."""

    def __init__(
        self,
        tables: BlockTables,
        request_ids: list[str],
        rows: Int32s,
        starts: Int64s,
        ends: Int64s,
        token_ids: Int64s,
        positions: Int64s,
        query_start: Int32s,
        sample_rows: Int32s,
    ) -> None:
        self._tables = tables
        self.request_ids = request_ids
        """R ids, in service order."""
        self.rows = rows
        """int32 [R], row of each entry in the persistent tables."""
        self.starts = starts
        """int64 [R], tokens whose KV was there before this step."""
        self.seq_lens = ends
        """int64 [R], tokens whose KV is there after this step."""
        self.token_ids = token_ids
        """int64 [T]."""
        self.positions = positions
        """int64 [T]."""
        self.query_start = query_start
        """int32 [R + 1]: tokens of entry r are [query_start[r], query_start[r + 1])."""
        self.sample_rows = sample_rows
        """int32: the entries whose last token's logits must be sampled; others are chunks of a longer prompt."""
        self.num_tokens = len(token_ids)
        """T; 0 when only copies can make progress."""
        self._views: dict[str, GroupView] = {}
        self._open = True

    def group(self, name: str) -> GroupView:
        """The index arrays of the group called ``name``."""
        view = self._views.get(name)
        if view is None:
            g = self._tables.spec.index(name)
            view = self._views[name] = GroupView(self, g, self.rows, self.starts, self.seq_lens)
        return view

    def built_views(self) -> Iterable[tuple[str, GroupView]]:
        """Groups whose views somebody has asked for so far; for auditing."""
        return self._views.items()

    def open_tables(self) -> BlockTables:
        """The block tables, for views. Raises ``StepError`` once the step has been committed or cancelled."""
        if not self._open:
            raise StepError("ask for a step's arrays before it is committed: its rows have moved on")
        return self._tables

    def close(self) -> None:
        """The step is committed or cancelled: arrays that were asked for stay valid until the next ``schedule``."""
        self._open = False

    def __repr__(self) -> str:
        return f"Step({len(self.request_ids)} requests, {self.num_tokens} tokens, {len(self.sample_rows)} to sample)"
