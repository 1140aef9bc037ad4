"""The audit can fail: planted damage to requests and rows: tables, counters, names, who waits for what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import inside
import numpy as np
import pytest

from core.audit.damage import a_store, assert_seen, row_of
from core.driving import Serving
from kvtier.coordinator.keeping import Course
from kvtier.coordinator.tracked import ForTransfer, ForTwin, State
from kvtier.cpu_offload.transfer import TransferState
from kvtier.gpu_pool.row_state import Geo, Phase
from kvtier.pools.block_pool import Col, Mark


def plant_double_free(s: Serving) -> None:
    row, t = row_of(s), inside.coordinator(s.cache).tables
    inside.pools(s.cache).release(np.zeros(1, np.int32), t.table(0)[row, :1].copy())


def plant_stale_tail(s: Serving) -> None:
    t, row = inside.coordinator(s.cache).tables, row_of(s)
    t.table(0)[row, int(t.arrays.hi[0, row])] = 3


def plant_stale_window(s: Serving) -> None:
    t, row = inside.coordinator(s.cache).tables, row_of(s)
    assert t.arrays.lo[1, row] > 0
    t.table(1)[row, 0] = 3


def plant_null_in_a_row(s: Serving) -> None:
    inside.coordinator(s.cache).tables.table(0)[row_of(s), 1] = 0


def plant_id_outside_the_pool(s: Serving) -> None:
    inside.coordinator(s.cache).tables.table(0)[row_of(s), 1] = 25


def plant_block_twice_in_a_row(s: Serving) -> None:
    table, row = inside.coordinator(s.cache).tables.table(0), row_of(s)
    table[row, 1] = table[row, 0]


def plant_forgotten_row(s: Serving) -> None:
    s.scheduler.roster.running.pop(0)


def plant_free_row_with_blocks(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.phase[row_of(s)] = Phase.FREE


def plant_waiting_request_with_a_row(s: Serving) -> None:
    s.scheduler.waiting[0].row = 5


def plant_wrong_phase(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.phase[row_of(s, "loading")] = Phase.DECODE


def plant_nothing_left_to_compute(s: Serving) -> None:
    t, row = inside.coordinator(s.cache).tables.arrays, row_of(s)
    t.computed[row] = t.total[row]


def plant_running_request_that_thinks_it_waits(s: Serving) -> None:
    s.scheduler.running[0].state = State.LOADING


def plant_wrong_service_order(s: Serving) -> None:
    s.scheduler.roster.running.reverse()


def plant_hit_between_boundaries(s: Serving) -> None:
    seq = next(s for s in s.scheduler.running if s.request.request_id == "loading")
    inside.coordinator(s.cache).tables.arrays.computed[seq.row] -= 1


def plant_findable_block_that_is_not_full(s: Serving) -> None:
    t = inside.coordinator(s.cache).tables
    row = row_of(s)
    a, last = inside.pools(s.cache).arrays, int(t.arrays.hi[0, row]) - 1
    assert t.arrays.computed[row] < 4 * (last + 1)
    a.mark[int(a.meta[0, Col.BASE]) + t.table(0)[row, last]] = Mark.READY


def plant_key_of_other_content(s: Serving) -> None:
    a, t = inside.pools(s.cache).arrays, inside.coordinator(s.cache).tables
    a.key[int(a.meta[0, Col.BASE]) + int(t.table(0)[row_of(s), 0]), 0] ^= np.uint64(1)


def plant_two_owners_of_a_block_being_filled(s: Serving) -> None:
    t = inside.coordinator(s.cache).tables
    a, b = row_of(s, "A"), row_of(s, "B")
    last, group = int(t.arrays.hi[0, a]) - 1, np.zeros(1, np.int32)
    inside.pools(s.cache).acquire(group, t.table(0)[a, last : last + 1])
    t.table(0)[b, int(t.arrays.hi[0, b]) - 1] = t.table(0)[a, last]


def plant_full_group_that_lets_go(s: Serving) -> None:
    t, row = inside.coordinator(s.cache).tables, row_of(s)
    inside.pools(s.cache).release(np.zeros(1, np.int32), t.table(0)[row, :1].copy())
    t.table(0)[row, 0] = 0
    t.arrays.lo[0, row] = 1


def plant_request_that_nobody_knows(s: Serving) -> None:
    inside.forget_requests(s.scheduler)
    inside.count_overdue(s.cache, inside.connector(s.cache).ledger.num_live)
    for transfer in inside.connector(s.cache).ledger.live():
        transfer.state = TransferState.EXPIRED


def plant_request_that_waits_for_no_load(s: Serving) -> None:
    next(seq for seq in s.scheduler.running if seq.state is State.LOADING).ticket = 999


def plant_request_that_runs_before_its_load_has_landed(s: Serving) -> None:
    seq = next(seq for seq in s.scheduler.running if seq.state is State.LOADING)
    seq.state = State.RUNNING
    inside.coordinator(s.cache).tables.arrays.phase[seq.row] = Phase.PREFILL


def plant_window_that_lets_go_of_what_is_seen(s: Serving) -> None:
    t, row = inside.coordinator(s.cache).tables, row_of(s)
    lo, hi = int(t.arrays.lo[1, row]), int(t.arrays.hi[1, row])
    inside.pools(s.cache).release(np.ones(hi - lo, np.int32), t.table(1)[row, lo:hi].copy())
    t.table(1)[row, lo:hi] = 0
    t.arrays.lo[1, row] = hi


def plant_row_that_lost_its_end(s: Serving) -> None:
    t, row = inside.coordinator(s.cache).tables, row_of(s)
    last = int(t.arrays.hi[0, row]) - 1
    inside.pools(s.cache).release(np.zeros(1, np.int32), t.table(0)[row, last : last + 1].copy())
    t.table(0)[row, last] = 0
    t.arrays.hi[0, row] = last


def plant_rows_that_lead_to_each_other(s: Serving) -> None:
    roster, a, b = s.scheduler.roster, row_of(s, "A"), row_of(s, "B")
    holders = inside.by_row(roster)
    holders[a], holders[b] = holders[b], holders[a]


def plant_free_row_that_somebody_has(s: Serving) -> None:
    inside.free_rows(s.scheduler.roster)[-1] = row_of(s)


def plant_rows_of_an_older_step(s: Serving) -> None:
    inside.keep_rows(s.scheduler.roster, s.scheduler.roster.rows()[:-1].copy())


def plant_chain_of_other_content(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.chain[row_of(s)] ^= np.uint64(1)


def plant_tail_of_other_tokens(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.tail[row_of(s)] += 1


def plant_last_token_of_somebody_else(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.last[row_of(s)] += 1


def plant_later_end(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.limit[row_of(s)] += 1


def plant_other_eos(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.eos[row_of(s)] = 3


def plant_forgotten_sample(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.num_generated[row_of(s)] -= 1


def plant_wrong_key_of_a_generated_block(s: Serving) -> None:
    s.steps_until(lambda: s.known("A") > 24)
    blocks, group = inside.coordinator(s.cache).tables.table(0)[row_of(s), 4:5].copy(), np.zeros(1, np.int32)
    inside.pools(s.cache).unpublish(group, blocks)
    inside.pools(s.cache).publish(group, blocks, np.array([[1, 2]], np.uint64), Mark.READY)


def plant_keys_of_other_tokens(s: Serving) -> None:
    seq = next(seq for seq in s.scheduler.waiting)
    other = next(seq for seq in s.scheduler.running if seq.request.request_id == "A")
    other.text.keys = seq.keys[: len(other.keys)]


def plant_request_in_no_queue(s: Serving) -> None:
    s.scheduler.roster.waiting.pop()


def plant_negative_number_of_preemptions(s: Serving) -> None:
    s.scheduler.reports.num_preemptions = -1


def plant_negative_number_of_prompt_tokens(s: Serving) -> None:
    s.scheduler.reports.prompt_tokens["host"] = -1


def plant_more_cached_tokens_than_a_prompt_has(s: Serving) -> None:
    s.scheduler.running[0].cached_tokens = {"device": 14, "host": 0}


def plant_unknown_phase(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.phase[row_of(s)] = len(Phase)


def plant_decode_that_thinks_it_reads_its_prompt(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.phase[row_of(s)] = Phase.PREFILL


def plant_longer_window(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.geometry[1, Geo.SPAN] += 1


def plant_names_of_an_older_step(s: Serving) -> None:
    inside.keep_names(s.scheduler.roster, ["gone", *s.scheduler.roster.names()[1:]])


def plant_window_of_a_kept_end_that_goes_first(s: Serving) -> None:
    row, seq = row_of(s), next(seq for seq in s.scheduler.running if seq.row == row_of(s))
    seq.course.kept.add(8)
    inside.coordinator(s.cache).tables.arrays.superseded[row, :2] = 4, 8


def plant_request_that_waits_for_a_twin_that_is_gone(s: Serving) -> None:
    twin = next(seq for seq in s.scheduler.running if seq.request.request_id == "B")
    gone = dataclasses.replace(twin, course=Course(branches={8}))
    s.scheduler.waiting[0].waits_for = ForTwin(gone, 8)


def plant_load_that_nobody_looks_after(s: Serving) -> None:
    inside.loading(s.scheduler.roster).clear()


def plant_running_request_that_has_ended(s: Serving) -> None:
    s.scheduler.running[0].state = State.FINISHED


def plant_blocks_named_by_other_links(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.geometry[0, Geo.UNITS] += 1


def plant_tables_that_overlap(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.geometry[1, Geo.OFFSET] -= 1


def plant_nameless_block_that_two_rows_share(s: Serving) -> None:
    """Its references add up, and nobody finds it; one of the two reads the other's tokens."""
    pools, group = inside.pools(s.cache), np.zeros(1, np.int32)
    block = pools.take(group)
    pools.acquire(group, block)
    for name in ("A", "B"):
        table, row = inside.coordinator(s.cache).tables.table(0), row_of(s, name)
        pools.release(group, table[row, :1].copy())
        table[row, 0] = block[0]


def plant_row_that_publishes_what_a_reset_has_outdated(s: Serving) -> None:
    s.cache.reset()
    inside.coordinator(s.cache).tables.arrays.publish[row_of(s)] = 1


def plant_row_that_publishes_nothing_for_no_reason(s: Serving) -> None:
    inside.coordinator(s.cache).tables.arrays.publish[row_of(s)] = 0


def plant_request_that_waits_for_a_copy_of_something_else(s: Serving) -> None:
    s.scheduler.waiting[0].waits_for = ForTransfer(inside.connector(s.cache).ledger.num_settled)


def plant_request_that_waits_for_an_end_too_many(s: Serving) -> None:
    s.scheduler.waiting[0].waits_for = ForTransfer(inside.connector(s.cache).ledger.num_settled + 1)


def plant_request_that_waits_and_will_never_fit(s: Serving) -> None:
    s.scheduler.waiting[0].text.append(np.ones(1000, np.int32))


def plant_loading_request_that_waits_for_a_store(s: Serving) -> None:
    next(seq for seq in s.scheduler.running if seq.state is State.LOADING).ticket = a_store(s).ticket


def plant_store_of_a_block_that_is_being_filled(s: Serving) -> None:
    store, row, a = a_store(s), row_of(s), inside.pools(s.cache).arrays
    inside.pools(s.cache).unfence(store.groups, store.device, store.ticket)
    tables = inside.coordinator(s.cache).tables
    store.groups[0], store.device[0] = 0, tables.table(0)[row, int(tables.arrays.computed[row]) // 4]
    a.fence[a.meta[store.groups, Col.BASE] + store.device] = store.ticket


PLANTED: dict[Callable[[Serving], None], list[str]] = {
    plant_double_free: ["I2 references do not equal owners and pins"],
    plant_stale_tail: ["I15 an id outside the held entries"],
    plant_stale_window: ["I15 an id outside the held entries"],
    plant_null_in_a_row: ["I15 a held entry is null or outside the pool"],
    plant_id_outside_the_pool: ["I15 a held entry is null or outside the pool"],
    plant_block_twice_in_a_row: ["I16 a block holds two places of one request"],
    plant_forgotten_row: ["I2 rows are free", "I2 running requests have rows"],
    plant_free_row_with_blocks: ["I27 free but holds blocks"],
    plant_waiting_request_with_a_row: ["I9 waits but holds row"],
    plant_wrong_phase: ["I2 but its row is"],
    plant_nothing_left_to_compute: ["I11 computed of"],
    plant_running_request_that_thinks_it_waits: ["I2 but its row is"],
    plant_wrong_service_order: ["I9 requests are not in service order"],
    plant_hit_between_boundaries: ["I11 a hit of"],
    plant_findable_block_that_is_not_full: ["I13 findable, but not every slot is written"],
    plant_key_of_other_content: ["I14 carries another content's key"],
    plant_two_owners_of_a_block_being_filled: ["I16 a block that is still being filled has several owners"],
    plant_full_group_that_lets_go: ["I15 has let go of", "I15 are seen"],
    plant_request_that_nobody_knows: [
        "I30 under way, but has_work() is False",
        "I19 PENDING, but no transfer brings it",
    ],
    plant_request_that_waits_for_no_load: ["I19 waits for blocks of group"],
    plant_request_that_runs_before_its_load_has_landed: ["I13 runs on a block that a transfer is still writing"],
    plant_window_that_lets_go_of_what_is_seen: ["I15 are seen"],
    plant_row_that_lost_its_end: ["I15 are seen"],
    plant_rows_that_lead_to_each_other: ["I2 rows lead to other requests than those that have them"],
    plant_free_row_that_somebody_has: ["I2 are free"],
    plant_rows_of_an_older_step: ["I9 rows in service order are"],
    plant_chain_of_other_content: ["I14 the next block will be named after other content"],
    plant_tail_of_other_tokens: ["I14 the next block will be named after other content"],
    plant_last_token_of_somebody_else: ["I11 a decode that does not compute the last token"],
    plant_later_end: ["I11 its row does not say how long it is, or when it ends"],
    plant_other_eos: ["I11 its row does not say how long it is, or when it ends"],
    plant_forgotten_sample: ["I11 a decode that does not compute the last token"],
    plant_wrong_key_of_a_generated_block: ["I14 carries another content's key"],
    plant_keys_of_other_tokens: ["I14 its keys are not those of its tokens"],
    plant_request_in_no_queue: ["I30 or they were reported and go on"],
    plant_negative_number_of_preemptions: ["I25 is negative"],
    plant_negative_number_of_prompt_tokens: ["I25 is negative"],
    plant_more_cached_tokens_than_a_prompt_has: ["I25 tokens were cached"],
    plant_unknown_phase: ["I2 there is no phase"],
    plant_decode_that_thinks_it_reads_its_prompt: ["I2 has sampled tokens, but its row is"],
    plant_longer_window: ["I23 the spec says"],
    plant_names_of_an_older_step: ["I2 rows lead to other requests than those that have them"],
    plant_window_of_a_kept_end_that_goes_first: ["I31 are superseded, and its hit at 8 needs them"],
    plant_request_that_waits_for_a_twin_that_is_gone: ["I30 which does not run"],
    plant_load_that_nobody_looks_after: ["I30 waits for a load whose end nobody will notice"],
    plant_running_request_that_has_ended: ["I2 has row"],
    plant_blocks_named_by_other_links: ["I23 the spec says"],
    plant_tables_that_overlap: ["I15 the tables of the groups do not divide up the"],
    plant_nameless_block_that_two_rows_share: ["I14 hold it for different tokens"],
    plant_row_that_publishes_what_a_reset_has_outdated: ["I13 what it writes, admitted in epoch"],
    plant_row_that_publishes_nothing_for_no_reason: ["I13 what it writes, admitted in epoch"],
    plant_request_that_waits_for_a_copy_of_something_else: ["I30 waits for a transfer that brings nothing of its own"],
    plant_request_that_waits_for_an_end_too_many: ["I30 waits until more transfers have ended than have"],
    plant_request_that_waits_and_will_never_fit: ["I7 slabs, which are more than the pools have"],
    plant_loading_request_that_waits_for_a_store: ["I19 waits for store"],
    plant_store_of_a_block_that_is_being_filled: ["I17 a store still reads a block that is being filled"],
}


@pytest.mark.usefixtures("damaged", "unaudited")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_audit_sees_damage_to_requests(plant):
    assert_seen(plant, PLANTED[plant])
