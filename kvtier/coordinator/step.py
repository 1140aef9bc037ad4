"""One forward pass for the engine: token ids, positions, and every group's paged index arrays.

Promises   arrays are built at the first call, from the rows as they stand before the step is committed. They are valid
           until the next ``schedule``. Keeps I15, I16.
Does not   change anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.exports import Exports, Int32s, Int64s, Paged, States
from kvtier.machine.errors import StepError
from kvtier.machine.integers import integer, shown

MOST_ENTRIES = 1 << 24
"""Rows of a padded step: far more than a forward can have, and no more than fit into memory."""


class Arrays(NamedTuple):
    """What a step consists of: R entries, T tokens."""

    token_ids: Int64s  # [T]
    positions: Int64s  # [T]
    query_start: Int32s  # [R + 1]
    rows: Int32s  # [R]
    starts: Int64s  # [R]
    seq_lens: Int64s  # [R]
    sample_rows: Int32s
    prefills: Int32s


class Entries(NamedTuple):
    """The entries that a step completes in a group whose tokens share them. N entries, in the order of the tokens."""

    token: Int64s
    """int64 [N]: the step's token that is the last of the entry's."""
    slot: Int64s
    """int64 [N]: where the entry goes, ``block_id * block_entries + offset``."""


class GroupView:
    """One group's index arrays for a step of R entries and T tokens."""

    def __init__(self, step: Step, g: int) -> None:
        self._step = step
        self._g = g

    @property
    def block_table(self) -> Int32s:
        """int32 [R, W]: logical block j of entry r; null (0) if the mask never looks there, and past the end.

        Read only: the next step reuses this array and writes only its changes.
        """
        return self._step.block_tables()[self._g]

    @property
    def slot_mapping(self) -> Int64s:
        """int64 [T]: the slot of each new token's KV, ``block_id * block_tokens + offset``."""
        self._check_tokens("slot_mapping")
        return self._step.slots()[self._g]

    def entries(self) -> Entries:
        """The entries that this step completes, in a group whose tokens share them (``GroupSpec.entry_tokens``).

        An entry of the step has ``seq_lens // entry_tokens`` of them after it; block tables name their blocks. Raises
        ``StepError`` for other groups.
        """
        if self._step.spec.groups[self._g].entry_tokens == 1:
            raise StepError("entries() is of a group whose tokens share entries; this one has slot_mapping")
        return self._step.entries(self._g)

    def states(self, rows: int | None = None) -> States:
        """What each entry of a group of states goes on from, and where its states go (``States``).

        ``rows``: with null rows appended up to so many entries, for a captured graph of fixed size. They go on from
        nothing and write to a block that is in no pool. Raises ``StepError`` for other groups, and as ``padded``.
        """
        if not self._keeps_states:
            raise StepError("states() is of a group of states; this one has block_table, slot_mapping and paged()")
        states = self._step.states(self._g)
        if rows is None:
            return states
        return states.padded(_entries(rows, "states()", len(states.source)), self._step.spare(self._g))

    @property
    def _keeps_states(self) -> bool:
        return self._step.spec.groups[self._g].attention.kind is Kind.STATE

    def _check_tokens(self, what: str) -> None:
        if self._keeps_states:
            raise StepError(f"a group of states has no {what}, since it keeps nothing of single tokens; ask states()")
        if self._step.spec.groups[self._g].entry_tokens > 1:
            raise StepError(f"a group whose tokens share entries has no {what}; ask entries() and block_table")

    def paged(self) -> Paged:
        """FlashInfer's form: (qo_indptr [E+1], kv_indptr [E+1], kv_indices, kv_last_page_len [E]), int32.

        Only pages that the mask can reach. Window groups need ``window_left = window_tokens - 1``. A chunked group
        comes as virtual batches, one entry per request and chunk (so E may be more than R), with plain causal masks.
        """
        self._check_tokens("pages")
        return self._step.pages()[self._g]

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the group."""
        return self._step.block_tokens(self._g)

    def padded(self, rows: int) -> Paged:
        """``paged()`` with null rows appended up to ``rows`` entries: one query token on the null block each.

        For a captured graph of fixed size. Raises ``StepError`` if the step has more entries than that.
        """
        qo, kv, indices, last = self.paged()
        extra = _entries(rows, "padded()", len(last)) - len(last)
        steps = np.arange(1, extra + 1, dtype=np.int32)
        return (
            np.concatenate([qo, qo[-1] + steps]),
            np.concatenate([kv, kv[-1] + steps]),
            np.concatenate([indices, np.zeros(extra, np.int32)]),
            np.concatenate([last, np.ones(extra, np.int32)]),
        )


def _entries(rows: object, what: str, there: int) -> int:
    """The number of entries that ``there`` entries are padded to; raises ``StepError``."""
    entries = integer(rows)
    if entries is None:
        raise StepError(f"{what} takes a number of entries, got {shown(rows)}")
    if entries < there:
        raise StepError(f"cannot pad {there} entries to {shown(entries)}")
    if entries > MOST_ENTRIES:
        raise StepError(f"{what} takes at most {MOST_ENTRIES:,} entries, got {shown(entries)}")
    return entries


class Step:
    """What one forward pass computes: R entries (requests), T tokens, packed one after the other."""

    def __init__(
        self,
        tables: BlockTables,
        exports: Exports,
        names: list[str],
        arrays: Arrays,
        longest: int,
    ) -> None:
        """``names``: R ids; nobody changes them."""
        self._tables = tables
        self._exports = exports
        self._longest = longest
        self._views: dict[str, GroupView] = {}
        self._slots: list[Int64s] | None = None
        self._block_tables: list[Int32s] | None = None
        self._pages: list[Paged] | None = None
        self._states: dict[int, States] = {}
        self._entries: dict[int, Entries] = {}
        self._open = True
        self._names = names
        self._request_ids: list[str] | None = None
        self.rows = arrays.rows
        """int32 [R], row of each entry in the persistent tables."""
        self.token_ids = arrays.token_ids
        """int64 [T]."""
        self.positions = arrays.positions
        """int64 [T]."""
        self.query_start = arrays.query_start
        """int32 [R + 1]: tokens of entry r are [query_start[r], query_start[r + 1])."""
        self.starts = arrays.starts
        """int64 [R], tokens whose KV was there before this step."""
        self.seq_lens = arrays.seq_lens
        """int64 [R], tokens whose KV is there after this step."""
        self.sample_rows = arrays.sample_rows
        """int32: the entries whose last token's logits must be sampled; others are chunks of a longer prompt."""
        self.prefills = arrays.prefills
        """int32: the entries that compute tokens of a prompt, or tokens that a preemption has cost."""
        self.num_tokens = len(arrays.token_ids)
        """T; 0 when only copies can make progress."""

    @property
    def request_ids(self) -> list[str]:
        """R ids, in service order."""
        if self._request_ids is None:
            self._request_ids = self._names.copy()
        return self._request_ids

    def group(self, name: str) -> GroupView:
        """The index arrays of the group called ``name``."""
        view = self._views.get(name) if isinstance(name, str) else None
        if view is None:
            g = self._tables.spec.index(name)
            view = self._views[name] = GroupView(self, g)
        return view

    # For all groups at once: a caller that needs one group's arrays needs the others' as well.

    def slots(self) -> list[Int64s]:
        """int64 [T] by group: slot mappings."""
        if self._slots is None:
            self._slots = self._exports.slots(self._open_tables(), self.rows, self.starts, self.seq_lens)
        return self._slots

    def block_tables(self) -> list[Int32s]:
        """int32 [R, W] by group."""
        if self._block_tables is None:
            self._block_tables = self._exports.tables(self._open_tables(), self.rows, self.starts, self._longest)
        return self._block_tables

    def pages(self) -> list[Paged]:
        """FlashInfer's arrays by group."""
        if self._pages is None:
            self._pages = self._exports.pages(self._open_tables(), self.rows, self.starts, self.seq_lens)
        return self._pages

    def states(self, g: int) -> States:
        """What the entries do with the states of group g."""
        if g not in self._states:
            tables = self._open_tables()
            self._states[g] = self._exports.states(tables, g, self.rows, self.starts, self.seq_lens)
        return self._states[g]

    def entries(self, g: int) -> Entries:
        """The entries of group g that this step completes."""
        if g not in self._entries:
            shared = self.spec.groups[g].entry_tokens
            token = np.flatnonzero((self.positions + 1) % shared == 0)
            self._entries[g] = Entries(token, self.slots()[g][token] // shared)  # blocks hold whole entries
        return self._entries[g]

    def spare(self, g: int) -> int:
        """The block of group g that is in no pool."""
        return int(self._tables.pools.layout.rows[g])

    @property
    def spec(self) -> CacheSpec:
        """The groups."""
        return self._tables.spec

    def built(self, g: int) -> dict[str, npt.NDArray[Any]]:
        """Group g's arrays that have been built so far, by name; for auditing."""
        made: dict[str, npt.NDArray[Any]] = {}
        if self._block_tables is not None:
            made["block_table"] = self._block_tables[g]
        if self._slots is not None:
            made["slot_mapping"] = self._slots[g]
        if g in self._states:
            made |= self._states[g]._asdict()
        if g in self._entries:
            made |= {"entry_token": self._entries[g].token, "entry_slot": self._entries[g].slot}
        if self._pages is not None:
            made |= zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"), self._pages[g], strict=True)
        return made

    def block_tokens(self, g: int) -> int:
        """Tokens per block of group g."""
        return self._tables.spec.groups[g].block_tokens

    def _open_tables(self) -> BlockTables:
        """The rows, while they stand for this step: after the commit no further array can be built."""
        if not self._open:
            raise StepError("ask for a step's arrays before it is committed: its rows have moved on")
        return self._tables

    def close(self) -> None:
        """The step is committed or cancelled: arrays built before stay valid until the next ``schedule``."""
        self._open = False

    def __repr__(self) -> str:
        return f"Step({len(self.rows)} requests, {self.num_tokens} tokens, {len(self.sample_rows)} to sample)"
