"""The audit can fail: for each invariant, a planted bug that it must report, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from core.driving import LOAD, STORE, HeldEngine, Serving, assert_same, prompt, snapshot
from kvtier import ChunkedLocal, FullAttention, InvariantBroken, KVCache, SlidingWindow
from kvtier.audit import AuditLevel
from kvtier.coordinator.request import State
from kvtier.cpu_offload.transfer import Transfer, TransferState
from kvtier.gpu_pool.block_pool import Col, Mark, Place
from kvtier.gpu_pool.block_table import Geo, Phase
from kvtier.testing import canary_spec

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


@pytest.fixture
def serving():
    """Blocks in every place: two requests run, a load and a store are under way, others wait, content is cached."""
    sizes = dict.fromkeys(GROUPS, 24)
    with KVCache(
        canary_spec(GROUPS),
        device_blocks=sizes,
        host_blocks=sizes,
        copy_engine=lambda memory: HeldEngine(memory, []),
    ) as cache:
        made = Serving(cache, max_batched_tokens=64)
        made.serve("hosted", prompt(0, 17), 1)
        cache._pools.forget_all()
        made.serve("cached", prompt(1, 13), 1)
        made.engine.hold = {LOAD, STORE}
        made.add("A", prompt(2, 14), 20)
        made.add("B", prompt(3, 14), 20)
        made.step()
        made.add("loading", prompt(0, 17), 3)
        made.add("ended", prompt(4, 13), 1)
        made.step()
        made.step()
        made.add("too large for now", prompt(5, 60), 1)
        made.step()
        assert cache.audit() == []
        yield made


def entry(serving: Serving, place: Place, tier: str = "device", g: int = 0) -> int:
    """Some entry of the flat arrays in this place."""
    pools = serving.cache._pools if tier == "device" else serving.cache._host
    base, rows = int(pools.arrays.meta[g, Col.BASE]), int(pools.arrays.meta[g, Col.ROWS])
    return base + int(np.flatnonzero(pools.arrays.place[base : base + rows] == place)[0])


def row_of(serving: Serving, name: str = "A") -> int:
    return next(s.row for s in serving.scheduler.running if s.request.request_id == name)


def a_store(serving: Serving) -> Transfer:
    """A store under way."""
    return next(t for t in serving.cache._connector.live() if t.direction is STORE)


def plant_counter(s: Serving) -> None:
    s.cache._pools.arrays.meta[1, Col.EMPTY] += 1


def plant_host_counter(s: Serving) -> None:
    s.cache._host.arrays.meta[2, Col.CACHED] -= 1


def plant_duplicate_in_the_free_list(s: Serving) -> None:
    a, b = s.cache._pools.arrays, entry(s, Place.EMPTY) - int(s.cache._pools.arrays.meta[0, Col.BASE])
    a.blocks["link"][int(a.meta[0, Col.BASE]) + b] = b
    a.meta[0, Col.FIRST_EMPTY] = b


def plant_lost_block(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.place[entry(s, Place.EMPTY)] = Place.HELD


def plant_owner_of_the_null_block(s: Serving) -> None:
    s.cache._pools.arrays.refs[0] = 1


def plant_reference_too_many(s: Serving) -> None:
    s.cache._pools.arrays.refs[entry(s, Place.HELD)] += 1


def plant_reference_too_few(s: Serving) -> None:
    s.cache._pools.arrays.refs[entry(s, Place.HELD)] -= 1


def plant_host_pin_missing(s: Serving) -> None:
    s.cache._host.arrays.refs[entry(s, Place.HELD, "host")] -= 1


def plant_double_free(s: Serving) -> None:
    row, t = row_of(s), s.cache._coordinator.tables
    s.cache._pools.release(np.zeros(1, np.int32), t.table(0)[row, :1].copy())


def plant_stale_tail(s: Serving) -> None:
    t, row = s.cache._coordinator.tables, row_of(s)
    t.table(0)[row, int(t.arrays.hi[0, row])] = 3


def plant_stale_window(s: Serving) -> None:
    t, row = s.cache._coordinator.tables, row_of(s)
    assert t.arrays.lo[1, row] > 0
    t.table(1)[row, 0] = 3


def plant_null_in_a_row(s: Serving) -> None:
    s.cache._coordinator.tables.table(0)[row_of(s), 1] = 0


def plant_id_outside_the_pool(s: Serving) -> None:
    s.cache._coordinator.tables.table(0)[row_of(s), 1] = 25


def plant_block_twice_in_a_row(s: Serving) -> None:
    table, row = s.cache._coordinator.tables.table(0), row_of(s)
    table[row, 1] = table[row, 0]


def plant_fence_without_transfer(s: Serving) -> None:
    s.cache._pools.arrays.fence[entry(s, Place.HELD)] = 999


def plant_fenced_block_without_fence(s: Serving) -> None:
    s.cache._pools.arrays.fence[entry(s, Place.FENCED)] = 0


def plant_key_on_an_empty_block(s: Serving) -> None:
    s.cache._pools.arrays.mark[entry(s, Place.EMPTY)] = Mark.READY


def plant_cached_block_without_key(s: Serving) -> None:
    s.cache._pools.arrays.mark[entry(s, Place.CACHED)] = Mark.NONE


def plant_hole_in_the_index(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.slots[np.flatnonzero(a.slots)[0]] = 0


def plant_two_blocks_of_one_key(s: Serving) -> None:
    a, base = s.cache._pools.arrays, int(s.cache._pools.arrays.meta[0, Col.BASE])
    first, second = np.flatnonzero(a.mark[base : base + int(a.meta[0, Col.ROWS])])[:2]
    a.key[base + second] = a.key[base + first]


def plant_forgotten_row(s: Serving) -> None:
    s.scheduler._roster.running.pop(0)


def plant_free_row_with_blocks(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.phase[row_of(s)] = Phase.FREE


def plant_waiting_request_with_a_row(s: Serving) -> None:
    s.scheduler.waiting[0].row = 5


def plant_wrong_phase(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.phase[row_of(s, "loading")] = Phase.DECODE


def plant_nothing_left_to_compute(s: Serving) -> None:
    t, row = s.cache._coordinator.tables.arrays, row_of(s)
    t.computed[row] = t.total[row]


def plant_running_request_that_thinks_it_waits(s: Serving) -> None:
    s.scheduler.running[0].state = State.LOADING


def plant_wrong_service_order(s: Serving) -> None:
    s.scheduler._roster.running.reverse()


def plant_hit_between_boundaries(s: Serving) -> None:
    seq = next(s for s in s.scheduler.running if s.request.request_id == "loading")
    s.cache._coordinator.tables.arrays.computed[seq.row] -= 1


def plant_findable_block_that_is_not_full(s: Serving) -> None:
    t = s.cache._coordinator.tables
    row = row_of(s)
    a, last = s.cache._pools.arrays, int(t.arrays.hi[0, row]) - 1
    assert t.arrays.computed[row] < 4 * (last + 1)
    a.mark[int(a.meta[0, Col.BASE]) + t.table(0)[row, last]] = Mark.READY


def plant_findable_block_under_a_load(s: Serving) -> None:
    load = next(t for t in s.cache._connector.live() if t.direction is LOAD)
    s.cache._pools.make_ready(load.groups[:1], load.device[:1])


def plant_key_of_other_content(s: Serving) -> None:
    a, t = s.cache._pools.arrays, s.cache._coordinator.tables
    a.key[int(a.meta[0, Col.BASE]) + int(t.table(0)[row_of(s), 0]), 0] ^= np.uint64(1)


def plant_two_owners_of_a_block_being_filled(s: Serving) -> None:
    t = s.cache._coordinator.tables
    a, b = row_of(s, "A"), row_of(s, "B")
    last, group = int(t.arrays.hi[0, a]) - 1, np.zeros(1, np.int32)
    s.cache._pools.acquire(group, t.table(0)[a, last : last + 1])
    t.table(0)[b, int(t.arrays.hi[0, b]) - 1] = t.table(0)[a, last]


def plant_full_group_that_lets_go(s: Serving) -> None:
    t, row = s.cache._coordinator.tables, row_of(s)
    s.cache._pools.release(np.zeros(1, np.int32), t.table(0)[row, :1].copy())
    t.table(0)[row, 0] = 0
    t.arrays.lo[0, row] = 1


def plant_two_stores_into_one_block(s: Serving) -> None:
    first, second = [t for t in s.cache._connector.live() if t.direction is STORE][:2]
    second.host[0], second.groups[0] = first.host[0], first.groups[0]


def plant_load_of_what_a_store_writes(s: Serving) -> None:
    load = next(t for t in s.cache._connector.live() if t.direction is LOAD)
    store = next(t for t in s.cache._connector.live() if t.direction is STORE)
    load.host[0], load.groups[0] = store.host[0], store.groups[0]


def plant_settled_transfer_that_stays(s: Serving) -> None:
    s.cache._connector.live()[0].state = TransferState.SETTLED


def plant_pending_key_without_transfer(s: Serving) -> None:
    s.cache._pools.arrays.mark[entry(s, Place.CACHED)] = Mark.PENDING


def plant_transfer_outside_the_pool(s: Serving) -> None:
    s.cache._connector.live()[0].host[0] = 25


def plant_more_ids_than_memory(s: Serving) -> None:
    s.cache._arena.rows[0] -= 1


def plant_wrong_gauge(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.EMPTY] += 1


def plant_request_that_nobody_knows(s: Serving) -> None:
    s.scheduler._inbox._known.clear()
    for transfer in s.cache._connector.live():
        transfer.state = TransferState.EXPIRED


def plant_bytes_that_never_leave_the_link(s: Serving) -> None:
    s.cache._connector._store_bytes += 1 << 30


def plant_planned_store_that_nobody_submits(s: Serving) -> None:
    a_store(s).state = TransferState.PLANNED


def plant_copy_without_a_deadline(s: Serving) -> None:
    a_store(s).deadline_s = float("inf")


def plant_block_quarantined_for_nothing(s: Serving) -> None:
    pools, group = s.cache._pools, np.zeros(1, np.int32)
    block = pools.take(group)
    pools.quarantine(group, block)
    pools.release(group, block)


def plant_host_block_quarantined_for_nothing(s: Serving) -> None:
    pools, group = s.cache._host, np.zeros(1, np.int32)
    block = pools.take(group)
    pools.quarantine(group, block)
    pools.release(group, block)


def plant_fence_of_another_store(s: Serving) -> None:
    a, at = s.cache._pools.arrays, entry(s, Place.FENCED)
    others = [t for t in s.cache._connector.live() if t.direction is STORE and t.ticket != a.fence[at]]
    a.fence[at] = others[0].ticket


def plant_store_without_its_fence(s: Serving) -> None:
    store = a_store(s)
    s.cache._pools.unfence(store.groups, store.device, store.ticket)


def plant_request_that_waits_for_no_load(s: Serving) -> None:
    next(seq for seq in s.scheduler.running if seq.state is State.LOADING).ticket = 999


def plant_request_that_runs_before_its_load_has_landed(s: Serving) -> None:
    seq = next(seq for seq in s.scheduler.running if seq.state is State.LOADING)
    seq.state = State.RUNNING
    s.cache._coordinator.tables.arrays.phase[seq.row] = Phase.PREFILL


def plant_window_that_lets_go_of_what_is_seen(s: Serving) -> None:
    t, row = s.cache._coordinator.tables, row_of(s)
    lo, hi = int(t.arrays.lo[1, row]), int(t.arrays.hi[1, row])
    s.cache._pools.release(np.ones(hi - lo, np.int32), t.table(1)[row, lo:hi].copy())
    t.table(1)[row, lo:hi] = 0
    t.arrays.lo[1, row] = hi


def plant_row_that_lost_its_end(s: Serving) -> None:
    t, row = s.cache._coordinator.tables, row_of(s)
    last = int(t.arrays.hi[0, row]) - 1
    s.cache._pools.release(np.zeros(1, np.int32), t.table(0)[row, last : last + 1].copy())
    t.table(0)[row, last] = 0
    t.arrays.hi[0, row] = last


def plant_rows_that_lead_to_each_other(s: Serving) -> None:
    roster, a, b = s.scheduler.roster, row_of(s, "A"), row_of(s, "B")
    roster._by_row[a], roster._by_row[b] = roster._by_row[b], roster._by_row[a]


def plant_free_row_that_somebody_has(s: Serving) -> None:
    s.scheduler.roster._free_rows[-1] = row_of(s)


def plant_rows_of_an_older_step(s: Serving) -> None:
    s.scheduler.roster._rows = s.scheduler.roster.rows()[:-1].copy()


def plant_chain_of_other_content(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.chain[row_of(s)] ^= np.uint64(1)


def plant_tail_of_other_tokens(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.tail[row_of(s)] += 1


def plant_last_token_of_somebody_else(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.last[row_of(s)] += 1


def plant_later_end(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.limit[row_of(s)] += 1


def plant_other_eos(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.eos[row_of(s)] = 3


def plant_forgotten_sample(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.num_generated[row_of(s)] -= 1


def plant_wrong_key_of_a_generated_block(s: Serving) -> None:
    s.steps_until(lambda: s.known("A") > 24)
    blocks, group = s.cache._coordinator.tables.table(0)[row_of(s), 4:5].copy(), np.zeros(1, np.int32)
    s.cache._pools.unpublish(group, blocks)
    s.cache._pools.publish(group, blocks, np.array([[1, 2]], np.uint64), Mark.READY)


def plant_keys_of_other_tokens(s: Serving) -> None:
    seq = next(seq for seq in s.scheduler.waiting)
    other = next(seq for seq in s.scheduler.running if seq.request.request_id == "A")
    other.text.keys = seq.keys[: len(other.keys)]


def plant_store_whose_key_is_forgotten(s: Serving) -> None:
    store = a_store(s)
    s.cache._host.unpublish(store.groups[:1], store.host[:1])


def plant_store_under_another_key(s: Serving) -> None:
    store = a_store(s)
    s.cache._host.unpublish(store.groups[:1], store.host[:1])
    s.cache._host.publish(store.groups[:1], store.host[:1], np.array([[1, 2]], np.uint64), Mark.PENDING)


def plant_load_of_another_key(s: Serving) -> None:
    load = next(t for t in s.cache._connector.live() if t.direction is LOAD)
    s.cache._host.unpublish(load.groups[:1], load.host[:1])
    s.cache._host.publish(load.groups[:1], load.host[:1], np.array([[1, 2]], np.uint64), Mark.READY)


def plant_request_in_no_queue(s: Serving) -> None:
    s.scheduler._roster.waiting.pop()


def plant_peak_below_what_is_held(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.PEAK_HELD] = 0


def plant_negative_number_of_evictions(s: Serving) -> None:
    s.cache._host.arrays.meta[2, Col.EVICTED] = -1


def plant_peak_above_what_there_is(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.PEAK_HELD] = 25


def plant_negative_number_of_loads(s: Serving) -> None:
    s.cache._connector.counts.loaded_blocks = -1


def plant_negative_number_of_preemptions(s: Serving) -> None:
    s.scheduler.reports.num_preemptions = -1


def plant_negative_number_of_prompt_tokens(s: Serving) -> None:
    s.scheduler.reports.prompt_tokens["host"] = -1


def plant_more_cached_tokens_than_a_prompt_has(s: Serving) -> None:
    s.scheduler.running[0].cached_tokens = {"device": 14, "host": 0}


def plant_wrong_number_of_keys(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.KEYED] += 1


def plant_cached_block_under_another_key(s: Serving) -> None:
    s.cache._pools.arrays.key[entry(s, Place.CACHED), 1] ^= np.uint64(1 << 63)


def plant_unknown_mark(s: Serving) -> None:
    s.cache._pools.arrays.mark[entry(s, Place.CACHED)] = 3


def plant_unknown_place(s: Serving) -> None:
    s.cache._pools.arrays.place[entry(s, Place.HELD, g=2)] = 6


def plant_cached_block_twice_in_the_ring(s: Serving) -> None:
    a = s.cache._pools.arrays
    start, size, tail = (int(a.meta[0, c]) for c in (Col.RING_BASE, Col.RING_SIZE, Col.TAIL))
    a.ring[start + tail % size] = entry(s, Place.CACHED)
    a.meta[0, Col.TAIL] += 1


def plant_sweep_behind_the_head(s: Serving) -> None:
    meta = s.cache._pools.arrays.meta[0]
    meta[Col.CLOSED] = meta[Col.SWEEP] = meta[Col.HEAD] - 1


def plant_sweep_that_passed_a_block(s: Serving) -> None:
    meta = s.cache._pools.arrays.meta[0]
    meta[Col.CLOSED], meta[Col.SWEEP] = meta[Col.HEAD], meta[Col.TAIL]


def plant_fence_in_the_host_tier(s: Serving) -> None:
    block = entry(s, Place.CACHED, "host") - int(s.cache._host.arrays.meta[0, Col.BASE])
    s.cache._host.fence(np.zeros(1, np.int32), np.array([block], np.int32), 999)


def plant_order_behind_a_store_that_was_not_submitted(s: Serving) -> None:
    store = a_store(s)
    s.cache._pools.unfence(store.groups, store.device, store.ticket)
    s.cache._connector._store_bytes -= store.num_bytes
    s.cache._connector._planned.append(store)
    store.state, store.ordered = TransferState.PLANNED, True


def plant_bytes_that_are_not_those_of_the_blocks(s: Serving) -> None:
    next(t for t in s.cache._connector.live() if t.direction is LOAD).num_bytes -= 8


def plant_transfers_of_one_ticket(s: Serving) -> None:
    first, second = [t for t in s.cache._connector.live() if t.direction is STORE][:2]
    s.cache._pools.unfence(second.groups, second.device, second.ticket)
    second.ticket = first.ticket
    s.cache._pools.fence(second.groups, second.device, second.ticket)


def plant_load_that_has_failed_and_goes_on(s: Serving) -> None:
    s.cache._connector._failed_loads[next(t for t in s.cache._connector.live() if t.direction is LOAD).ticket] = "?"


def plant_deadline_that_never_comes(s: Serving) -> None:
    a_store(s).deadline_s = float("nan")


def plant_deadline_of_another_clock(s: Serving) -> None:
    a_store(s).deadline_s += 1e6


def plant_unknown_phase(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.phase[row_of(s)] = 4


def plant_decode_that_thinks_it_reads_its_prompt(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.phase[row_of(s)] = Phase.PREFILL


def plant_longer_window(s: Serving) -> None:
    s.cache._coordinator.tables.arrays.geometry[1, Geo.SPAN] += 1


def plant_names_of_an_older_step(s: Serving) -> None:
    s.scheduler.roster._names = ["gone", *s.scheduler.roster.all_ids()[1:]]


def plant_request_that_waits_for_a_twin_that_is_gone(s: Serving) -> None:
    twin = next(seq for seq in s.scheduler.running if seq.request.request_id == "B")
    gone = dataclasses.replace(twin, branches={8})
    s.scheduler.waiting[0].twin, s.scheduler.waiting[0].twin_until = gone, 8


def plant_load_that_nobody_looks_after(s: Serving) -> None:
    s.scheduler.roster._loading.clear()


def plant_request_that_waits_for_blocks_that_are_there(s: Serving) -> None:
    waiting = s.scheduler.waiting[0]
    waiting.short_at = waiting.short_of.copy()


PLANTED: dict[Callable[[Serving], None], str] = {
    plant_counter: "I1",
    plant_host_counter: "I1",
    plant_duplicate_in_the_free_list: "I1",
    plant_lost_block: "I1",
    plant_owner_of_the_null_block: "I1",
    plant_reference_too_many: "I2",
    plant_reference_too_few: "I2",
    plant_host_pin_missing: "I2",
    plant_double_free: "I2",
    plant_forgotten_row: "I2",
    plant_wrong_phase: "I2",
    plant_running_request_that_thinks_it_waits: "I2",
    plant_waiting_request_with_a_row: "I9",
    plant_wrong_service_order: "I9",
    plant_hit_between_boundaries: "I11",
    plant_findable_block_that_is_not_full: "I13",
    plant_findable_block_under_a_load: "I13",
    plant_key_of_other_content: "I14",
    plant_full_group_that_lets_go: "I15",
    plant_two_owners_of_a_block_being_filled: "I16",
    plant_two_stores_into_one_block: "I17",
    plant_load_of_what_a_store_writes: "I17",
    plant_settled_transfer_that_stays: "I18",
    plant_pending_key_without_transfer: "I19",
    plant_transfer_outside_the_pool: "I22",
    plant_more_ids_than_memory: "I22",
    plant_wrong_gauge: "I25",
    plant_request_that_nobody_knows: "I30",
    plant_nothing_left_to_compute: "I11",
    plant_stale_tail: "I15",
    plant_stale_window: "I15",
    plant_null_in_a_row: "I15",
    plant_id_outside_the_pool: "I15",
    plant_block_twice_in_a_row: "I16",
    plant_fence_without_transfer: "I17",
    plant_fenced_block_without_fence: "I17",
    plant_key_on_an_empty_block: "I21",
    plant_cached_block_without_key: "I21",
    plant_hole_in_the_index: "I21",
    plant_two_blocks_of_one_key: "I21",
    plant_free_row_with_blocks: "I27",
    plant_bytes_that_never_leave_the_link: "I18",
    plant_planned_store_that_nobody_submits: "I18",
    plant_copy_without_a_deadline: "I19",
    plant_block_quarantined_for_nothing: "I1",
    plant_host_block_quarantined_for_nothing: "I1",
    plant_fence_of_another_store: "I17",
    plant_store_without_its_fence: "I17",
    plant_request_that_waits_for_no_load: "I19",
    plant_request_that_runs_before_its_load_has_landed: "I13",
    plant_window_that_lets_go_of_what_is_seen: "I15",
    plant_row_that_lost_its_end: "I15",
    plant_rows_that_lead_to_each_other: "I2",
    plant_free_row_that_somebody_has: "I2",
    plant_rows_of_an_older_step: "I9",
    plant_chain_of_other_content: "I14",
    plant_tail_of_other_tokens: "I14",
    plant_last_token_of_somebody_else: "I11",
    plant_later_end: "I11",
    plant_other_eos: "I11",
    plant_forgotten_sample: "I11",
    plant_wrong_key_of_a_generated_block: "I14",
    plant_keys_of_other_tokens: "I14",
    plant_store_whose_key_is_forgotten: "I19",
    plant_store_under_another_key: "I14",
    plant_load_of_another_key: "I14",
    plant_request_in_no_queue: "I30",
    plant_peak_below_what_is_held: "I25",
    plant_negative_number_of_evictions: "I25",
    plant_peak_above_what_there_is: "I25",
    plant_negative_number_of_loads: "I25",
    plant_negative_number_of_preemptions: "I25",
    plant_negative_number_of_prompt_tokens: "I25",
    plant_more_cached_tokens_than_a_prompt_has: "I25",
    plant_wrong_number_of_keys: "I21",
    plant_cached_block_under_another_key: "I21",
    plant_unknown_mark: "I1",
    plant_unknown_place: "I1",
    plant_cached_block_twice_in_the_ring: "I1",
    plant_sweep_behind_the_head: "I1",
    plant_sweep_that_passed_a_block: "I1",
    plant_fence_in_the_host_tier: "I17",
    plant_order_behind_a_store_that_was_not_submitted: "I17",
    plant_bytes_that_are_not_those_of_the_blocks: "I18",
    plant_transfers_of_one_ticket: "I18",
    plant_load_that_has_failed_and_goes_on: "I18",
    plant_deadline_that_never_comes: "I19",
    plant_deadline_of_another_clock: "I19",
    plant_unknown_phase: "I2",
    plant_decode_that_thinks_it_reads_its_prompt: "I2",
    plant_longer_window: "I23",
    plant_names_of_an_older_step: "I2",
    plant_request_that_waits_for_a_twin_that_is_gone: "I30",
    plant_request_that_waits_for_blocks_that_are_there: "I30",
    plant_load_that_nobody_looks_after: "I30",
}


@pytest.mark.parametrize(("plant", "invariant"), PLANTED.items(), ids=lambda x: getattr(x, "__name__", x))
def test_the_audit_sees_a_planted_bug(serving, plant, invariant):
    plant(serving)
    found = serving.cache.audit()
    assert invariant in {violation.invariant for violation in found}, found
    assert all(violation.detail for violation in found)


def test_the_audit_changes_nothing(serving):
    before = snapshot(serving.cache)
    serving.cache.audit()
    assert_same(before, snapshot(serving.cache))


def test_the_audit_reports_all_violations_at_once(serving):
    plant_counter(serving)
    plant_stale_tail(serving)
    plant_fence_without_transfer(serving)
    assert {"I1", "I15", "I17"} <= {violation.invariant for violation in serving.cache.audit()}


def test_the_audit_of_a_cache_without_scheduler_or_host_is_empty(make_cache):
    assert make_cache(GROUPS, 8).audit() == []


def test_without_a_host_tier_no_key_waits_for_its_content(make_serving):
    serving = make_serving(GROUPS, 24)
    serving.serve("A", prompt(0, 13), 2)
    mark, at = serving.cache._pools.arrays.mark, entry(serving, Place.CACHED)
    mark[at] = Mark.PENDING
    assert {v.invariant for v in serving.cache.audit()} == {"I19"}
    mark[at] = Mark.READY


def test_nothing_is_held_once_nothing_is_left_to_do(make_serving):
    serving = make_serving(GROUPS, 24, 24, hold=[])
    serving.serve("A", prompt(0, 13), 2)
    block = serving.cache._pools.take(np.zeros(1, np.int32))
    assert {v.invariant for v in serving.cache.audit()} == {"I2", "I27"}
    serving.cache._pools.release(np.zeros(1, np.int32), block)


# --- arrays of the step under way: (array, what is done to it, invariant) --------------------------

STEP_DAMAGE = {
    "table outside the pool": (lambda view: view.block_table.__setitem__((0, 0), 99), "I15"),
    "table names a free block": (lambda view: view.block_table.__setitem__((0, 0), 24), "I15"),
    "two tokens in one slot": (lambda view: view.slot_mapping.__setitem__(0, view.slot_mapping[1]), "I15"),
    "token in the null block": (lambda view: view.slot_mapping.__setitem__(0, 2), "I16"),
    "indices outside the pool": (lambda view: view.paged()[2].__setitem__(0, 99), "I15"),
    "last page too long": (lambda view: view.paged()[3].__setitem__(0, 5), "I15"),
    "pages that go backwards": (lambda view: view.paged()[1].__setitem__(1, 0), "I15"),
    "null where the mask looks": (lambda view: view.block_table.__setitem__((0, 0), 0), "I15"),
    "a block of another request": (lambda view: view.block_table.__setitem__((0, 0), view.block_table[1, 0]), "I15"),
    "a page of another request": (lambda view: view.paged()[2].__setitem__(0, view.paged()[2][-1]), "I15"),
    "the next slot but one": (lambda view: view.slot_mapping.__setitem__(-1, view.slot_mapping[-1] + 1), "I15"),
    "another token": (lambda view: view._step.token_ids.__setitem__(0, 96), "I15"),
}


@pytest.mark.parametrize("what", STEP_DAMAGE)
def test_the_audit_reads_the_arrays_of_the_step_under_way(make_serving, what):
    serving = make_serving(GROUPS, 24)
    serving.add("A", prompt(0, 7), 2)
    serving.add("B", prompt(1, 7), 2)
    step = serving.scheduler.schedule()
    damage, invariant = STEP_DAMAGE[what]
    damage(step.group("full"))
    assert invariant in {violation.invariant for violation in serving.cache.audit()}
    for end in (lambda: serving.scheduler.commit(step, [1, 2]), lambda: serving.scheduler.cancel(step)):
        with pytest.raises(InvariantBroken, match="after the forward"):
            end()
    serving.cache.close()


# --- levels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", AuditLevel)
def test_levels(serving, level):
    """1 sees what counters can show, 2 sees everything, 0 nothing."""
    serving.cache.audit_level = level
    plant_reference_too_many(serving)
    for seen_at, plant in ((AuditLevel.FULL, None), (AuditLevel.COUNTS, plant_forgotten_row)):
        if plant is not None:
            plant(serving)
        if level >= seen_at:
            with pytest.raises(InvariantBroken, match="broken after commit") as caught:
                serving.cache.check_invariants("commit")
            assert caught.value.moment == "commit"
            assert "I2" in {violation.invariant for violation in caught.value.violations}
        else:
            serving.cache.check_invariants("commit")


def test_a_long_list_of_violations_is_cut_in_the_message_and_whole_in_the_error():
    problem = InvariantBroken("schedule", list(range(50)))
    assert "... and 30 more" in str(problem)
    assert len(problem.violations) == 50
