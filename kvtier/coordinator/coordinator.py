"""A request's life in the cache, all or nothing over the groups: match, hold, admit, run, leave.

Owns       the holdings of a request: its row, its blocks in every group, its load.
Promises   either every group gets its blocks or nothing changed. The check and the taking use the same numbers. Content
           that a request leaves behind stays findable. Keeps I4, I12.
Does not   decide which request is served, what fits (``room``) or what stays warm (``retention``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from kvtier.coordinator.compactor import Compactor
from kvtier.coordinator.counts import RequestCounts
from kvtier.coordinator.door import RemoteDoor
from kvtier.coordinator.eviction_watch import EvictionWatch
from kvtier.coordinator.match import Match, Matcher
from kvtier.coordinator.retention import Retention
from kvtier.coordinator.room import NO_LIMIT, Room
from kvtier.coordinator.sources import Loads, Sources, split
from kvtier.coordinator.tracked import State, Tracked
from kvtier.coordinator.trail import Mark, Trail
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.kinds import Kind
from kvtier.geometry.options import STORE_MODES
from kvtier.geometry.spec import CacheSpec
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.row_state import Phase, Publish, RowCol
from kvtier.machine.journal import Journal, Prefilled, Runs
from kvtier.pools.block_pool import BlockPools, Ids

_PHASE, _PREFILL = int(RowCol.PHASE), int(Phase.PREFILL)  # members of an enum cost a call each
_COMPUTED, _TOTAL, _PUBLISH = int(RowCol.COMPUTED), int(RowCol.TOTAL), int(RowCol.PUBLISH)


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
        journal: Journal,
    ) -> None:
        """``move`` copies blocks of a group to others on the device: (group, from, to)."""
        self.spec = spec
        self.pools = pools
        self.connector = connector
        self.chain = chain
        self.counts = RequestCounts(spec.names)
        """What has happened to requests so far."""
        self.journal = journal
        """The newest of it, event by event."""
        self._matcher = Matcher(pools, host)
        self._stores = StorePolicy(connector, pools, host)
        self._full = [
            (g, group.block_tokens) for g, group in enumerate(spec.groups) if group.attention.kind is Kind.FULL
        ]
        self._block_tokens = np.array([g.block_tokens for g in spec.groups], np.int64)
        self.door: RemoteDoor[Tracked] = RemoteDoor(connector, pools, self.match)
        """The way to the tier behind the host tier."""
        self._sources = Sources(spec)
        self._trail = Trail(spec)
        self.tables = BlockTables(spec, pools, 1)
        self.evictions = EvictionWatch(journal, self.tables, host)
        mode = STORE_MODES[store if host is not None else "off"]
        self._stores_full, self._feeds_remote = mode.when_full, mode.feeds_remote
        self.compactor = Compactor(self.tables, connector, self._stores, move, mode.before_eviction)
        """Moves blocks so that pools can exchange slabs."""
        self.room = Room(self.tables, connector, self._stores, self.compactor, self.counts, mode.before_eviction)
        """What fits."""
        self.retention = Retention(self.tables, host, self._stores, mode)
        """What stays warm."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """Where cached tokens may come from."""
        return ("device", "host") if self.door.remote is None else ("device", "host", "remote")

    def use_tables(self, num_rows: int) -> None:
        """Makes room for ``num_rows`` running requests; nothing may be running. Raises ``MemoryError``; then nothing
        changed."""
        self.tables.use_rows(num_rows)

    # --- what is asked ----------------------------------------------------------------------------

    def has_run(self, seq: Tracked) -> bool:
        """Whether a running request has computed a token since it was admitted (else it cannot be preempted, I10)."""
        return bool(self.tables.arrays.phase[seq.row] > Phase.FRESH)

    def common_prefix(self, seq: Tracked, other: Tracked) -> int:
        """Length of the prefix that ``other`` is still computing for both; 0 if waiting gains nothing.

        A multiple of hit_tokens.

        If ``other`` then keeps an anchor at the parting (``branches``), the wait ends in a hit in every group.
        """
        t, unit = self.tables.arrays, self.spec.hit_tokens
        if not seq.shares_prefix(other) or not t.publish[other.row]:
            return 0
        links = unit // self.spec.hash_tokens
        block = int(t.computed[other.row]) // unit  # the first block that is not full yet
        common = min(len(seq.tokens) - 1, len(other.tokens)) // unit
        if block >= common or not np.array_equal(
            seq.keys[(block + 1) * links - 1], other.keys[(block + 1) * links - 1]
        ):
            return 0
        low, high = block + 1, common  # chains are equal up to their parting: search by halves
        while low < high:
            middle = (low + high + 1) // 2
            if np.array_equal(seq.keys[middle * links - 1], other.keys[middle * links - 1]):
                low = middle
            else:
                high = middle - 1
        return low * unit

    def match(self, seq: Tracked, most: int = NO_LIMIT) -> Match:
        """The content of the request's tokens in both tiers, ``most`` tokens at most."""
        return self._matcher.match(self.tables, seq.keys, min(len(seq.tokens), most + 1), seq.use_host)

    # --- what changes -----------------------------------------------------------------------------

    def hold(self, match: Match) -> None:
        """Holds the match in both tiers until ``admit`` or ``let_go``. It stays, whatever requests leave or stores run
        meanwhile."""
        hit, loads = split(match)
        self.pools.acquire(*hit)
        self.connector.pin_host(loads.groups, loads.hosts)

    def let_go(self, match: Match) -> None:
        """Ends a ``hold``."""
        hit, loads = split(match)
        self.pools.release(*hit)
        self.connector.unpin_host(loads.groups, loads.hosts)

    def admit(self, seq: Tracked, match: Match, row: int) -> bool:
        """Gives the request its row, the held blocks of the hit and room for one token. Starts its load, and ends the
        hold.

        False if blocks that stores still read do not become free in time: then nothing is held.
        """
        clean = False
        try:
            clean = self.room.make_clean(self.room.admission_need(seq, match)[0], match)
        finally:
            if not clean:
                self.let_go(match)
        if not clean:
            return False
        hit, loads = split(match)  # blocks may have been moved
        self._fill_row(seq, match, row, loads)
        self.connector.unpin_host(loads.groups, loads.hosts)
        if match.num_tokens:
            self.retention.keep_in_host(seq, *hit, match.at[match.device > 0])
            if not seq.course.went_on_from:  # others want it too; it may be content that windows have passed
                self._offer(seq, [match.num_tokens])
        self.evictions.note(seq.request.request_id)
        return True

    def _fill_row(self, seq: Tracked, match: Match, row: int, loads: Loads) -> None:
        self._start_row(seq, match, row)
        seq.wait_reason, seq.hit, seq.anchored_at = "", self.hit_by_tier(match, seq), -1
        if match.full_tokens > match.num_tokens and self._full:
            seq.course.branches.add(match.full_tokens)  # others share the prompt up to there: let the next one hit
        self._note_partings(seq)
        if len(loads.groups) == 0:
            self.tables.set_row(row, match.first, match.counts, match.device)
            self.tables.extend(row, match.num_tokens + 1)
            self._note_admitted(seq, match, loads)
            self.start_running(seq)
            return
        fresh, blocks = self.pools.take(loads.groups), match.device.copy()
        blocks[blocks == 0] = fresh
        self.tables.set_row(row, match.first, match.counts, blocks)
        self.tables.extend(row, match.num_tokens + 1)
        units = self._block_tokens[loads.groups] // self.spec.hash_tokens
        keys = seq.keys[(loads.at + 1) * units - 1]
        superseded = self.retention.superseded(seq, loads.groups, loads.at)
        seq.ticket = self.connector.load(loads.groups, loads.hosts, fresh, keys, superseded)
        seq.move(State.LOADING)
        self.tables.arrays.phase[row] = Phase.LOADING
        self._note_admitted(seq, match, loads)

    def _note_partings(self, seq: Tracked) -> None:
        """The steps of the request's row keep its states where others part from its prompt."""
        if self.tables.has_states:
            self.tables.set_partings(seq.row, seq.course.branches | seq.course.told)

    def keep_state(self, seq: Tracked, boundary: int, rows: Ids) -> None:
        """Others part from the running request at this boundary, which it has not computed. It keeps its state there.

        If the step being made passes it, a block is taken for it, unless ``rows`` may lack it. Without one the state is
        not kept there, and others find less.
        """
        self._note_partings(seq)
        for g in self.tables.gaps(seq.row, boundary) if self.tables.has_states else ():
            need = np.zeros(len(self.spec.groups), np.int64)
            need[g] = 1
            used = self.pools.live + self.room.promised(rows) + self.room.next_blocks(rows)
            if self.pools.fits(used + need) and self.room.make_clean(need):
                self.tables.fill_gap(seq.row, g, boundary, int(self.pools.take(np.array([g], np.int32))[0]))

    def _start_row(self, seq: Tracked, match: Match, row: int) -> None:
        self.tables.reserve(len(seq.tokens) + 1)
        seq.row, seq.epoch, request = row, self.connector.ledger.epoch, seq.request
        state = self.tables.arrays.state[row]
        state[RowCol.COMPUTED] = match.num_tokens
        state[RowCol.TOTAL] = len(seq.tokens)
        state[RowCol.LIMIT] = min(len(request.tokens) + request.max_new_tokens, NO_LIMIT)
        state[RowCol.PUBLISH] = Publish.TOLD
        state[RowCol.GENERATED] = 0
        self.retention.start(seq, match, self.door.remote is None)
        if seq.course.is_guest:
            state[RowCol.PUBLISH] = Publish.UNTOLD
        self.tables.set_eos(row, request.eos_token_ids)

    def hit_by_tier(self, match: Match, seq: Tracked | None = None) -> tuple[int, int, int]:
        """``Sources.by_tier`` of a hit."""
        return self._sources.by_tier(match, split(match)[1], seq)

    def _note_admitted(self, seq: Tracked, match: Match, loads: Loads) -> None:
        if self.journal.is_on:
            gaps = self._trail.gaps(seq.keys, len(seq.tokens), match)
            self.journal.add(seq.request.request_id, self._sources.admitted(seq, match, loads, gaps))

    def _mark(self, seq: Tracked, boundaries: Iterable[int], end: str, is_kept: bool) -> None:
        """Notes for explanations that the request's tokens up to these boundaries are there now."""
        if self.journal.is_on:
            for boundary in boundaries:
                self._trail.mark(seq.keys, boundary, Mark(self.journal.count, end, is_kept))

    def start_running(self, seq: Tracked) -> None:
        """All content of the request's hit is on the device."""
        seq.ticket = 0
        seq.move(State.RUNNING)
        self.journal.tell(seq.request.request_id, Runs)
        self.tables.arrays.phase[seq.row] = Phase.FRESH
        if seq.cached_tokens is None:
            seq.cached_tokens = dict(zip(self.tiers, seq.hit, strict=False))
            seq.queue_s = time.perf_counter() - seq.arrived_s
            self.counts.find(len(seq.request.tokens), *seq.hit)

    def seal_prefill(self, seq: Tracked, end: int) -> None:
        """Tokens up to ``end`` of a prefill are computed: names its full blocks, and the anchors at the end of its
        tokens.

        If ``end`` is the end of the known tokens, the row gets ready to decode.
        """
        t, row, course = self.tables.arrays, seq.row, seq.course
        state = t.state[row]
        state[_PHASE] = _PREFILL
        computed, known = int(state[_COMPUTED]), int(state[_TOTAL])
        if state[_PUBLISH]:
            for g, bt in self._full:
                self.tables.seal(row, g, computed // bt, end // bt, seq.keys)
            if course.branches or course.told:
                parted = self.retention.seal_branches(seq, computed, end)
                self._mark(seq, parted, "parting", True)
                self._offer(seq, self.retention.keeping.shared(course, seq.keys, parted))
                self._note_partings(seq)
            if end > course.named_from:
                self.retention.seal_passing(seq, end)
            if end == known:
                self.retention.seal_prompt(seq, end)
                self._mark(seq, self.retention.keeping.last_boundaries(end), "prompt", seq.anchored_at == end)
                self._offer(seq, self.retention.keeping.last_boundaries(end))
        if end == known:
            self.journal.tell(seq.request.request_id, Prefilled, end)
            unit = self.spec.hash_tokens
            units = end // unit
            t.chain[row] = seq.keys[units - 1] if units else seq.text.root
            t.tail[row, : end - units * unit] = seq.tokens[units * unit : end]

    def _offer(self, seq: Tracked, boundaries: Iterable[int]) -> None:
        """Offers to the remote what hits at these boundaries need, once its copies in the host are there."""
        if self._feeds_remote:
            self.door.offer(seq.keys, boundaries, seq.seek)

    def plan_stores(self) -> None:
        """If blocks are stored when full, plans stores of the blocks sealed since the last call."""
        sealed = self.tables.sealed.take()
        if self._stores_full:
            self._stores.plan(*sealed)

    def leave(self, seq: Tracked, comes_back: bool) -> None:
        """The request gives up its row: its tokens are kept, its content stays findable, its blocks become free."""
        t, row = self.tables.arrays, seq.row
        generated = t.generated[row, : t.num_generated[row]]
        if len(generated):
            seq.text.append(generated)
        end, is_sealed = int(t.computed[row]), seq.state is State.RUNNING and bool(t.publish[row])
        if is_sealed:
            self.retention.seal_end(seq, comes_back)
            self.plan_stores()
            self.retention.cool_in_host(seq)
            kind = "answer" if end > len(seq.request.tokens) else "prompt"
            self._mark(seq, self.retention.keeping.last_boundaries(end), kind, seq.anchored_at == end)
            self._offer(seq, self.retention.keeping.last_boundaries(end))
            if seq.course.went_on_from:
                self.door.supersede(seq.keys, seq.course.went_on_from, self.retention.keeping.boundaries.is_wanted)
        self.tables.clear(row)
        if self.tables.has_states and is_sealed and not comes_back:
            self.retention.cool_states(seq, end)
        seq.row = -1
        seq.ticket = 0
        seq.course.branches.clear()
        seq.course.told.clear()

    def distrust(self, seq: Tracked) -> None:
        """The request fails: what it has computed since its last step is not sealed."""
        if seq.row >= 0:
            self.tables.arrays.publish[seq.row] = Publish.OUTDATED

    def disown(self, seq: Tracked) -> None:
        """The request has left, and its text's K and V are wrong: no content under its keys is found again."""
        units = self._block_tokens // self.spec.hash_tokens
        keys = [np.ascontiguousarray(seq.keys[n - 1 :: n]) for n in units.tolist()]
        groups = np.repeat(np.arange(len(keys), dtype=np.int32), [len(of) for of in keys])
        self.connector.disown(groups, np.concatenate(keys))
        self.door.disown(seq.keys)

    def reset(self) -> None:
        """Forgets all cached content. Running requests go on, but the blocks that they write are not published any
        more."""
        self.connector.reset()
        self.door.reset()
        self._trail.clear()
        self.tables.arrays.publish[:] = Publish.OUTDATED
