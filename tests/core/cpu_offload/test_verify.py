"""verify="full": a bit that flips on the way is found before anybody reads it."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from breadth import sample

from core.driving import LOAD, STORE, prompt
from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.pools.block_pool import Col, Mark, Place
from kvtier.testing import Faults, SimulatedEngine

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)}
LENGTH = 29


def hosted(make_serving, **options):
    """Prompt 0 is in the host tier only."""
    serving = make_serving(GROUPS, 24, 48, hold=[], **options)
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    return serving


def host_block(serving, g: int, k: int) -> np.ndarray:
    """Bytes of the k-th stored block of group g."""
    cache, pools = serving.cache, inside.host(serving.cache)
    base, rows = int(pools.arrays.meta[g, 0]), int(pools.arrays.meta[g, 1])
    b = np.flatnonzero(pools.arrays.mark[base : base + rows])[k]
    arena = inside.host_arena(cache)
    at = int(arena.origins[g] + b * arena.block_bytes[g])
    return arena.bytes[at : at + int(arena.block_bytes[g])]


@pytest.mark.parametrize("g", range(3))
@pytest.mark.parametrize("at", [0, 65, -1])
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_in_the_host_tier_is_recomputed_with_the_same_text(make_serving, g, at, bit):
    serving = hosted(make_serving, verify="full")
    host_block(serving, g, -1)[at] ^= bit
    done = serving.serve("again", prompt(0, LENGTH), 5)
    assert done.finish_reason == "length"
    assert serving.cache.stats().transfers.failed_loads == 1


def test_a_flipped_bit_ends_the_request_by_policy(make_serving):
    serving = hosted(make_serving, verify="full", on_load_error="fail")
    host_block(serving, 0, 2)[7] ^= 4
    assert serving.serve("again", prompt(0, LENGTH), 5).finish_reason == "load_error"
    assert serving.cache.stats().transfers.failed_loads == 1


def test_a_bad_block_is_forgotten_and_good_ones_are_kept(make_serving):
    serving = hosted(make_serving, verify="full")
    before = serving.cache.stats().host["full"].cached
    host_block(serving, 0, 3)[7] ^= 4
    serving.serve("again", prompt(0, LENGTH), 1)
    assert serving.cache.stats().transfers.failed_loads == 1
    inside.pools(serving.cache).forget_all()
    serving.serve("third", prompt(0, LENGTH), 1)
    assert serving.cache.stats().transfers.failed_loads == 1, "the same source is not offered again"
    assert before == 7


def test_memory_that_changed_what_it_held_is_not_used_again_before_a_reset(make_serving):
    serving = hosted(make_serving, verify="full")
    host_block(serving, 0, 3)[7] ^= 4
    serving.serve("again", prompt(0, LENGTH), 1)
    stats = serving.cache.stats()
    assert (stats.transfers.corrupt_blocks, stats.host["full"].quarantined) == (1, 1)
    serving.cache.reset()
    assert serving.cache.stats().host["full"].quarantined == 0


def test_without_verification_the_canary_itself_sees_the_flip(make_serving):
    """The oracle is able to fail: the same flip, unverified, gives another text."""
    serving = hosted(make_serving, verify="off")
    host_block(serving, 0, 2)[3] ^= 64
    with pytest.raises(AssertionError, match="wrong text"):
        serving.serve("again", prompt(0, LENGTH), 5)
    serving.scheduler.wait(0.0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("seed", sample(range(4), [0]))
def test_corrupting_links_never_change_a_text(make_serving, seed, policy):
    faults = Faults(corrupt=0.4, tear=0.2, fail=0.1)
    engine = lambda memory: SimulatedEngine(memory, seed, faults)  # noqa: E731
    serving = make_serving(
        GROUPS, {"full": 14, "win": 8, "chunk": 8}, 64, copy_engine=engine, verify="full", on_load_error=policy
    )
    for k in range(14):
        serving.add(str(k), prompt(k % 3, 17 + 4 * (k % 3)), 4)
    serving.run()
    reasons = {done.finish_reason for done in serving.finished.values()}
    assert reasons <= ({"length"} if policy == "recompute" else {"length", "load_error"})
    assert serving.cache.stats().transfers.failed_loads > 0


def test_a_host_block_whose_bytes_changed_is_taken_out_of_circulation_until_a_reset(make_serving):
    serving = hosted(make_serving, verify="full")
    usable = serving.cache.stats().host["full"].usable
    host_block(serving, 0, 3)[7] ^= 4
    host_block(serving, 0, 5)[0] ^= 1
    serving.serve("again", prompt(0, LENGTH), 1)
    stats = serving.cache.stats()
    assert stats.transfers.corrupt_blocks == 2
    assert stats.host["full"].quarantined == 2
    assert stats.host["full"].empty + stats.host["full"].cached == usable - 2
    serving.cache.reset()
    assert serving.cache.stats().host["full"].quarantined == 0
    assert serving.cache.stats().host["full"].empty == usable
    assert serving.cache.stats().transfers.corrupt_blocks == 2, "a counter"


def test_a_host_block_whose_bytes_changed_is_taken_out_of_circulation_however_late_that_is_known(make_serving):
    serving = hosted(make_serving, verify="full", deadline_s=5.0)
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    (ticket,) = serving.engine.live
    serving.engine.clock_s = 5.5
    serving.steps_until(lambda: "again" in serving.finished)
    assert serving.cache.stats().transfers.corrupt_blocks == 0
    serving.engine.end(ticket, flip=True)
    serving.run()
    stats = serving.cache.stats()
    assert stats.transfers.corrupt_blocks == 1
    assert [pool.quarantined for pool in stats.host.values()] == [1, 0, 0]
    serving.cache.reset()
    assert serving.cache.stats().host["full"].quarantined == 0


@pytest.mark.parametrize("g", range(3))
def test_a_ready_host_block_that_rots_fails_its_next_load_and_is_taken_out_of_circulation(make_serving, g):
    serving = hosted(make_serving, verify="full")
    host = inside.host(serving.cache).arrays
    base, rows = int(host.meta[g, Col.BASE]), int(host.meta[g, Col.ROWS])
    block = int(np.flatnonzero(host.mark[base : base + rows] == Mark.READY)[-1])
    serving.engine.memory.flip_host_bit(g, block)
    assert serving.serve("again", prompt(0, LENGTH), 5).finish_reason == "length"
    stats = serving.cache.stats()
    assert (stats.transfers.failed_loads, stats.transfers.corrupt_blocks) == (1, 1)
    assert [pool.quarantined for pool in stats.host.values()] == [int(g == k) for k in range(3)]
    assert host.place[base + block] == Place.QUARANTINED
    inside.pools(serving.cache).forget_all()
    serving.serve("third", prompt(0, LENGTH), 1)
    assert serving.cache.stats().transfers.failed_loads == 1


# --- torn copies ----------------------------------------------------------------------------------


def check_findable(serving, known: dict[tuple[int, bytes], bytes]) -> None:
    """Whatever is findable in either tier holds what was first known by its key."""
    cache = serving.cache
    for pools, arena in ((inside.pools(cache), inside.arena(cache)), (inside.host(cache), inside.host_arena(cache))):
        for g in range(len(GROUPS)):
            base, rows = (int(pools.arrays.meta[g, col]) for col in (Col.BASE, Col.ROWS))
            for b in np.flatnonzero(pools.arrays.mark[base : base + rows] == Mark.READY):
                at, key = int(arena.origins[g] + b * arena.strides[g]), pools.arrays.key[base + b].tobytes()
                content = arena.bytes[at : at + int(arena.block_bytes[g])].tobytes()
                assert known.setdefault((g, key), content) == content, (g, int(b))


@pytest.mark.parametrize("j", [0, 3, 6])
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_block_that_was_copied_in_part_is_found_in_neither_tier(make_serving, direction, j):
    """Nothing is verified: the end of the copy alone says which block it was."""
    if direction is LOAD:
        serving = hosted(make_serving)
    else:
        serving = make_serving(GROUPS, 24, 48, hold=[])
    known = {}
    check_findable(serving, known)
    inside.arena(serving.cache).bytes[:] = 0x55
    serving.engine.hold = {direction}
    serving.add("A", prompt(0, LENGTH), 3)
    serving.step()
    (copy,) = serving.engine.live.values()
    g, device, host = int(copy.groups[j]), int(copy.device[j]), int(copy.host[j])
    serving.engine.end(copy.ticket, error="torn", bad=[j])
    cache = serving.cache
    on_device, on_host = (
        arena.bytes[int(arena.origins[g] + b * arena.strides[g]) :][: int(arena.block_bytes[g])]
        for arena, b in ((inside.arena(cache), device), (inside.host_arena(cache), host))
    )
    half = len(on_host) // 2
    assert np.array_equal(on_device[:half], on_host[:half])
    assert not np.array_equal(on_device[half:], on_host[half:])
    inside.connector(cache).poll()
    arrays, block = (inside.host(cache).arrays, host) if direction is STORE else (inside.pools(cache).arrays, device)
    assert arrays.mark[int(arrays.meta[g, Col.BASE]) + block] == Mark.NONE
    serving.engine.release()
    while serving.scheduler.has_work():
        check_findable(serving, known)
        serving.step()
    check_findable(serving, known)
    serving.run()
    inside.pools(cache).forget_all()
    assert serving.serve("again", prompt(0, LENGTH), 5).finish_reason == "length"


@pytest.mark.parametrize("seed", sample(range(4), [0]))
def test_links_that_tear_copies_leave_nothing_findable_that_is_not_whole(make_serving, seed):
    engine = lambda memory: SimulatedEngine(memory, seed, Faults(tear=0.4))  # noqa: E731
    serving, known = make_serving(GROUPS, {"full": 14, "win": 8, "chunk": 8}, 64, copy_engine=engine), {}
    for k in range(30):
        serving.add(str(k), prompt(k % 3, 17 + 4 * (k % 3)), 4)
    while serving.scheduler.has_work():
        serving.step()
        check_findable(serving, known)
    serving.run()
    counts = serving.cache.stats().transfers
    assert min(counts.failed_loads, counts.failed_stores, counts.loaded_blocks) > 0


def test_a_copy_that_fails_by_itself_costs_no_host_block(make_serving):
    serving = hosted(make_serving, verify="full")
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    serving.engine.end(error="no link")
    serving.run()
    stats = serving.cache.stats()
    assert (stats.transfers.failed_loads, stats.transfers.corrupt_blocks) == (1, 0)
    assert stats.host["full"].quarantined == 0
