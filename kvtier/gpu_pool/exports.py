"""A step's index arrays, for all groups at once, in buffers that every step reuses.

Owns       the buffers; hence their content is valid until the next ``schedule``.
Promises   an entry of a block table is a held block if the mask can look there, and null elsewhere. All index arrays
           agree. If an engine is interrupted while it asks, the next step reuses nothing half written. Keeps I15, I16.
Does not   change rows or pools.

Slot mappings and page lists are written anew for every step. Block tables are kept: an entry with the same row as in
the last step gets only its changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.row_state import Geo, RowCol, first_block_from, row_at
from kvtier.machine.loops.jit import inlined, jit

_BT, _KIND, _SPAN = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Geo.SPAN)
_CHUNK, _VERSION = int(Kind.CHUNK), int(RowCol.VERSION)
_U = np.uint64
_NO_SHAPE = -1, -1

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Paged = tuple[Int32s, Int32s, Int32s, Int32s]


@jit
def _fill_slots(geometry: Any, table: Any, span: Any, rows: Any, starts: Any, ends: Any, out: Any) -> Any:
    """Slots of the new tokens of group g, to out[g]; returns their number."""
    num_tokens = _U(0)
    for g in range(len(geometry)):
        bt, row_of, n = geometry[g, _BT], _U(g), _U(0)
        for k in range(len(rows)):
            r, position, end = np.int64(rows[k]), starts[k], ends[k]
            at = row_at(geometry, g, r)
            last = np.int64(span[r, g, 1]) - 1
            if end - position == 1 and last * bt <= position:  # a decode writes to the last block of its row
                out[row_of, n] = np.int64(table[_U(at + last)]) * bt + position - last * bt
                n += _U(1)
                continue
            while position < end:
                j = position // bt
                first, count = np.int64(table[_U(at + j)]) * bt - j * bt, min((j + 1) * bt, end) - position
                for i in range(_U(count)):
                    out[row_of, n + i] = first + position + np.int64(i)
                n += _U(count)
                position += count
        num_tokens = n
    return np.int64(num_tokens)


@jit
def _fill_tables(
    geometry: Any,
    table: Any,
    span: Any,
    state: Any,
    rows: Any,
    starts: Any,
    widths: Any,
    room: Any,
    fresh: Any,
    seen_row: Any,
    seen_span: Any,
    out: Any,
) -> None:
    """Block tables of group g to out[room[g]:], [R, widths[g]] flat.

    seen_row[k] = (row, version) and seen_span[k, g] = (first, end) describe the content of entry k; with ``fresh`` it
    has none.
    """
    for k in range(len(rows)):
        r = np.int64(rows[k])
        known = not fresh and seen_row[k, 0] == r and seen_row[k, 1] == state[r, _VERSION]
        seen_row[k, 0], seen_row[k, 1] = r, state[r, _VERSION]
        for g in range(len(geometry)):
            first, end = first_block_from(geometry, g, starts[k], span[r, g, 0]), np.int64(span[r, g, 1])
            begin, old_first, old_end = first, np.int64(seen_span[k, g, 0]), np.int64(seen_span[k, g, 1])
            if known and first == old_first and end == old_end:
                continue
            target, source = room[g] + k * widths[g], row_at(geometry, g, r)
            if known and first >= old_first and end >= old_end:
                for j in range(old_first, min(first, old_end)):
                    out[_U(target + j)] = 0
                begin = max(first, old_end)
            else:
                for i in range(_U(widths[g])):
                    out[_U(target) + i] = 0
            for i in range(_U(max(np.int64(0), end - begin))):
                out[_U(target + begin) + i] = table[_U(source + begin) + i]
            seen_span[k, g, 0], seen_span[k, g, 1] = first, end


@inlined
def _next_end(geometry: Any, g: Any, start: Any, end: Any) -> Any:
    """End of the virtual batch that begins at query ``start``: a chunk's border, or the entry's end."""
    if geometry[g, _KIND] != _CHUNK:
        return end
    span = geometry[g, _SPAN]
    return min(end, (start // span + 1) * span)


@jit
def _fill_pages(
    geometry: Any,
    table: Any,
    span: Any,
    rows: Any,
    starts: Any,
    ends: Any,
    room: Any,
    room_pages: Any,
    heads: Any,
    indices: Any,
    made: Any,
) -> Any:
    """FlashInfer's arrays of group g to heads[g] (int32 [3, room]) and indices[g * room_pages:].

    Writes made[g] = (entries, pages). False if the room was too small: then made[g] is the room it needs.
    """
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
                last = np.int64(span[r, g, 1]) - 1 if b == ends[k] else (b - 1) // bt
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


class States(NamedTuple):
    """What a step's entries do with the states of a group. Blocks are block ids of the group, which index its views.

    Entry k goes on from the state in block ``source[k]``; 0: from none. Segment i is a part of entry ``entry[i]`` that
    ends after token ``end[i]`` of its text: the state then goes to block ``target[i]``. The segments of an entry are
    together and ascending, and its last one ends the entry. A block is source and target of one entry alone; then it
    may be both. A null row pads a step: it goes on from none and has one token. Its state goes to the spare block,
    which is in no pool, so nobody reads it.
    """

    source: Int32s
    """int32 [R]."""
    entry: Int32s
    """int32 [S]."""
    end: Int64s
    """int64 [S]."""
    target: Int32s
    """int32 [S]."""

    def padded(self, rows: int, spare: int) -> States:
        """These, with null rows appended up to ``rows`` entries."""
        null = np.arange(len(self.source), rows, dtype=np.int32)
        return States(
            np.concatenate([self.source, np.zeros_like(null)]),
            np.concatenate([self.entry, null]),
            np.concatenate([self.end, np.ones(len(null), np.int64)]),
            np.concatenate([self.target, np.full_like(null, spare)]),
        )


@jit
def _fill_states(
    geometry: Any, table: Any, g: Any, rows: Any, starts: Any, ends: Any, source: Any, entry: Any, end: Any, target: Any
) -> Any:
    """``States`` of group g; entry, end and target have room for all segments. Returns the number of segments."""
    bt, n = geometry[g, _BT], 0
    for k in range(len(rows)):
        at, a, b = row_at(geometry, g, np.int64(rows[k])), starts[k], ends[k]
        source[k] = table[_U(at + (a - 1) // bt)] if a > 0 else 0
        last = (b - 1) // bt
        for j in range(a // bt, last):
            if table[_U(at + j)] != 0:
                entry[n], end[n], target[n] = k, (j + 1) * bt, table[_U(at + j)]
                n += 1
        entry[n], end[n], target[n] = k, b, table[_U(at + last)]
        n += 1
    return n


class Exports:
    """Buffers for the steps of one scheduler."""

    def __init__(self, num_groups: int, max_running: int, max_batched_tokens: int) -> None:
        self._groups = num_groups
        self._slots = np.empty((num_groups, max_batched_tokens), np.int64)
        self._slot_views: tuple[int, list[Int64s]] = -1, []
        self._tables = np.empty(0, np.int32)
        self._shape = _NO_SHAPE
        self._views: list[Int32s] = []
        self._widths = np.zeros(num_groups, np.int64)
        self._room = np.zeros(num_groups, np.int64)
        self._seen_row = np.zeros((max_running, 2), np.int64)
        self._seen_span = np.zeros((max_running, num_groups, 2), np.int32)
        self._heads = np.empty((num_groups, 3, max_running + 1), np.int32)
        self._head_views: list[tuple[int, Int32s, Int32s, Int32s]] = [(-1, *self._heads[0])] * num_groups
        self._indices = np.empty(0, np.int32)
        self._made = np.zeros((num_groups, 2), np.int64)

    def slots(self, tables: BlockTables, rows: Int32s, starts: Int64s, ends: Int64s) -> list[Int64s]:
        """Slot mappings of all groups, int64 [T]."""
        t = tables.arrays
        num_tokens = _fill_slots(t.geometry, t.table, t.span, rows, starts, ends, self._slots)
        if num_tokens != self._slot_views[0]:
            self._slot_views = num_tokens, [slots[:num_tokens] for slots in self._slots]
        return self._slot_views[1]

    def tables(self, tables: BlockTables, rows: Int32s, starts: Int64s, longest: int) -> list[Int32s]:
        """Block tables of all groups, int32 [R, W]; no entry has more than ``longest`` tokens."""
        t, shape = tables.arrays, (len(rows), -(-longest // tables.spec.hash_tokens))
        fresh = shape != self._shape
        if fresh:
            self._shape = _NO_SHAPE  # until all of it is written
            self._lay_out(len(rows), [-(-longest // group.block_tokens) for group in tables.spec.groups])
        arrays = t.geometry, t.table, t.span, t.state, rows, starts, self._widths, self._room
        _fill_tables(*arrays, fresh, self._seen_row, self._seen_span, self._tables)
        self._shape = shape
        return self._views

    def states(self, tables: BlockTables, g: int, rows: Int32s, starts: Int64s, ends: Int64s) -> States:
        """What the entries do with the states of group g."""
        t = tables.arrays
        bt = int(t.geometry[g, Geo.BLOCK_TOKENS])
        most = len(rows) + int((ends // bt - starts // bt).sum())
        source, entry, target = np.empty(len(rows), np.int32), np.empty(most, np.int32), np.empty(most, np.int32)
        end = np.empty(most, np.int64)
        n = _fill_states(t.geometry, t.table, g, rows, starts, ends, source, entry, end, target)
        return States(source, entry[:n], end[:n], target[:n])

    def _lay_out(self, count: int, widths: list[int]) -> None:
        """Block tables have ``count`` rows from now on, and these widths."""
        sizes = count * np.array(widths)
        self._widths[:], self._room[:] = widths, np.cumsum(sizes) - sizes
        if sizes.sum() > len(self._tables):
            self._tables = np.empty(2 * int(sizes.sum()), np.int32)
        self._views = [
            self._tables[at : at + count * width].reshape(count, width)
            for at, width in zip(self._room.tolist(), widths, strict=True)
        ]

    def pages(self, tables: BlockTables, rows: Int32s, starts: Int64s, ends: Int64s) -> list[Paged]:
        """(qo_indptr, kv_indptr, kv_indices, kv_last_page_len) of every group."""
        t, room = tables.arrays, (self._heads.shape[2], len(self._indices) // self._groups)
        arrays = t.geometry, t.table, t.span, rows, starts, ends
        while not _fill_pages(*arrays, *room, self._heads, self._indices, self._made):
            entries, pages = self._made.max(axis=0).tolist()
            room = max(room[0], 2 * (entries + 1)), max(room[1], 2 * pages)
            self._head_views = [(-1, *self._heads[0])] * self._groups  # first: they view the old buffers
            self._heads = np.empty((self._groups, 3, room[0]), np.int32)
            self._indices = np.empty(self._groups * room[1], np.int32)
        out = []
        for g, (entries, pages) in enumerate(self._made.tolist()):
            if self._head_views[g][0] != entries:
                qo, kv, last = self._heads[g]
                self._head_views[g] = entries, qo[: entries + 1], kv[: entries + 1], last[:entries]
            _, qo, kv, last = self._head_views[g]
            out.append((qo, kv, self._indices[g * room[1] : g * room[1] + pages], last))
        return out
