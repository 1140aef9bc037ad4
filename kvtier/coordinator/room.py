"""What fits: whether blocks can be had, how many requests will still take, and which requests must give up theirs.

Owns       nothing: it reads the pools and the rows.
Promises   every answer is over all groups at once, and by the same numbers as the later taking of blocks. Victims make
           room as a set, and no victim is chosen in vain. Keeps I4, I6, I10.
Does not   admit, preempt or end requests. Methods that act say so: ``make_clean`` and ``trim``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.compactor import Compactor
from kvtier.coordinator.counts import RequestCounts
from kvtier.coordinator.match import Match
from kvtier.coordinator.needs import admission_need, promised
from kvtier.coordinator.request import Request, Shortage
from kvtier.coordinator.tracked import Tracked
from kvtier.coordinator.victims import choose_victims
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.geometry import capacity
from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.row_state import Geo, Phase
from kvtier.machine.errors import RequestTooLarge
from kvtier.machine.integers import shown
from kvtier.machine.journal import SentBack
from kvtier.pools.block_pool import Col, Ids

Counts = npt.NDArray[np.int64]

NO_LIMIT = 2**62
"""Tokens that no request reaches."""

MARGIN = 3
"""A request whose content was pushed out is admitted beside room for so many more of its size: content of others would
be pushed out for it next."""
MOST_MARGIN = 4
"""That room is at most one in so many blocks."""

_NO_BLOCKS = np.empty(0, np.int32)
_DECODE = int(Phase.DECODE)


class Room:
    """The device pools, seen by callers that need blocks."""

    def __init__(
        self,
        tables: BlockTables,
        connector: Connector,
        stores: StorePolicy,
        compactor: Compactor,
        counts: RequestCounts,
        spares_cached: bool,
    ) -> None:
        self.spec = tables.spec
        self.pools = tables.pools
        self.tables = tables
        self.spares_cached = spares_cached
        """Whether a cached block may be handed out only after ``make_clean`` has provided for its copy."""
        self.states = np.array([group.attention.kind is Kind.STATE for group in self.spec.groups], np.uint8)
        """1 for groups with states."""
        self._connector = connector
        self._stores = stores
        self._compactor = compactor
        self._counts = counts
        self._block_bytes = np.array([g.block_bytes for g in self.spec.groups], np.int64)

    # --- what is asked ----------------------------------------------------------------------------

    def check_possible(self, request: Request) -> None:
        """Raises ``RequestTooLarge`` if the prompt cannot run even alone and one token a step."""
        need = capacity.peak_blocks(self.spec, len(request.tokens))
        have = capacity.room(self.pools.layout, need)
        short = [g for g in range(len(need)) if need[g] > have[g]]
        if short:
            raise RequestTooLarge(
                {self.spec.names[g]: need[g] for g in short},
                {self.spec.names[g]: have[g] for g in short},
                what=f"the prompt of request {shown(request.request_id)} ({len(request.tokens):,} tokens)",
                longest=capacity.longest(self.pools.layout, self.spec),
            )

    def can_go_on(self, row: int) -> bool:
        """Whether empty pools have room for this running request's next token."""
        need = capacity.running_blocks(self.spec, int(self.tables.arrays.computed[row]))
        return capacity.fits(self.pools.layout, need)

    def can_come_back(self, row: int) -> bool:
        """Whether empty pools would admit this request if it were preempted: all its known tokens fit."""
        need = capacity.peak_blocks(self.spec, int(self.tables.arrays.total[row]))
        return capacity.fits(self.pools.layout, need)

    def promised(self, rows: Ids) -> Counts:
        """Blocks that the requests of these rows will still take to get through the tokens they know already."""
        t, total = self.tables.arrays, np.empty(len(self.spec.groups), np.int64)
        among = np.zeros(len(t.state), np.uint8)
        among[rows] = 1
        promised(self.pools.arrays, t, among, total)
        return total

    def next_blocks(self, rows: Ids) -> Counts:
        """Blocks that the decoding rows among these lack for a token each."""
        t = self.tables.arrays
        rows = rows[t.phase[rows] == _DECODE]
        bt = t.geometry[:, Geo.BLOCK_TOKENS, None]
        lacked: Counts = np.maximum(0, t.computed[rows] // bt + 1 - t.hi[:, rows]).sum(1)
        return lacked

    def admission_need(self, seq: Tracked, match: Match) -> tuple[Counts, Counts]:
        """Blocks for an admission: (blocks taken at first, blocks that must be free to get through all known tokens).

        At first it takes blocks to load into, and one for the first token. Hit blocks without a holder stop being free;
        hit blocks with a holder cost nothing.
        """
        p, hit = self.pools.arrays, (match.device, match.counts, match.num_tokens)
        taken, free = np.empty((2, len(self.spec.groups)), np.int64)
        admission_need(p.meta, p.blocks, self.tables.arrays.geometry, *hit, len(seq.tokens), taken, free)
        return taken, free

    def first_need(self, seq: Tracked, match: Match) -> Counts:
        """Blocks that must be free for an admission to begin: the blocks it takes, and hit blocks without a holder."""
        taken, _ = self.admission_need(seq, match)
        there = match.device > 0
        groups, blocks = match.groups[there], match.device[there]
        idle = groups[self.pools.arrays.refs[self.pools.entries(groups, blocks)] == 0]
        return taken + np.bincount(idle, minlength=len(taken))

    def shortage(self, need: Counts, used: Counts) -> Shortage:
        """The groups in which ``need`` is more than there is beside ``used`` blocks of all of them."""
        have = np.maximum(self.pools.room(need + used) - used, 0)
        return Shortage(
            {group.name: (int(need[g]), int(have[g])) for g, group in enumerate(self.spec.groups) if need[g] > have[g]}
        )

    def margin(self, need: Counts) -> Counts:
        """Blocks to spare beside ``need`` for a request whose content was pushed out."""
        pools, more = self.pools, MARGIN * need
        if not pools.shared:
            return np.minimum(more, pools.usable // MOST_MARGIN)
        slabs = float((more / pools.column(Col.PER_SLAB)).sum())
        share = min(1.0, len(pools.arrays.slabs) / MOST_MARGIN / max(1.0, slabs))
        return (more * share).astype(np.int64)

    def choose_victims(self, candidates: Sequence[Tracked], want: Counts, match: Match | None = None) -> list[Tracked]:
        """The candidates, in order, whose preemption as a set makes room for ``want``; or none.

        ``match`` is the hit of a request that is to be admitted. Then ``want`` is its ``admission_need``, which fits
        beside the blocks ``promised`` to the requests that stay.
        """
        rows, chosen = np.array([seq.row for seq in candidates], np.int32), np.zeros(len(candidates), np.uint8)
        if len(rows):
            p, t = self.pools.arrays, self.tables.arrays
            hit = (_NO_BLOCKS, np.zeros_like(want), False) if match is None else (match.device, match.counts, True)
            among, scratch = np.empty(len(t.state), np.uint8), np.empty((2, len(want)), np.int64)
            choose_victims(p, t, rows, want, *hit, chosen, among, *scratch)
        return [seq for seq, taken in zip(candidates, chosen, strict=True) if taken]

    # --- what acts --------------------------------------------------------------------------------

    def lack(self, who: str, need: Counts, used: Counts) -> SentBack:
        """Counts a ``shortage``. Returns the reason for the requests that are sent back to make room."""
        over = need + used
        over -= self.pools.room(over)
        lacking = over > 0
        if np.any(lacking & (need > 0)):
            lacking &= need > 0
        self._counts.lack(who, [name for name, lacks in zip(self.spec.names, lacking.tolist(), strict=True) if lacks])
        most = int(np.argmax(np.where(lacking, over * self._block_bytes, -1)))
        return SentBack("blocks", self.spec.names[most])

    def make_clean(self, need: Counts, pinned: Match | None = None) -> bool:
        """Makes sure that ``need[g]`` blocks of every group can be handed out; False if some cannot.

        Empty blocks go first, then cached blocks. In lazy mode a cached block needs a copy in the host, which is
        started here at the latest. Then blocks of slabs that other pools can spare, then fenced blocks, oldest ticket
        first. Blocks may be moved; the blocks of ``pinned`` then get their new ids in it.
        """
        if np.all(need <= self.pools.column(Col.EMPTY)):
            return True
        while True:
            move, make_idle = self._compactor.move, partial(self._compactor.make_idle, pinned)
            self.pools.provide(need, self.spares_cached, self.states, move, make_idle)
            planned: int | Counts = 0
            if self.spares_cached:
                evicted = self.pools.coldest_of(need - self.pools.column(Col.EMPTY))
                planned = self._stores.launder(self.pools, *evicted)
            deficit = np.maximum(need - self.pools.clean, planned)
            if not np.any(deficit > 0):
                if self.spares_cached:
                    self._stores.count_lost(self.pools, *evicted)
                return True
            if self.pools.shared and self._compactor.empty_slab(need, pinned):
                continue
            if self.pools.shared:
                changed = self._connector.clear_until(lambda: self.pools.is_enough(need))
            else:
                changed = self._connector.clear_fences(np.maximum(deficit, 0))
            if not changed:
                return False

    def trim(self, rows: Iterable[int]) -> int:
        """Releases blocks that rows keep only as anchors to come; returns the number of blocks."""
        computed = self.tables.arrays.computed
        return sum(self.tables.release_before(r, int(computed[r])) for r in map(int, rows))

    def trim_to_fit(self, rows: Collection[int] | Ids, used: Counts) -> bool:
        """``trim``, if it makes used[G] blocks fit, which do not fit now. Returns whether it did."""
        t = self.tables.arrays
        freed = sum((self.tables.freed_before(r, int(t.computed[r])) for r in rows), np.zeros_like(used))
        return self.pools.fits(used - freed) and self.trim(rows) > 0

    def trim_where_lacking(self, rows: Iterable[int], used: Counts) -> int:
        """``trim`` of the rows that keep blocks for anchors to come in a group whose part of used[G] does not fit.

        Returns the number of blocks.
        """
        t, lacking = self.tables.arrays, np.flatnonzero(used > self.pools.room(used)).tolist()
        groups = [(g, self.spec.groups[g]) for g in lacking]
        return self.trim(
            r
            for r in rows
            if any(t.lo[g, r] < x.attention.first_visible(int(t.computed[r])) // x.block_tokens for g, x in groups)
        )
