"""A step's index arrays, for all groups at once, in buffers that every step reuses.

Owns       the buffers, hence what they hold is valid until the next ``schedule``.
Promises   an entry of a block table is a held block where the mask can look and null elsewhere; every index array
           says the same thing. Keeps I15, I16.
Does not   change rows or pools.

Slot mappings and page lists are written anew for every step. Block tables are kept: an entry that has the row it had in
the last step gets only what has changed since.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier._jit import inlined, jit
from kvtier.gpu_pool.block_table import BlockTables, Geo, RowCol, first_block_from, num_blocks, row_at
from kvtier.spec import Kind

_BT, _KIND, _SPAN = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Geo.SPAN)
_CHUNK, _VERSION = int(Kind.CHUNK), int(RowCol.VERSION)
_U = np.uint64

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Paged = tuple[Int32s, Int32s, Int32s, Int32s]


@jit
def _fill_slots(t: Any, rows: Any, starts: Any, ends: Any, num_tokens: Any, out: Any) -> None:
    """Slots of group g to out[g * num_tokens:]."""
    geometry, table, span = t.geometry, t.table, t.span
    for g in range(len(geometry)):
        bt, n = geometry[g, _BT], _U(g * num_tokens)
        for k in range(len(rows)):
            r, position = np.int64(rows[k]), starts[k]
            at = row_at(geometry, g, r)
            j = np.int64(span[r, g, 1]) - 1  # where the one token of a decode lies
            if j * bt > position:
                j = position // bt
            offset = position - j * bt
            if offset >= bt:
                j, offset = position // bt, position % bt
            while position < ends[k]:
                first = np.int64(table[_U(at + j)]) * bt + offset
                count = min(bt - offset, ends[k] - position)
                for i in range(_U(count)):
                    out[n + i] = first + np.int64(i)
                n += _U(count)
                position += count
                j, offset = j + 1, np.int64(0)


@jit
def _fill_table(t: Any, g: Any, rows: Any, starts: Any, ends: Any, width: Any, seen: Any, fresh: Any, out: Any) -> None:
    """Block tables of group g to ``out``, [R, width] flat. seen[k] = (row, version, first, end) of what it holds."""
    geometry, table, span, state = t.geometry, t.table, t.span, t.state
    for k in range(len(rows)):
        r = np.int64(rows[k])
        first, end = first_block_from(geometry, g, starts[k], span[r, g, 0]), num_blocks(geometry, g, ends[k])
        target, source = k * width, row_at(geometry, g, r)
        begin, old_first, old_end = first, seen[k, 2], seen[k, 3]
        if fresh or seen[k, 0] != r or seen[k, 1] != state[r, _VERSION] or end < old_end or first < old_first:
            for j in range(_U(width)):
                out[_U(target) + j] = 0
        else:
            for j in range(old_first, min(first, old_end)):
                out[_U(target + j)] = 0
            begin = max(first, old_end)
        for j in range(_U(max(np.int64(0), end - begin))):
            out[_U(target + begin) + j] = table[_U(source + begin) + j]
        seen[k, 0], seen[k, 1], seen[k, 2], seen[k, 3] = r, state[r, _VERSION], first, end


@inlined
def _next_end(geometry: Any, g: Any, start: Any, end: Any) -> Any:
    """End of the virtual batch that begins at query ``start``: a chunk's border, or the entry's end."""
    if geometry[g, _KIND] != _CHUNK:
        return end
    span = geometry[g, _SPAN]
    return min(end, (start // span + 1) * span)


@jit
def _fill_pages(
    t: Any, rows: Any, starts: Any, ends: Any, room: Any, room_pages: Any, heads: Any, indices: Any, made: Any
) -> Any:
    """FlashInfer's arrays of group g to heads[g] (int32 [3, room]) and indices[g * room_pages:].

    Writes made[g] = (entries, pages). False if the room was too small: then made[g] says what it takes.
    """
    geometry, table, span = t.geometry, t.table, t.span
    fits = True
    for g in range(len(geometry)):
        bt, e, n = geometry[g, _BT], 0, _U(0)
        start_of = _U(g * room_pages)
        heads[g, 0, 0] = 0
        heads[g, 1, 0] = 0
        for k in range(len(rows)):
            r, a = np.int64(rows[k]), starts[k]
            at = row_at(geometry, g, r)
            while a < ends[k]:
                b = _next_end(geometry, g, a, ends[k])
                first = first_block_from(geometry, g, a, span[r, g, 0])
                last = (b - 1) // bt
                count = _U(last + 1 - first)
                fits = fits and e + 1 < room and np.int64(n + count) <= room_pages
                if fits:
                    source, target = _U(at + first), start_of + n
                    for j in range(count):  # unsigned indices on flat arrays, so that this becomes a plain copy
                        indices[target + j] = table[source + j]
                    heads[g, 0, e + 1] = heads[g, 0, e] + np.int32(b - a)
                    heads[g, 1, e + 1] = n + count
                    heads[g, 2, e] = b - last * bt
                n += count
                e += 1
                a = b
        made[g, 0] = e
        made[g, 1] = n
    return fits


class Exports:
    """Buffers for the steps of one scheduler."""

    def __init__(self, num_groups: int, max_running: int) -> None:
        self._groups = num_groups
        self._slots = np.empty(0, np.int64)
        self._tables = [np.empty(0, np.int32) for _ in range(num_groups)]
        self._seen = np.zeros((num_groups, max_running, 4), np.int64)
        self._shapes = [(0, 0)] * num_groups
        self._heads = np.empty((num_groups, 3, max_running + 1), np.int32)
        self._indices = np.empty(0, np.int32)
        self._made = np.zeros((num_groups, 2), np.int64)

    def slots(self, tables: BlockTables, rows: Int32s, starts: Int64s, ends: Int64s, num_tokens: int) -> Int64s:
        """Slot mappings of all groups, int64 [G, T]."""
        size = self._groups * num_tokens
        if size > len(self._slots):
            self._slots = np.empty(2 * size, np.int64)
        _fill_slots(tables.arrays, rows, starts, ends, num_tokens, self._slots)
        return self._slots[:size].reshape(self._groups, num_tokens)

    def table(self, tables: BlockTables, g: int, rows: Int32s, starts: Int64s, ends: Int64s) -> Int32s:
        """Block table of group g, int32 [R, W]."""
        bt = tables.spec.groups[g].block_tokens
        shape = len(rows), -(-int(ends.max(initial=0)) // bt)
        size = shape[0] * shape[1]
        if size > len(self._tables[g]):
            self._tables[g] = np.empty(2 * size, np.int32)
        fresh = shape != self._shapes[g]
        self._shapes[g] = shape
        _fill_table(tables.arrays, g, rows, starts, ends, shape[1], self._seen[g], fresh, self._tables[g])
        return self._tables[g][:size].reshape(shape)

    def pages(self, tables: BlockTables, rows: Int32s, starts: Int64s, ends: Int64s) -> list[Paged]:
        """(qo_indptr, kv_indptr, kv_indices, kv_last_page_len) of every group."""
        room = self._heads.shape[2], len(self._indices) // self._groups
        while not _fill_pages(tables.arrays, rows, starts, ends, *room, self._heads, self._indices, self._made):
            entries, pages = self._made.max(axis=0).tolist()
            room = max(room[0], 2 * (entries + 1)), max(room[1], 2 * pages)
            self._heads = np.empty((self._groups, 3, room[0]), np.int32)
            self._indices = np.empty(self._groups * room[1], np.int32)
        out = []
        for g, (entries, pages) in enumerate(self._made.tolist()):
            at, head = g * room[1], self._heads[g]
            indices = self._indices[at : at + pages]
            out.append((head[0, : entries + 1], head[1, : entries + 1], indices, head[2, :entries]))
        return out
