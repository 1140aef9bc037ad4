"""Stores in flight are bounded; where they hang, or the engine refuses them, everything else goes on."""

from __future__ import annotations

import math

import inside
import pytest

from core.driving import LOAD, STORE, HeldEngine, Serving, prompt
from kvtier import FullAttention, KVCache
from kvtier.cpu_offload import store_queue
from kvtier.machine.stats import LinkStats
from kvtier.testing import SimulatedEngine, canary_spec

FULL = {"full": (FullAttention(), 4)}
LENGTH = 25


def test_stores_in_flight_are_bounded_and_the_rest_follow(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 3 * 128)
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    serving = make_serving(FULL, 64, 64, hold=[STORE])
    serving.add("A", prompt(0, 61), 1)
    serving.step()
    assert len(serving.engine.live) == 3
    assert serving.cache.stats().transfers.live == 15
    serving.engine.release()
    serving.run()
    assert serving.cache.stats().transfers.stored_blocks == 15


@pytest.mark.parametrize(("blocks_a_second", "most"), [(None, 3), (2, 3), (5, 5)])
def test_stores_in_flight_follow_a_link_that_was_measured(make_serving, monkeypatch, blocks_a_second, most):
    gbps = blocks_a_second and blocks_a_second * 128 / 1e9
    link = LinkStats(gbps, None, transfers=0, blocks=0, copies=0, submit_s=0.0)
    monkeypatch.setattr(HeldEngine, "link_stats", lambda engine: link, raising=False)
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 3 * 128)
    monkeypatch.setattr(store_queue, "STORE_S_IN_FLIGHT", 1.0)
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    serving = make_serving(FULL, 64, 64, hold=[STORE])
    serving.add("A", prompt(0, 61), 1)
    serving.step()
    assert len(serving.engine.live) == most
    serving.engine.release()
    serving.run()
    assert serving.cache.stats().transfers.stored_blocks == 15


def test_no_store_is_of_more_bytes_than_a_transfer_may_have(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 4 * 128)
    serving = make_serving(FULL, 64, 64, hold=[STORE])
    serving.add("A", prompt(0, 61), 1)
    serving.step()
    assert [len(t.groups) for t in serving.engine.submitted] == [4, 4, 4, 3]
    assert [t.num_bytes for t in serving.engine.submitted] == [4 * 128, 4 * 128, 4 * 128, 3 * 128]
    serving.engine.release()
    serving.run()


@pytest.fixture
def hanging(make_serving, monkeypatch) -> Serving:
    """Three stores of a block are overdue; the other 12 blocks of A's prompt waited for the link."""
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 3 * 128)
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    serving = make_serving(FULL, 64, 64, hold=[STORE], deadline_s=5.0)
    serving.add("A", prompt(0, 61), 1)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.step()
    assert serving.cache.stats().transfers.expired == 3
    return serving


def test_who_waits_for_blocks_that_a_hanging_copy_keeps_ends_with_capacity(make_serving):
    """Nothing runs, and nothing is under way that will end: it would wait for ever, and who comes behind it too."""
    serving = make_serving(FULL, 8, 64, hold=[STORE], deadline_s=5.0)
    serving.add("A", prompt(0, 21), 1)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.step()
    assert serving.cache.stats().device["full"].quarantined == 5
    serving.add("B", prompt(1, 25), 1)
    serving.add("C", prompt(2, 5), 1)
    serving.steps_until(lambda: {"B", "C"} <= set(serving.finished), limit=10)
    assert serving.finished["B"].finish_reason == "capacity"
    assert serving.finished["C"].finish_reason == "length"
    serving.engine.release()
    serving.run()


def test_while_stores_hang_nothing_is_stored(hanging):
    """What came behind them on the link would hang as well, a deadline each, and its blocks be out of circulation."""
    connector = inside.connector(hanging.cache)
    assert connector.stores_hang
    assert connector.ledger.num_live == 3, "what waited for the link does not wait any more"
    hanging.add("B", prompt(1, 21), 1)
    hanging.step()
    assert len(hanging.engine.submitted) == 3
    transfers, host = hanging.cache.stats().transfers, hanging.cache.stats().host["full"]
    assert (transfers.dropped_blocks, transfers.live) == (12 + 5, 3)
    assert (host.held, host.quarantined, host.cached) == (0, 3, 0)
    hanging.engine.release()


def test_stores_that_have_hung_do_not_use_up_the_bytes_in_flight(hanging):
    first, second, third = hanging.engine.live
    hanging.engine.end(first, second)
    hanging.step()
    assert inside.connector(hanging.cache).stores_hang, "the third may be what the link is at"
    hanging.engine.end(third)
    hanging.step()
    assert not inside.connector(hanging.cache).stores_hang
    hanging.add("B", prompt(1, 21), 1)
    hanging.step()
    assert len(hanging.engine.submitted) == 3 + 3
    hanging.engine.release()
    hanging.run()
    assert hanging.cache.stats().transfers.stored_blocks == 5


def test_a_store_that_is_lost_stops_no_others_where_later_ones_end(hanging):
    """As on an engine that makes several copies at a time."""
    first, *others = hanging.engine.live
    hanging.engine.end(*others)
    hanging.step()
    assert not inside.connector(hanging.cache).stores_hang
    hanging.add("B", prompt(1, 21), 1)
    hanging.step()
    assert len(hanging.engine.submitted) == 3 + 3
    assert first in hanging.engine.live
    hanging.engine.release()


def test_a_reset_ends_what_hangs(hanging):
    """Else one lost copy would be the end of storing, where nothing else is under way that could end."""
    hanging.cache.reset_prefix_cache()
    assert not inside.connector(hanging.cache).stores_hang
    hanging.add("B", prompt(1, 21), 1)
    hanging.step()
    assert len(hanging.engine.submitted) == 3 + 3
    hanging.engine.release()
    hanging.run()


def test_a_store_that_the_engine_refuses_says_nothing_of_the_link(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    serving = make_serving(FULL, 64, 64, hold=[STORE], deadline_s=5.0)
    submit = serving.engine.submit

    def refuses_the_second(transfer):
        if transfer.ticket == 2:
            raise RuntimeError("refused")
        submit(transfer)

    monkeypatch.setattr(serving.engine, "submit", refuses_the_second)
    serving.add("A", prompt(0, 9), 1)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.step()
    assert serving.cache.stats().transfers.failed_stores == 1
    assert inside.connector(serving.cache).stores_hang
    serving.engine.release()
    serving.run()


def test_a_store_that_is_refused_as_a_writer_is_to_be_ordered_behind_it_is_no_obstacle(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 1)
    serving = make_serving(FULL, 6, 64, hold=[STORE])
    for i in range(2):
        serving.add(f"{i}", prompt(i, 12), 1)
        serving.step()
    serving.add("C", prompt(2, 9), 1)
    serving.step()  # behind the store that is under way
    assert inside.connector(serving.cache).books.planned[0] == inside.connector(serving.cache).books.fencing[0]

    def broken(*_):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(serving.engine, "order_after", broken)
    monkeypatch.setattr(serving.engine, "submit", broken)
    serving.add("D", prompt(3, 9), 1)
    serving.step()
    transfers = serving.cache.stats().transfers
    assert transfers.expired == 0
    assert transfers.failed_stores > 0
    serving.engine.release()
    serving.run()


def test_what_waits_for_a_hanging_link_is_no_reason_to_wait(make_serving, monkeypatch):
    """``schedule`` waits for the store that hangs, not for those behind it: their blocks are free at once."""
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 1)
    serving = make_serving(FULL, 16, 64, hold=[STORE], deadline_s=30.0)
    serving.engine.can_order = False
    for i in range(3):
        serving.add(f"{i}", prompt(i, 21), 1)
        serving.step()
    assert len(inside.connector(serving.cache).books.planned) == 2
    serving.add("D", prompt(3, 33), 1)
    step = serving.step()
    assert (step.num_tokens, serving.engine.clock_s) == (33, 30.0)
    assert serving.cache.stats().device["full"].quarantined == 5
    serving.engine.release()
    serving.run()


def test_a_load_that_has_landed_while_schedule_waited_for_a_store_is_not_overdue(make_serving, monkeypatch):
    serving = make_serving(FULL, 8, 64, hold=[], deadline_s=30.0, on_load_error="fail")
    serving.serve("A", prompt(0, 9), 1)
    serving.serve("flood", prompt(1, 31), 1)  # A's prompt is in the host tier only
    serving.engine.hold, serving.engine.can_order = {STORE, LOAD}, False
    serving.add("again", prompt(0, 9), 1)
    serving.step()  # its load is under way
    serving.engine.clock_s = 4.0
    serving.add("B", prompt(2, 9), 1)
    serving.step()  # and B's store, which hangs
    (load,) = [t for t in serving.engine.live.values() if t.direction is LOAD]
    order_after = serving.engine.order_after

    def lands_meanwhile(tickets, timeout_s):
        if load.ticket in serving.engine.live:
            serving.engine.end(load.ticket)
        return order_after(tickets, timeout_s)

    monkeypatch.setattr(serving.engine, "order_after", lands_meanwhile)
    serving.add("C", prompt(3, 17), 1)
    serving.step()
    assert serving.engine.clock_s >= 34.0, "nothing was waited for"
    assert serving.cache.stats().transfers.expired == 1, "the store"
    serving.engine.release()
    assert serving.run()["again"].finish_reason == "length"


def test_a_writer_that_cannot_be_ordered_is_no_end_of_the_step(make_serving, monkeypatch):
    """The engine raises where it should order writers behind a store: as if that had not ended."""
    serving = make_serving(FULL, 6, 64, hold=[STORE])
    for i in range(2):
        serving.add(f"{i}", prompt(i, 12), 1)
        serving.step()

    def broken(tickets, timeout_s):
        raise RuntimeError("cudaStreamWaitEvent")

    monkeypatch.setattr(serving.engine, "order_after", broken)
    serving.add("C", [*prompt(0, 8), 7, 7, 7, 7], 1)
    serving.step()
    assert serving.cache.stats().transfers.expired == 2
    serving.engine.release()
    serving.run()


@pytest.mark.parametrize("gbps", [0.0, -1.0, math.inf, math.nan, None])
def test_what_an_engine_says_of_its_link_may_be_nonsense(gbps):
    class Told(SimulatedEngine):
        def link_stats(self):
            return LinkStats(gbps, gbps, 0, 0, 0, 0.0)

    spec = canary_spec({"full": (FullAttention(), 4)})
    with KVCache(spec, device_blocks={"full": 8}, host_blocks={"full": 8}, copy_engine=Told) as cache:
        assert inside.most_in_flight(cache) == store_queue.STORE_BYTES_IN_FLIGHT


def test_a_planned_store_whose_block_is_wanted_is_submitted_first(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 1)
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    serving = make_serving(FULL, 8, 64, hold=[STORE])
    serving.add("A", prompt(0, 29), 1)
    serving.step()
    serving.add("B", prompt(1, 29), 1)
    serving.step()
    assert "B" in serving.finished
    serving.engine.release()
    serving.run()
    inside.pools(serving.cache).forget_all()
    assert serving.serve("A again", prompt(0, 29), 1).cached_tokens["host"] == 28


def test_what_the_host_cannot_take_is_dropped_and_counted(make_serving):
    serving = make_serving(FULL, 16, 2, hold=[STORE])
    serving.add("A", prompt(0, LENGTH), 1)
    serving.step()
    assert serving.cache.stats().transfers.dropped_blocks == 4
    serving.engine.release()
    serving.run()
    stats = serving.cache.stats()
    assert stats.host["full"].cached == 2
    assert stats.transfers.stored_bytes == 2 * stats.host["full"].block_bytes
