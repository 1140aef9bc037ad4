"""All-or-nothing over the groups: admitting, extending, preempting and ending requests.

Owns       what a request holds: its row, its blocks in every group, its load.
Promises   either every group gets its blocks or nothing changed and the answer is a ``Shortage``; the check and the
           taking use the same numbers; what a request leaves behind stays findable. Keeps I4, I6, I10, I12.
Does not   decide who is served; it says what fits and does what it is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier import capacity
from kvtier._integers import shown
from kvtier.coordinator.compactor import Compactor
from kvtier.coordinator.counts import RequestCounts, SentBack
from kvtier.coordinator.match import Match, Matcher
from kvtier.coordinator.needs import admission_need, promised
from kvtier.coordinator.request import Request, Shortage, State, Tracked
from kvtier.coordinator.victims import choose_victims
from kvtier.coordinator.wanted import Wanted
from kvtier.cpu_offload.connector import Connector
from kvtier.errors import RequestTooLarge
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.row_state import Geo, Phase, RowCol
from kvtier.keys import KeyChain
from kvtier.pools.block_pool import BlockPools, Col, Ids
from kvtier.spec import CacheSpec, Kind

Counts = npt.NDArray[np.int64]

NO_LIMIT = 2**62
"""Tokens that no request reaches."""


class _Loads(NamedTuple):
    """Blocks to load, parallel arrays: group, host block, logical block of the row."""

    groups: Ids
    hosts: Ids
    at: npt.NDArray[np.int64]


_NO_BLOCKS = np.empty(0, np.int32)


class Coordinator:
    """The device pools, the connector to the host tier and the block tables, as one."""

    def __init__(
        self,
        spec: CacheSpec,
        pools: BlockPools,
        host: BlockPools | None,
        connector: Connector,
        chain: KeyChain,
        store: str,
        move: Callable[[int, Ids, Ids], None],
    ) -> None:
        """``move`` copies blocks of a group to others on the device: (group, from, to)."""
        self.spec = spec
        self.pools = pools
        self.connector = connector
        self.chain = chain
        self.counts = RequestCounts(spec.names)
        """What has happened to requests so far."""
        self._store = store if host is not None else "off"
        self.spares_cached = self._store == "lazy"
        """Whether a cached block may only be handed out once ``make_clean`` has seen to its copy."""
        self._matcher = Matcher(pools, host)
        self._full = [
            (g, group.block_tokens) for g, group in enumerate(spec.groups) if group.attention.kind is Kind.FULL
        ]
        self._is_local = np.array([group.attention.kind is not Kind.FULL for group in spec.groups])
        self._wanted = Wanted()
        self._laundered = np.empty(0, np.int64)  # the pools' counts when the margin was last seen to
        self._block_tokens = np.array([g.block_tokens for g in spec.groups], np.int64)
        self._block_bytes = np.array([g.block_bytes for g in spec.groups], np.int64)
        self.tables = BlockTables(spec, pools, 1)
        self.compactor = Compactor(self.tables, connector, move, self.spares_cached)
        """Moves blocks so that pools can exchange slabs."""

    def use_tables(self, num_rows: int) -> None:
        """Makes room for ``num_rows`` running requests; nothing may be running."""
        self.tables = BlockTables(self.spec, self.pools, num_rows)
        self.compactor.tables = self.tables

    # --- what fits --------------------------------------------------------------------------------

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
        """Whether empty pools would admit this request if it were preempted: they have room for all that it knows."""
        need = capacity.peak_blocks(self.spec, int(self.tables.arrays.total[row]))
        return capacity.fits(self.pools.layout, need)

    def promised(self, rows: Ids) -> Counts:
        """Blocks that the requests of these rows will still take to get through the tokens they know already."""
        t, total = self.tables.arrays, np.empty(len(self.spec.groups), np.int64)
        among = np.zeros(len(t.state), np.uint8)
        among[rows] = 1
        promised(self.pools.arrays, t, among, total)
        return total

    def has_run(self, seq: Tracked) -> bool:
        """Whether a running request has computed a token since it was admitted (else it cannot be preempted, I10)."""
        return bool(self.tables.arrays.phase[seq.row] > Phase.FRESH)

    def next_blocks(self, rows: Ids) -> Counts:
        """Blocks that those of these rows that decode lack for a token each."""
        t = self.tables.arrays
        rows = rows[t.phase[rows] == Phase.DECODE]
        bt = t.geometry[:, Geo.BLOCK_TOKENS, None]
        lacked: Counts = np.maximum(0, t.computed[rows] // bt + 1 - t.hi[:, rows]).sum(1)
        return lacked

    def common_prefix(self, seq: Tracked, other: Tracked) -> int:
        """Length of the prefix that ``other`` is still computing for both; 0 if waiting gains nothing.

        A multiple of hit_tokens. Adds an anchor to ``other`` there, so that the wait ends in a hit in every group.
        """
        t, unit = self.tables.arrays, self.spec.hit_tokens
        if not seq.shares_prefix(other) or not t.publish[other.row]:
            return 0
        links = unit // self.spec.hash_tokens
        block = int(t.computed[other.row]) // unit  # the first one that is not full yet
        common = min(len(seq.tokens) - 1, len(other.tokens)) // unit
        if block >= common or not np.array_equal(
            seq.keys[(block + 1) * links - 1], other.keys[(block + 1) * links - 1]
        ):
            return 0
        low, high = block + 1, common  # chains are equal up to where they part: search by halves
        while low < high:
            middle = (low + high + 1) // 2
            if np.array_equal(seq.keys[middle * links - 1], other.keys[middle * links - 1]):
                low = middle
            else:
                high = middle - 1
        other.branches.add(low * unit)
        return low * unit

    def match(self, seq: Tracked, most: int = NO_LIMIT) -> Match:
        """What both tiers have of the request's tokens, ``most`` at most."""
        return self._matcher.match(self.tables, seq.keys, min(len(seq.tokens), most + 1), seq.use_host)

    def admission_need(self, seq: Tracked, match: Match) -> tuple[Counts, Counts]:
        """Blocks for an admission: (that it takes to begin with, that must be free to get through all known tokens).

        To begin with it takes blocks to load into and one for the first token. Hit blocks that nobody holds stop being
        free; those that others hold cost nothing.
        """
        p, hit = self.pools.arrays, (match.device, match.counts, match.num_tokens)
        taken, free = np.empty((2, len(self.spec.groups)), np.int64)
        admission_need(p.meta, p.blocks, self.tables.arrays.geometry, *hit, len(seq.tokens), taken, free)
        return taken, free

    def shortage(self, need: Counts, used: Counts) -> Shortage:
        """The groups in which ``need`` is more than there is beside ``used`` blocks of all of them."""
        have = np.maximum(self.pools.room(need + used) - used, 0)
        return Shortage(
            {group.name: (int(need[g]), int(have[g])) for g, group in enumerate(self.spec.groups) if need[g] > have[g]}
        )

    def lack(self, who: str, need: Counts, used: Counts) -> SentBack:
        """Counts a ``shortage``; returns why those who have to make room for it are sent back."""
        over = need + used
        over -= self.pools.room(over)
        lacking = over > 0
        if np.any(lacking & (need > 0)):
            lacking &= need > 0
        self.counts.lack(who, [name for name, lacks in zip(self.spec.names, lacking.tolist(), strict=True) if lacks])
        most = int(np.argmax(np.where(lacking, over * self._block_bytes, -1)))
        return SentBack("blocks", self.spec.names[most])

    def make_clean(self, need: Counts, pinned: Match | None = None) -> bool:
        """Sees to it that ``need[g]`` blocks of every group can be handed out; False if some cannot.

        Empty blocks first, then cached ones the host has a copy of (in lazy mode copies are started here at the
        latest), then those of slabs that others can spare, then fenced ones, oldest ticket first. Blocks may be moved;
        those of ``pinned`` are named there anew.
        """
        if np.all(need <= self.pools.column(Col.EMPTY)):
            return True
        while True:
            self.pools.provide(need, self.spares_cached)
            planned: int | Counts = 0
            if self.spares_cached:
                evicted = self.pools.coldest_of(need - self.pools.column(Col.EMPTY))
                planned = self.connector.launder(*evicted)
            deficit = np.maximum(need - self.pools.clean, planned)
            if not np.any(deficit > 0):
                if self.spares_cached:
                    self.connector.count_lost(*evicted)
                return True
            if self.pools.shared and self.compactor.empty_slab(need, pinned):
                continue
            if self.pools.shared:
                changed = self.connector.clear_until(lambda: self.pools.is_enough(need))
            else:
                changed = self.connector.clear_fences(np.maximum(deficit, 0))
            if not changed:
                return False

    def trim(self, rows: Iterable[int]) -> int:
        """Releases blocks that rows keep only as anchors to come; returns the number of blocks."""
        computed = self.tables.arrays.computed
        return sum(self.tables.release_before(r, int(computed[r])) for r in map(int, rows))

    def trim_to_fit(self, rows: Collection[int] | Ids, used: Counts) -> bool:
        """``trim``, if used[G] blocks, which do not fit, then will; whether."""
        t = self.tables.arrays
        freed = sum((self.tables.freed_before(r, int(t.computed[r])) for r in rows), np.zeros_like(used))
        return self.pools.fits(used - freed) and self.trim(rows) > 0

    def trim_where_lacking(self, rows: Iterable[int], used: Counts) -> int:
        """``trim`` of those of ``rows`` that keep blocks for anchors to come in a group whose part of used[G] blocks
        does not fit; returns the number of blocks."""
        t, lacking = self.tables.arrays, np.flatnonzero(used > self.pools.room(used)).tolist()
        groups = [(g, self.spec.groups[g]) for g in lacking]
        return self.trim(
            r
            for r in rows
            if any(t.lo[g, r] < x.attention.first_visible(int(t.computed[r])) // x.block_tokens for g, x in groups)
        )

    def choose_victims(self, candidates: Sequence[Tracked], want: Counts, match: Match | None = None) -> list[Tracked]:
        """Those of ``candidates``, in order, whose preemption as a set makes room for ``want``; or none.

        With the hit ``match`` of a request that is to be admitted, ``want`` is its ``admission_need``, and has room
        beside what is ``promised`` to those who stay.
        """
        rows, chosen = np.array([seq.row for seq in candidates], np.int32), np.zeros(len(candidates), np.uint8)
        if len(rows):
            p, t = self.pools.arrays, self.tables.arrays
            hit = (_NO_BLOCKS, np.zeros_like(want), False) if match is None else (match.device, match.counts, True)
            among, scratch = np.empty(len(t.state), np.uint8), np.empty((2, len(want)), np.int64)
            choose_victims(p, t, rows, want, *hit, chosen, among, *scratch)
        return [seq for seq, taken in zip(candidates, chosen, strict=True) if taken]

    # --- what changes -----------------------------------------------------------------------------

    def hold(self, match: Match) -> None:
        """Holds what was found in both tiers, until ``admit`` or ``let_go``: whoever leaves and whatever is stored
        meanwhile, it stays."""
        hit, loads = self._split(match)
        self.pools.acquire(*hit)
        self.connector.pin_host(loads.groups, loads.hosts)

    def let_go(self, match: Match) -> None:
        """Ends a ``hold``."""
        hit, loads = self._split(match)
        self.pools.release(*hit)
        self.connector.unpin_host(loads.groups, loads.hosts)

    def admit(self, seq: Tracked, match: Match, row: int) -> bool:
        """Gives the request its row, the hit's blocks, on which there is a ``hold``, and room for one token; starts
        its load. Ends the hold.

        False if blocks that stores still read do not become free in time: then nothing is held.
        """
        clean = False
        try:
            clean = self.make_clean(self.admission_need(seq, match)[0], match)
        finally:
            if not clean:
                self.let_go(match)
        if not clean:
            return False
        hit, loads = self._split(match)  # blocks may have been moved
        self._fill_row(seq, match, row, loads)
        self.connector.unpin_host(loads.groups, loads.hosts)
        if self._store == "eager" and match.num_tokens:
            self._keep_in_host(*hit, self._passed(seq, hit[0], match.at[match.device > 0]))
        return True

    def _split(self, match: Match) -> tuple[tuple[Ids, Ids], _Loads]:
        """The hit's device blocks as (groups, blocks), and what must be loaded."""
        there = match.device > 0
        absent = ~there
        loads = _Loads(match.groups[absent], match.host[absent], match.at[absent])
        return (match.groups[there], match.device[there]), loads

    def _fill_row(self, seq: Tracked, match: Match, row: int, loads: _Loads) -> None:
        self._start_row(seq, match, row)
        seq.wait_reason, seq.hit, seq.anchored_at = "", self._hit_by_tier(match, loads), -1
        if match.full_tokens > match.num_tokens and self._full:
            seq.branches.add(match.full_tokens)  # others share the prompt up to there: let the next one hit
        if len(loads.groups) == 0:
            self.tables.set_row(row, match.first, match.counts, match.device)
            self.tables.extend(row, match.num_tokens + 1)
            self.start_running(seq)
            return
        fresh, blocks = self.pools.take(loads.groups), match.device.copy()
        blocks[blocks == 0] = fresh
        self.tables.set_row(row, match.first, match.counts, blocks)
        self.tables.extend(row, match.num_tokens + 1)
        units = self._block_tokens[loads.groups] // self.spec.hash_tokens
        keys = seq.keys[(loads.at + 1) * units - 1]
        passed = self._passed(seq, loads.groups, loads.at)
        seq.ticket = self.connector.load(loads.groups, loads.hosts, fresh, keys, passed)
        seq.move(State.LOADING)
        self.tables.arrays.phase[row] = Phase.LOADING

    def _passed(self, seq: Tracked, groups: Ids, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [n]: hit blocks only this request is known to use, superseded by what it leaves at its own end.

        ``at`` [n] is each block's place in its group.
        """
        start, stop = self.tables.arrays.passed[seq.row]
        last = min(self._last_boundaries(len(seq.tokens)))
        gone = np.array([g.attention.first_visible(last) // g.block_tokens for g in self.spec.groups])
        passed: npt.NDArray[np.bool_] = self._is_local[groups] & (at < gone[groups]) & (start < stop)
        return passed

    def _keep_in_host(self, groups: Ids, blocks: Ids, passed: npt.NDArray[np.bool_]) -> None:
        """A hit on the device counts as use in the host tier too; what the host has evicted is stored again."""
        keys = self.pools.arrays.key[self.pools.entries(groups, blocks)]
        self.connector.touch_or_store(groups, blocks, keys, passed)

    def _start_row(self, seq: Tracked, match: Match, row: int) -> None:
        self.tables.reserve(len(seq.tokens) + 1)
        seq.row, seq.epoch, request = row, self.connector.epoch, seq.request
        state = self.tables.arrays.state[row]
        state[RowCol.COMPUTED] = match.num_tokens
        state[RowCol.TOTAL] = len(seq.tokens)
        state[RowCol.LIMIT] = min(len(request.tokens) + request.max_new_tokens, NO_LIMIT)
        state[RowCol.PUBLISH] = 1
        state[RowCol.GENERATED] = 0
        self.tables.arrays.passed[row] = 0 if self._is_only_hit(seq, match) else match.num_tokens, match.num_tokens
        self.tables.set_eos(row, request.eos_token_ids)

    def _is_only_hit(self, seq: Tracked, match: Match) -> bool:
        """Whether nobody else seems to want this boundary: a conversation that goes on.

        Its windows' content is then superseded by what the request will leave at the end of its own tokens, further on.
        """
        if match.num_tokens == 0 or len(self._full) == len(self.spec.groups):
            return False
        first = self._wanted.is_first(self._key(seq, match.num_tokens))
        return first and match.num_tokens < min(self._last_boundaries(len(seq.tokens)))

    def _hit_by_tier(self, match: Match, loads: _Loads) -> tuple[int, int]:
        """Tokens of the hit served by (device, host); a token that any group had to load counts as host."""
        if len(loads.at) == 0:
            return match.num_tokens, 0
        loaded = np.zeros(match.num_tokens // self.spec.hash_tokens, bool)
        for g, units in enumerate(self._block_tokens // self.spec.hash_tokens):
            at = loads.at[loads.groups == g]
            for i in range(units):
                loaded[at * units + i] = True
        host = int(loaded.sum()) * self.spec.hash_tokens
        return match.num_tokens - host, host

    def start_running(self, seq: Tracked) -> None:
        """The request has all that its hit promised."""
        seq.ticket = 0
        seq.move(State.RUNNING)
        self.tables.arrays.phase[seq.row] = Phase.FRESH
        if seq.cached_tokens is None:
            seq.cached_tokens = {"device": seq.hit[0], "host": seq.hit[1]}
            seq.queue_s = time.perf_counter() - seq.arrived_s
            self.counts.find(len(seq.request.tokens), *seq.hit)

    def seal_prefill(self, seq: Tracked, end: int) -> None:
        """Tokens up to ``end`` of a prefill are computed: names its full blocks, and anchors where its tokens end.

        Where they end, the row gets ready to decode.
        """
        t, row = self.tables.arrays, seq.row
        state = t.state[row]
        state[RowCol.PHASE] = Phase.PREFILL
        computed, known = int(state[RowCol.COMPUTED]), int(state[RowCol.TOTAL])
        if state[RowCol.PUBLISH]:
            for g, bt in self._full:
                self.tables.seal(row, g, computed // bt, end // bt, seq.keys)
            for boundary in [b for b in sorted(seq.branches) if computed < b <= end]:
                self.tables.seal_anchors(row, [boundary], seq.keys)
                self._wanted.is_first(self._key(seq, boundary))
                t.passed[row] = np.maximum(t.passed[row], boundary)
                seq.branches.discard(boundary)
            if end == known:
                self._seal_anchors(seq, end)
                self._pass_prompt(seq, end)
        if end == known:
            unit = self.spec.hash_tokens
            units = end // unit
            t.chain[row] = seq.keys[units - 1] if units else seq.text.root
            t.tail[row, : end - units * unit] = seq.tokens[units * unit : end]

    def _key(self, seq: Tracked, boundary: int) -> npt.NDArray[np.uint64]:
        """The name of the request's tokens up to ``boundary``, a positive multiple of hit_tokens."""
        key: npt.NDArray[np.uint64] = seq.keys[boundary // self.spec.hash_tokens - 1]
        return key

    def _pass_prompt(self, seq: Tracked, end: int) -> None:
        """Marks the prompt-end anchor as superseded, unless another request has wanted it."""
        boundaries = sorted(self._last_boundaries(end) - {0})
        if boundaries and any(self._key(seq, b) in self._wanted for b in boundaries):
            self.tables.arrays.passed[seq.row] = boundaries[-1]
        elif boundaries:
            self.tables.arrays.passed[seq.row, 1] = boundaries[-1]

    def _seal_anchors(self, seq: Tracked, computed: int) -> None:
        """Names what hits at the last boundary and at the last one before the last token need."""
        if seq.anchored_at == computed:
            return
        seq.anchored_at = computed
        self.tables.seal_anchors(seq.row, self._last_boundaries(computed), seq.keys)

    def _last_boundaries(self, num_tokens: int) -> set[int]:
        """Where a hit on all of these tokens ends, and one on the same tokens sent again, which leaves the last one."""
        unit = self.spec.hit_tokens
        return {num_tokens // unit * unit, max(0, num_tokens - 1) // unit * unit}

    def plan_stores(self) -> None:
        """In eager mode, stores of what has been sealed since the last call are planned."""
        sealed = self.tables.sealed.take()
        if self._store == "eager":
            self.connector.plan_stores(*sealed)

    def leave(self, seq: Tracked) -> None:
        """The request gives up its row: its tokens are kept, its content stays findable, its blocks become free."""
        t, row = self.tables.arrays, seq.row
        generated = t.generated[row, : t.num_generated[row]]
        if len(generated):
            seq.text.append(generated)
        if seq.state is State.RUNNING and t.publish[row]:
            self._seal_anchors(seq, int(t.computed[row]))
            self.plan_stores()
            self._cool_in_host(seq)
        self.tables.clear(row)
        seq.row = -1
        seq.ticket = 0
        seq.branches.clear()

    def disown(self, seq: Tracked) -> None:
        """The request has left, and its text's K and V are wrong: nothing that they name is found again."""
        units = self._block_tokens // self.spec.hash_tokens
        keys = [np.ascontiguousarray(seq.keys[n - 1 :: n]) for n in units.tolist()]
        groups = np.repeat(np.arange(len(keys), dtype=np.int32), [len(of) for of in keys])
        self.connector.disown(groups, np.concatenate(keys))

    def _cool_in_host(self, seq: Tracked) -> None:
        """Host copies of what the request has left at the end of its prompt are superseded as well."""
        start, stop = self.tables.arrays.passed[seq.row].tolist()
        if self._store != "eager" or start >= stop:
            return
        last = min(self._last_boundaries(int(self.tables.arrays.computed[seq.row])))
        for g, group in enumerate(self.spec.groups):
            bt, see = group.block_tokens, group.attention.first_visible
            first, end = max(start, see(stop)) // bt, min(stop, see(last)) // bt
            if self._is_local[g] and end > first:
                units = bt // self.spec.hash_tokens
                keys = np.ascontiguousarray(seq.keys[(first + 1) * units - 1 : end * units : units])
                self.connector.touch(np.full(len(keys), g, np.int32), keys, cold=True)

    def launder(self, margin_tokens: int) -> None:
        """Lazy mode: starts copies of the coldest blocks, so that a margin of clean ones is ready ahead of need.

        Only after blocks have changed hands: else there is nothing new to copy.
        """
        if self._store != "lazy":
            return
        seen = np.stack([self.pools.free, self.pools.column(Col.EMPTY), self.pools.column(Col.EVICTED)])
        if np.array_equal(seen, self._laundered):
            return
        self._laundered = seen
        margin = np.maximum(self.pools.owned // 20, -(-margin_tokens // self._block_tokens))
        lacking = margin - self.pools.column(Col.EMPTY) - self.pools.unused
        self.connector.launder(*self.pools.coldest_of(np.minimum(lacking, self.pools.owned)), ahead=True)

    def reset(self) -> None:
        """Forgets all cached content; what runs now goes on, but what it writes is not published any more."""
        self.connector.reset()
        self.tables.arrays.publish[:] = 0


def _blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)
