"""Section C: reads and writes of one block in the wrong order, and what is published too early.

Here with engines of the CPU: what is submitted and ordered when, and texts. Orders between streams of a device are in
``tests/model/test_streams.py``.
"""

from __future__ import annotations

import inside
import numpy as np
import pytest
from core.driving import LOAD, STORE, Serving, prompt, scheduled
from field.hosted import FULL, GROUPS, WINDOW, device_forgets, land, only_on_host

from kvtier import FullAttention, SlidingWindow
from kvtier.cpu_offload import store_queue
from kvtier.pools.block_pool import Mark
from kvtier.testing import Faults, SimulatedEngine, expected_tokens

Blocks = set[tuple[int, int]]


def written_by(serving: Serving, step) -> Blocks:
    """(group, block) that the step's forward writes."""
    return {
        (g, int(b))
        for g, group in enumerate(serving.spec.groups)
        for b in step.group(group.name).slot_mapping // group.block_tokens
    }


def read_by(serving: Serving, step) -> Blocks:
    """(group, block) that the step's forward may read."""
    views = [step.group(group.name).block_table for group in serving.spec.groups]
    return {(g, int(b)) for g, table in enumerate(views) for b in np.unique(table) if b}


def device_ends(transfer) -> Blocks:
    return set(zip(transfer.groups.tolist(), transfer.device.tolist(), strict=True))


def refs_of(serving: Serving, blocks: Blocks) -> list[int]:
    a = inside.pools(serving.cache).arrays
    return [int(a.refs[a.meta[g, 0] + b]) for g, b in blocks]


# --- copies and forwards --------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_c1_vllm_45704_a_block_is_submitted_for_storing_only_after_its_forward_is_committed(make_serving, store):
    serving = make_serving(GROUPS, {"full": 14, "win": 8, "chunk": 8}, 60, hold=[], store=store)
    stores = 0
    for k in range(24):
        if k % 4 == 0:
            serving.add(f"r{k}", prompt(k, 17 + k % 5), 5)
        before = len(serving.engine.submitted)
        step, ids = serving.begin()
        new = [t for t in serving.engine.submitted[before:] if t.direction is STORE]
        for t in new:
            if t.ticket not in serving.engine.ordered:  # those save what was there before, and the forward comes after
                assert not device_ends(t) & written_by(serving, step), "the forward that writes it has not run"
        stores += len(new)
        before = len(serving.engine.submitted)
        serving.end(step, ids)
        stores += len(serving.engine.submitted) - before
    assert stores > 0
    serving.run()


@pytest.mark.parametrize("end", ["goes on", "abort", "cancel", "reset"])
def test_c2_vllm_47282_blocks_that_a_forward_reads_are_let_go_at_its_commit_and_not_before(make_serving, end):
    """The window moves on while the step is under way, or the request ends: nobody gets its blocks meanwhile."""
    serving = make_serving(GROUPS, 24, 60, hold=[])
    serving.add("S", prompt(1, 15), 20)
    for _ in range(3):
        serving.step()
    step = serving.scheduler.schedule()
    blocks = read_by(serving, step)
    if end == "abort":
        serving.scheduler.abort("S")
    if end == "reset":
        serving.cache.reset()
    assert min(refs_of(serving, blocks)) > 0
    if end == "cancel":
        serving.scheduler.cancel(step)
    else:
        serving.end(step, serving.canary.forward(step))
    serving.run()


@pytest.mark.parametrize("seed", range(3))
def test_c2_vllm_47728_no_load_writes_what_a_forward_still_reads(make_serving, seed):
    """Loads into blocks that windows have just let go; the simulated engine reports a forward that meets a copy."""
    engine = lambda memory: SimulatedEngine(memory, seed, Faults(max_delay_s=3.0))  # noqa: E731
    serving = make_serving(GROUPS, {"full": 20, "win": 7, "chunk": 7}, 60, copy_engine=engine, deadline_s=1e6)
    serving.add("S", prompt(0, 13), 40)
    for k in range(30):
        if k % 3 == 0:
            serving.add(f"r{k}", prompt(1 + k % 4, 21), 2)
        serving.step()
    serving.run()
    assert serving.cache.stats().transfers.loaded_blocks > 0
    assert serving.engine.missing_edges == []


@pytest.mark.parametrize("cancelled_at", range(1, 9))
def test_c3_vllm_47728_a_step_that_is_taken_back_finds_its_window_whole(make_serving, cancelled_at):
    """What a window lets go is counted in committed tokens, so a step that does not count takes nothing with it."""
    serving = make_serving({**FULL, **WINDOW}, 16)
    serving.add("S", prompt(1, 6), 9)
    for _ in range(cancelled_at):
        serving.step()
    known = serving.known("S")
    serving.cancelled()
    step, ids = serving.begin()
    window = step.group("win").block_table[0]
    first = max(0, known - 1 - 5) // 4
    assert np.all(window[first : -(-known // 4)] > 0)
    serving.end(step, ids)
    serving.run()


@pytest.mark.parametrize("how", ["abort", "finish"])
def test_c4_vllm_45357_blocks_of_an_ended_request_are_not_handed_out_before_its_step_is_committed(make_serving, how):
    """There is one step at a time: a load that wants the blocks waits for the commit."""
    serving = make_serving(FULL, 9, 32, hold=[])
    only_on_host(serving, prompt(0, 25))
    serving.add("R", prompt(1, 29), 4)
    step, ids = serving.begin()
    serving.add("loads", prompt(0, 25), 2)
    getattr(serving.scheduler, how)("R")
    held = written_by(serving, step)
    assert min(refs_of(serving, held)) > 0
    assert [t for t in serving.engine.live.values() if t.direction is LOAD] == []
    serving.end(step, ids)
    serving.step()
    (load,) = serving.engine.live.values()
    assert device_ends(load) & held, "now they are free"
    land(serving)
    serving.run()


@pytest.mark.parametrize("path", ["prompt", "decode", "load"])
def test_c6_vllm_46951_the_next_writer_of_a_block_is_ordered_after_its_store(make_serving, path):
    """Whoever gets the block: a prompt, a decode or a load. The store keeps what it was to keep."""
    serving = make_serving(FULL, 8, 64, hold=[])
    only_on_host(serving, prompt(9, 21))
    serving.engine.hold = {STORE, LOAD}
    serving.add("A", prompt(1, 29), 1)
    serving.step()
    (store,) = serving.engine.live.values()
    assert store.direction is STORE
    options = {"prompt": (prompt(2, 20), 1), "decode": (prompt(2, 3), 12), "load": (prompt(9, 21), 1)}
    serving.add("B", *options[path])
    for _ in range(8):
        step, ids = serving.begin()
        loads = [device_ends(t) for t in serving.engine.live.values() if t.direction is LOAD]
        touched = written_by(serving, step).union(*loads)
        if touched & device_ends(store):
            break
        assert serving.engine.ordered == []
        serving.end(step, ids)
    assert touched & device_ends(store), "B was to get a block of A"
    assert serving.engine.ordered == [store.ticket]
    serving.end(step, ids)
    land(serving)
    serving.run()
    device_forgets(serving)
    assert serving.serve("A again", prompt(1, 29), 3).cached_tokens["host"] == 28


@pytest.mark.parametrize("late", ["planned", "host full"])
def test_c7_vllm_42761_a_store_that_has_to_wait_never_saves_what_came_after(make_serving, monkeypatch, late):
    """The window has let the block go, and somebody else has it, before its store could begin."""
    if late == "planned":
        monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 1)
        monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    host = {"full": 30, "win": 30 if late == "planned" else 3}
    serving = make_serving({**FULL, **WINDOW}, {"full": 30, "win": 6}, host, hold=[STORE])
    serving.add("A", prompt(1, 13), 24)
    serving.add("B", prompt(2, 13), 24)
    serving.steps_until(lambda: len(serving.finished) == 2)
    land(serving)
    serving.run()
    device_forgets(serving)
    for k, name in enumerate("AB"):
        turn = [*prompt(1 + k, 13), *serving.finished[name].token_ids]
        for length in (13, 14, len(turn), len(turn) + 1):
            serving.serve(f"{name} {length}", [*turn, 1][:length], 3)  # the text tells whose bytes these are
            device_forgets(serving)
    assert serving.cache.stats().transfers.loaded_blocks > 0


# --- publication ----------------------------------------------------------------------------------


def after_a_flood(serving: Serving, start: list[int], new: int, tier: str) -> int:
    """Serves ``start`` to its end, then (for the host tier) lets the device forget it; the hit of its continuation."""
    text = serving.serve("first", start, new).token_ids
    if tier == "host":
        serving.serve("flood", prompt(77, 60), 1)
    done = serving.serve("next turn", [*start, *text, 1], 3)
    assert (done.cached_tokens["host"] > 0) == (tier == "host")
    return sum(done.cached_tokens.values())


@pytest.mark.parametrize("groups", [FULL, GROUPS])
@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_c8_vllm_48596_the_last_block_of_a_request_is_stored_too(make_serving, groups, store, new):
    """12 tokens are computed when the request ends: three full blocks, and all three come back from the host."""
    serving = make_serving(groups, 16, 64, hold=[], store=store, verify="full")
    assert after_a_flood(serving, prompt(5, 13 - new), new, "host") == 12


@pytest.mark.parametrize("groups", [FULL, GROUPS])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_c9_vllm_54193_a_block_with_a_slot_that_no_forward_wrote_is_not_published(make_serving, groups, tier, new):
    """The last of 12 tokens is sampled and never computed: the third block is not full."""
    serving = make_serving(groups, 16, 64, hold=[])
    assert after_a_flood(serving, prompt(5, 12 - new), new, tier) == 8


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("error", ["", "no link"])
@pytest.mark.parametrize("groups", [FULL, GROUPS])
def test_c10_vllm_29870_a_request_preempted_with_stores_under_way_comes_back_at_once(
    make_serving, store, error, groups
):
    serving = make_serving(groups, 12, 64, hold=[STORE], store=store)
    serving.add("R", prompt(1, 25), 12)
    serving.steps_until(lambda: serving.known("R") == 30)
    serving.add("urgent", prompt(2, 46), 1, priority=-1)
    serving.steps_until(lambda: "urgent" in serving.finished)
    assert [s.request.request_id for s in serving.scheduler.waiting] == ["R"]
    for _ in range(3):
        serving.step()
    serving.engine.end(error=error)
    land(serving)
    serving.run()
    assert serving.finished["R"].preemptions == 1
    if not error:
        assert serving.cache.stats().transfers.loaded_blocks > 0


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_c12_sglang_34519_the_source_of_a_load_stays_whatever_stores_want(make_serving, store):
    serving = make_serving(FULL, 14, {"full": 6}, hold=[], store=store)
    serving.serve("A", prompt(0, 25), 1)
    for k in range(1, 4):  # lazy: pushes A out to the host, and no more than that fits there
        if serving.cache.stats().host["full"].cached < 6:
            serving.serve(f"push {k}", prompt(k, 25), 1)
    device_forgets(serving)
    serving.engine.hold = {LOAD}
    serving.add("A again", prompt(0, 25), 2)
    serving.step()
    (load,) = serving.engine.live.values()
    sources = set(load.host.tolist())
    serving.engine.submitted.clear()
    for k in range(5, 9):
        serving.add(f"other {k}", prompt(k, 21), 1)
        serving.steps_until(lambda k=k: f"other {k}" in serving.finished)
    stores = {int(b) for t in serving.engine.submitted if t.direction is STORE for b in t.host}
    assert not stores & sources
    assert stores or serving.cache.stats().transfers.dropped_blocks > 0, "stores were to want room"
    land(serving)
    serving.run()
    assert serving.finished["A again"].cached_tokens["host"] == 4 * len(sources)


def test_c13_sglang_38140_all_steps_of_a_request_see_one_block_for_a_position(make_serving):
    """All of the prompt is cached but its last block, which is computed into a fresh one. When that is full, the row
    changes to the block that was there, before the next step is made, and never again."""
    serving = make_serving(FULL, 12)
    serving.serve("first", prompt(1, 16), 6)
    serving.add("again", prompt(1, 16), 10)
    serving.add("other", prompt(2, 5), 10)  # takes blocks that are given back
    seen: dict[int, int] = {}
    pools = inside.pools(serving.cache).arrays
    while "again" not in serving.finished:
        step, ids = serving.begin()
        if "again" in step.request_ids:
            r = step.request_ids.index("again")
            start = int(step.seq_lens[r]) - scheduled(step)["again"]
            for j, b in enumerate(step.group("full").block_table[r][: -(-int(step.seq_lens[r]) // 4)].tolist()):
                if (j + 1) * 4 <= start:
                    assert pools.mark[b] == Mark.READY
                    assert seen.setdefault(j, b) == b
        serving.end(step, ids)
    assert len(seen) == 6
    serving.run()


@pytest.mark.parametrize("budget", [3, 5, 8])
@pytest.mark.parametrize("length", [9, 17, 30])
def test_c14_nano_vllm_208_nobody_reads_what_a_twin_has_yet_to_write(make_serving, budget, length):
    """A's prompt takes several steps. All that B is given, it finds published: no step lets it read A's work ahead."""
    serving = make_serving(GROUPS, 32, scheduler={"max_batched_tokens": budget})
    serving.add("A", prompt(1, length), 3)
    serving.add("B", prompt(1, length), 3)
    pools = inside.pools(serving.cache).arrays
    while "B" not in serving.finished:
        step, ids = serving.begin()
        if "B" in step.request_ids:
            r, group = step.request_ids.index("B"), step.group("full")
            start = int(step.seq_lens[r]) - scheduled(step)["B"]
            assert np.all(pools.mark[group.block_table[r][: start // 4]] == Mark.READY)
        serving.end(step, ids)
    assert serving.finished["B"].cached_tokens["device"] == (length - 1) // 4 * 4
    serving.run()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_c15_vllm_49125_a_block_is_never_found_under_what_it_held_in_part(make_serving, tier):
    """Nothing has a name before it is full: two texts that share half a block never meet in it."""
    serving = make_serving(FULL, 24, 64, hold=[])
    start = prompt(1, 6)
    text = serving.serve("fills its second block", start, 6).token_ids
    if tier == "host":
        device_forgets(serving)
    other = [96 - t for t in text]
    assert sum(serving.serve("parts in it", [*start, *other], 2).cached_tokens.values()) == 4
    assert sum(serving.serve("goes on", [*start, *text, 1], 2).cached_tokens.values()) == 8


class Eliding(SimulatedEngine):
    """Says that the writer comes after the copy, and sees to nothing."""

    def order_after(self, tickets, timeout_s):
        return True


def test_c16_ik_llama_2083_a_wait_that_is_left_out_is_seen(make_serving):
    """What the other tests of this section rely on: the simulated engine reports a writer that did not wait."""
    engine = lambda memory: Eliding(memory, 1, Faults(max_delay_s=9.0))  # noqa: E731
    serving = make_serving(FULL, 8, 64, copy_engine=engine, deadline_s=1e6)
    for k in range(6):
        serving.add(f"r{k}", prompt(k, 29), 1)
        serving.steps_until(lambda k=k: f"r{k}" in serving.finished)
    assert serving.engine.missing_edges
    assert "store" in serving.engine.missing_edges[0]


def test_c16_ik_llama_2083_without_that_elision_nothing_is_reported(make_serving):
    engine = lambda memory: SimulatedEngine(memory, 1, Faults(max_delay_s=9.0))  # noqa: E731
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}
    serving = make_serving(groups, 8, 64, copy_engine=engine, deadline_s=1e6)
    for k in range(6):
        serving.add(f"r{k}", prompt(k, 29), 1)
        serving.steps_until(lambda k=k: f"r{k}" in serving.finished)
    assert serving.engine.missing_edges == []
    assert serving.finished["r5"].token_ids == expected_tokens(serving.spec, prompt(5, 29), 1)
    serving.run()
