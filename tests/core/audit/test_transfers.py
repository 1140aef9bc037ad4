"""The audit can fail: planted damage to transfers: their states, fences, keys, bytes and deadlines."""

from __future__ import annotations

from collections.abc import Callable

import inside
import numpy as np
import pytest

from core.audit.damage import a_load, a_store, assert_seen, entry
from core.driving import STORE, Serving
from kvtier.cpu_offload.transfer import TransferState
from kvtier.pools.block_pool import Col, Mark, Place


def plant_fence_without_transfer(s: Serving) -> None:
    inside.pools(s.cache).arrays.fence[entry(s, Place.HELD)] = 999


def plant_fenced_block_without_fence(s: Serving) -> None:
    inside.pools(s.cache).arrays.fence[entry(s, Place.FENCED)] = 0


def plant_findable_block_under_a_load(s: Serving) -> None:
    load = a_load(s)
    inside.pools(s.cache).make_ready(load.groups[:1], load.device[:1])


def plant_two_stores_into_one_block(s: Serving) -> None:
    first, second = [t for t in inside.connector(s.cache).ledger.live() if t.direction is STORE][:2]
    second.host[0], second.groups[0] = first.host[0], first.groups[0]


def plant_load_of_what_a_store_writes(s: Serving) -> None:
    load = a_load(s)
    store = next(t for t in inside.connector(s.cache).ledger.live() if t.direction is STORE)
    load.host[0], load.groups[0] = store.host[0], store.groups[0]


def plant_settled_transfer_that_stays(s: Serving) -> None:
    inside.connector(s.cache).ledger.live()[0].state = TransferState.SETTLED


def plant_pending_key_without_transfer(s: Serving) -> None:
    inside.pools(s.cache).arrays.mark[entry(s, Place.CACHED)] = Mark.PENDING


def plant_transfer_outside_the_pool(s: Serving) -> None:
    inside.connector(s.cache).ledger.live()[0].host[0] = 25


def plant_bytes_that_never_leave_the_link(s: Serving) -> None:
    inside.count_store_bytes(s.cache, 1 << 30)


def plant_planned_store_that_nobody_submits(s: Serving) -> None:
    a_store(s).state = TransferState.PLANNED


def plant_copy_without_a_deadline(s: Serving) -> None:
    a_store(s).deadline_s = float("inf")


def plant_fence_of_another_store(s: Serving) -> None:
    a, at = inside.pools(s.cache).arrays, entry(s, Place.FENCED)
    others = [t for t in inside.connector(s.cache).ledger.live() if t.direction is STORE and t.ticket != a.fence[at]]
    a.fence[at] = others[0].ticket


def plant_store_without_its_fence(s: Serving) -> None:
    store = a_store(s)
    inside.pools(s.cache).unfence(store.groups, store.device, store.ticket)


def plant_store_whose_key_is_forgotten(s: Serving) -> None:
    store = a_store(s)
    inside.host(s.cache).unpublish(store.groups[:1], store.host[:1])


def plant_store_under_another_key(s: Serving) -> None:
    store = a_store(s)
    inside.host(s.cache).unpublish(store.groups[:1], store.host[:1])
    inside.host(s.cache).publish(store.groups[:1], store.host[:1], np.array([[1, 2]], np.uint64), Mark.PENDING)


def plant_load_of_another_key(s: Serving) -> None:
    load = a_load(s)
    inside.host(s.cache).unpublish(load.groups[:1], load.host[:1])
    inside.host(s.cache).publish(load.groups[:1], load.host[:1], np.array([[1, 2]], np.uint64), Mark.READY)


def plant_negative_number_of_loads(s: Serving) -> None:
    inside.connector(s.cache).counts.loaded_blocks = -1


def plant_fence_in_the_host_tier(s: Serving) -> None:
    block = entry(s, Place.CACHED, "host") - int(inside.host(s.cache).arrays.meta[0, Col.BASE])
    inside.host(s.cache).fence(np.zeros(1, np.int32), np.array([block], np.int32), 999)


def plant_order_behind_a_store_that_was_not_submitted(s: Serving) -> None:
    store = a_store(s)
    inside.pools(s.cache).unfence(store.groups, store.device, store.ticket)
    inside.count_store_bytes(s.cache, -store.num_bytes)
    inside.planned(s.cache).append(store)
    store.state, store.ordered = TransferState.PLANNED, True


def plant_bytes_that_are_not_those_of_the_blocks(s: Serving) -> None:
    a_load(s).num_bytes -= 8


def plant_transfers_of_one_ticket(s: Serving) -> None:
    first, second = [t for t in inside.connector(s.cache).ledger.live() if t.direction is STORE][:2]
    inside.pools(s.cache).unfence(second.groups, second.device, second.ticket)
    second.ticket = first.ticket
    inside.pools(s.cache).fence(second.groups, second.device, second.ticket)


def plant_load_that_has_failed_and_goes_on(s: Serving) -> None:
    inside.failed_loads(s.cache)[a_load(s).ticket] = "?"


def plant_deadline_that_never_comes(s: Serving) -> None:
    a_store(s).deadline_s = float("nan")


def plant_deadline_of_another_clock(s: Serving) -> None:
    a_store(s).deadline_s += 1e6


def plant_load_that_was_never_submitted(s: Serving) -> None:
    a_load(s).state = TransferState.PLANNED


def plant_store_of_what_a_load_writes(s: Serving) -> None:
    load, store, a = a_load(s), a_store(s), inside.pools(s.cache).arrays
    inside.pools(s.cache).unfence(store.groups, store.device, store.ticket)
    store.groups[0], store.device[0] = load.groups[0], load.device[0]
    a.fence[a.meta[store.groups, Col.BASE] + store.device] = store.ticket


def plant_stores_of_each_others_blocks(s: Serving) -> None:
    store = next(
        t for t in inside.connector(s.cache).ledger.live() if t.direction is STORE and np.bincount(t.groups)[0] > 1
    )
    store.device[:2] = store.device[1], store.device[0]


def plant_store_of_what_nobody_finds(s: Serving) -> None:
    store = a_store(s)
    inside.pools(s.cache).unpublish(store.groups[:1], store.device[:1])


def plant_store_that_no_writer_will_be_ordered_after(s: Serving) -> None:
    del inside.fencing(s.cache)[a_store(s).ticket]


def plant_stores_that_wait_for_a_link_that_hangs(s: Serving) -> None:
    a_store(s).state = TransferState.PLANNED
    inside.say_that_stores_hang(s.cache)


def plant_hanging_link_without_an_overdue_store(s: Serving) -> None:
    inside.say_that_stores_hang(s.cache)


def plant_overdue_transfers_that_nobody_has(s: Serving) -> None:
    inside.count_overdue(s.cache, 1)


PLANTED: dict[Callable[[Serving], None], list[str]] = {
    plant_fence_without_transfer: ["I17 the live stores ask for"],
    plant_fenced_block_without_fence: ["I17 FENCED without a fence"],
    plant_findable_block_under_a_load: ["I13 findable while a transfer writes it"],
    plant_two_stores_into_one_block: ["I17 transfers write it at once"],
    plant_load_of_what_a_store_writes: ["I17 a load reads what a store writes"],
    plant_settled_transfer_that_stays: ["I18 bytes are in flight", "I18 and still listed"],
    plant_pending_key_without_transfer: ["I19 PENDING, but no transfer holds it", "I1 counted as STUCK"],
    plant_transfer_outside_the_pool: ["I22 names a block outside its pool"],
    plant_bytes_that_never_leave_the_link: ["I18 bytes are in flight"],
    plant_planned_store_that_nobody_submits: ["I18 wait to be submitted"],
    plant_copy_without_a_deadline: ["I19 is in flight without a deadline, or with one too far away"],
    plant_fence_of_another_store: ["I17 the live stores ask for"],
    plant_store_that_no_writer_will_be_ordered_after: ["I17 are known to"],
    plant_store_without_its_fence: ["I17 the live stores ask for"],
    plant_store_whose_key_is_forgotten: ["I19 are not found by anybody"],
    plant_store_under_another_key: ["I14 carry other keys than its content's"],
    plant_load_of_another_key: ["I14 carry other keys than its content's"],
    plant_negative_number_of_loads: ["I25 is negative"],
    plant_fence_in_the_host_tier: ["I17 the live stores ask for"],
    plant_order_behind_a_store_that_was_not_submitted: ["I17 writers are ordered behind transfer"],
    plant_bytes_that_are_not_those_of_the_blocks: ["I18 bytes are not those of its blocks"],
    plant_transfers_of_one_ticket: ["I18 are not in the order of their plans"],
    plant_load_that_has_failed_and_goes_on: ["I18 has failed and goes on"],
    plant_deadline_that_never_comes: ["I19 is in flight without a deadline, or with one too far away"],
    plant_deadline_of_another_clock: ["I19 is in flight without a deadline, or with one too far away"],
    plant_load_that_was_never_submitted: ["I18 was never submitted"],
    plant_store_of_what_a_load_writes: ["I17 a load writes what a store reads"],
    plant_stores_of_each_others_blocks: ["I14 carry other keys than its content's"],
    plant_store_of_what_nobody_finds: ["I19 are not found by anybody"],
    plant_stores_that_wait_for_a_link_that_hangs: ["I19 wait for a link that hangs"],
    plant_hanging_link_without_an_overdue_store: ["I19 stores hang, and none is overdue"],
    plant_overdue_transfers_that_nobody_has: ["I18 transfers progress,"],
}


@pytest.mark.usefixtures("damaged", "unaudited")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_audit_sees_damage_to_transfers(plant):
    assert_seen(plant, PLANTED[plant])
