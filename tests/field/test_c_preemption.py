"""Section C, entry 5: preemptions that free nothing."""

from __future__ import annotations

import pytest
from core.driving import STORE, prompt, scheduled
from field.hosted import FULL, land

from kvtier import FullAttention, SlidingWindow
from kvtier.cpu_offload import store_queue
from kvtier.testing import expected_tokens


def all_at_a_boundary(make_serving, **options):
    """A, B and C fill the pool, each is about to need one more block, and a store reads all that they hold."""
    serving = make_serving(FULL, 12, 40, hold=[STORE], deadline_s=5.0, **options)
    serving.engine.can_order = False
    for k, name in enumerate("ABC"):
        serving.add(name, prompt(k, 16), 8)
    serving.step()
    assert serving.cache.stats().device["full"].held == 12
    return serving


def test_c5_vllm_49674_nobody_is_preempted_for_blocks_that_would_be_quarantined(make_serving):
    """Their stores are overdue: whoever gives such blocks up gives nobody anything."""
    serving = all_at_a_boundary(make_serving)
    serving.engine.clock_s = 6.0
    for _ in range(4):
        serving.step()
    assert serving.scheduler.reports.num_preemptions == 0
    land(serving)
    serving.run()


@pytest.mark.parametrize("blocks", [1, 12])
def test_c5_vllm_49674_a_link_that_hangs_costs_one_victim_and_not_all(make_serving, monkeypatch, blocks):
    """Whether a store still ends is known only after its deadline; what is overdue by then costs nobody more."""
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128 * blocks)
    serving = all_at_a_boundary(make_serving)
    assert len(serving.engine.live) == 12 // blocks
    serving.step()
    assert serving.scheduler.reports.num_preemptions <= 1
    land(serving)
    serving.run()


def test_c5_vllm_49674_one_whose_blocks_would_all_be_quarantined_is_spared_beside_the_victim(make_serving, monkeypatch):
    """A lacks a block. C is younger than B, but the store of all that C holds is overdue."""
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128 * 4)
    serving = all_at_a_boundary(make_serving)
    *landed, hangs = sorted(serving.engine.live)
    serving.engine.end(*landed)
    serving.engine.clock_s = 6.0
    assert scheduled(serving.step()) == {"A": 1, "C": 1}
    assert [s.request.request_id for s in serving.scheduler.waiting] == ["B"]
    serving.engine.end(hangs)
    land(serving)
    serving.run()


@pytest.mark.parametrize("rows", [8, 1])
def test_c5_victims_leave_a_hit_whose_store_is_overdue(make_serving, rows):
    """The store of what the urgent one shares is overdue, and only the late one, which gives way for blocks or for its
    row, still holds it: it would be quarantined in between, and the urgent one end for want of blocks."""
    serving = make_serving(FULL, 12, 40, hold=[STORE], deadline_s=5.0, scheduler={"max_running": rows})
    serving.engine.can_order = False
    stem = prompt(1, 16)
    serving.add("late", [*stem, 1], 20, priority=1)
    serving.step()
    serving.step()
    serving.engine.clock_s = 6.0
    serving.step()
    serving.add("urgent", [*stem, *prompt(3, 30)], 1)
    assert list(scheduled(serving.step())) == ["urgent"]
    land(serving)
    serving.run()
    assert serving.finished["urgent"].cached_tokens["device"] == 16
    assert {done.finish_reason for done in serving.finished.values()} == {"length"}


def test_c5_nobody_is_preempted_for_a_request_whose_hit_its_own_anchors_push_out_of_the_host(make_serving):
    """The late one leaves windows, and they are stored; the urgent one's hit needs the two that the host has."""
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}
    serving = make_serving(groups, {"full": 12, "win": 6}, {"full": 40, "win": 2}, scheduler={"max_batched_tokens": 17})
    stem = prompt(1, 16)
    serving.serve("before", [*stem, 7])
    serving.add("first", [*stem, 9], 12, priority=-1)
    for _ in range(6):
        serving.step()
    serving.add("late", [*stem, *prompt(2, 24)], 9, priority=1)
    for _ in range(3):
        serving.step()
    serving.add("urgent", [*stem, *prompt(3, 20)], 2)
    serving.step()
    assert list(serving.scheduler.why_waiting()) == ["late"]
    serving.run()
    assert serving.finished["urgent"].cached_tokens["host"] > 0


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("store", ["off", "eager", "lazy"])
def test_c5_a_sharer_whose_blocks_stay_with_another_is_no_victim(make_serving, store, window):
    """B and C share their only block, D owns one. A1 lacks one: D gives way, and C, though younger, does not, whatever
    it has in a ``window`` group, which is not short."""
    groups = {"full": (FullAttention(), 16)} | ({"win": (SlidingWindow(6), 4)} if window else {})
    serving = make_serving(groups, {"full": 5, "win": 40} if window else 5, 80, hold=[], store=store)
    shared = prompt(2, 13)
    serving.add("A0", prompt(0, 13), 12)
    serving.add("A1", prompt(1, 13), 12)
    serving.add("B", shared, 12)
    serving.add("D", prompt(3, 5), 12)
    serving.step()
    serving.add("C", [*shared, *expected_tokens(serving.spec, shared, 1)], 11)
    serving.steps_until(lambda: serving.known("B") == serving.known("C") == 17)
    assert serving.cache.stats().device["full"].held == 4
    assert scheduled(serving.step()) == {"A0": 1, "A1": 1}
    assert [s.request.request_id for s in serving.scheduler.waiting] == ["D"]
    serving.run()
    assert serving.finished["C"].preemptions <= 1
