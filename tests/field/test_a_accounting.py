"""Section A of docs/FIELD-BUGS.md: free lists, references, double frees. Named after the tracker and its number."""

from __future__ import annotations

import inside
import pytest
from accounts import check_free_lists, free_list, ids, row_blocks, transfers
from core.driving import STORE, assert_same, conserved, prompt, snapshot

from kvtier import ChunkedLocal, FullAttention, InvariantBroken, SlidingWindow
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools, Col, Place
from kvtier.testing import expected_tokens

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


# --- double frees ---------------------------------------------------------------------------------


def test_a1_vllm_42085_second_long_request(make_serving):
    """A window row that recycles blocks is stored; then a request wants all blocks but one."""
    groups = {**FULL, "win": (SlidingWindow(6), 4)}
    serving = make_serving(groups, {"full": 16, "win": 5}, 64, hold=[STORE], scheduler={"max_batched_tokens": 8})
    serving.add("A", prompt(0, 40), 8)
    places: dict[int, set[int]] = {}
    while "A" not in serving.finished:
        step, sampled = serving.begin()
        for j, b in row_blocks(serving, 1, "A").items():
            places.setdefault(b, set()).add(j)
        serving.end(step, sampled)
    assert max(len(at) for at in places.values()) > 1, "some window block was to serve two logical blocks"
    stores = transfers(serving, STORE)
    assert sum(len(t.groups) for t in stores) > 10
    for t in stores:
        for blocks in (t.device, t.host):
            assert len(set(zip(t.groups.tolist(), blocks.tolist(), strict=True))) == len(t.groups), "named twice"
    host_refs = inside.host(serving.cache).arrays.refs
    assert set(host_refs[host_refs > 0].tolist()) == {1}, "a store pins each destination once"
    serving.engine.release()
    serving.run()
    for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
        assert not pools.arrays.refs.any()
        check_free_lists(pools)
    assert serving.serve("B", prompt(1, 15 * 4), 1).finish_reason == "length"
    assert serving.cache.stats().device["full"].peak_held == 15


@pytest.mark.parametrize("references", [2, 3])
def test_a2_vllm_42571_a_block_named_twice_loses_two_references(references):
    pools = BlockPools(Layout.fixed([64], [4]))
    b = int(pools.take(ids(0))[0])
    for _ in range(references - 1):
        pools.acquire(ids(0), ids(b))
    pools.release(ids(0, 0), ids(b, b))
    assert pools.arrays.refs[b] == references - 2
    assert (b in free_list(pools)) == (references == 2)
    check_free_lists(pools)


def test_a10_trtllm_14937_more_releases_than_references_raise_and_link_nothing_twice():
    pools = BlockPools(Layout.fixed([64], [4]))
    b = int(pools.take(ids(0))[0])
    with pytest.raises(AssertionError, match="nobody holds"):
        pools.release(ids(0, 0), ids(b, b))
    assert pools.arrays.refs[b] == 0
    assert sorted(free_list(pools)) == [1, 2, 3, 4]
    check_free_lists(pools)


@pytest.mark.usefixtures("damaged", "unaudited")
def test_a10_trtllm_14937_a_row_that_holds_a_block_more_often_than_it_has_references_raises_when_it_ends(make_serving):
    serving = make_serving(FULL, 8)
    serving.add("A", prompt(0, 13), 4)
    serving.scheduler.commit(serving.scheduler.schedule(), [1])
    row = next(s.row for s in serving.scheduler.running)
    table = inside.coordinator(serving.cache).tables.table(0)[row]
    again, lost = int(table[0]), int(table[1])
    table[1] = again
    with pytest.raises(AssertionError, match="nobody holds"):
        serving.scheduler.abort("A")
        serving.scheduler.schedule()
    listed = free_list(inside.pools(serving.cache))
    assert len(listed) == len(set(listed))
    assert lost not in listed
    serving.cache.close()


@pytest.mark.parametrize("block", [0, 1, 3], ids=["null", "cached", "empty"])
def test_a11_ucm_1053_a_release_of_what_nobody_holds_says_so_and_changes_nothing(make_serving, block):
    """The other project skips and logs; here the caller's mistake is an error, and the pool stays whole."""
    serving = make_serving(FULL, 3)
    serving.serve("A", prompt(0, 8), 1)
    assert inside.pools(serving.cache).arrays.place[:4].tolist() == [
        Place.NULL,
        Place.CACHED,
        Place.CACHED,
        Place.EMPTY,
    ]
    before = snapshot(serving.cache)
    with pytest.raises(InvariantBroken):  # with KVTIER_AUDIT=2 before the loop is asked
        inside.pools(serving.cache).release(ids(0), ids(block))
    with pytest.raises(AssertionError, match="nobody holds"):
        BlockPools.release(inside.pools(serving.cache), ids(0), ids(block))
    assert_same(before, snapshot(serving.cache))
    check_free_lists(inside.pools(serving.cache))


@pytest.mark.parametrize("groups", [{"win": (SlidingWindow(6), 4)}, {**FULL, "win": (SlidingWindow(6), 4)}], ids=str)
def test_a12_vllm_1556_two_sequences_that_part_after_the_window_has_wrapped(make_serving, groups):
    serving = make_serving(groups, 40)
    stem = prompt(0, 24)
    serving.add("A", stem, 12)
    serving.steps_until(lambda: serving.known("A") == 25)
    serving.add("B", [*stem, 1, 2, 3], 12)
    serving.step()
    g = serving.spec.index("win")
    shared = set(row_blocks(serving, g, "A").values()) & set(row_blocks(serving, g, "B").values())
    assert shared, "both were to hold a block of the window at the fork"
    assert min(row_blocks(serving, g, "B")) > 0, "the window had wrapped"
    serving.run()
    serving.cache.reset()
    assert all(pool.empty == pool.usable == 40 for pool in serving.cache.stats().device.values())
    check_free_lists(inside.pools(serving.cache))


# --- twins ----------------------------------------------------------------------------------------


def test_a16_kvcached_401_one_copy_evicted_the_other_is_found_and_then_none(make_serving):
    """Same prompt twice in one step: one block a key and tier, so the sibling of a device block is its host copy."""
    serving = make_serving(FULL, 6, 11, hold=[])
    for name in ("first", "second"):
        serving.add(name, prompt(0, 21), 1)
    serving.run()
    assert int((inside.pools(serving.cache).arrays.mark > 0).sum()) == 5, "no second block of the same content"
    serving.serve("evicts the device's copies", prompt(1, 24), 1)
    assert serving.serve("the host's are found", prompt(0, 21), 1).cached_tokens == {"device": 0, "host": 20}
    for k in range(2, 5):
        serving.serve(f"evicts both {k}", prompt(k, 24), 1)
    assert sum(serving.serve("none is found", prompt(0, 21), 1).cached_tokens.values()) == 0


class Twins:
    """B generates what A's prompt says already; both compute the same blocks, and B's give way to A's.

    ``running``: A goes on; else it has ended when B gets there, and A's blocks are on the free list.
    """

    def __init__(self, make_serving, running: bool) -> None:
        self.serving = serving = make_serving(GROUPS, {"full": 16, "win": 16, "chunk": 16})
        start = prompt(0, 6)
        text = expected_tokens(serving.spec, start, 14)
        serving.add("B", start, 30)
        serving.steps_until(lambda: serving.known("B") == 8)
        serving.add("A", [*start, *text], 16 if running else 1)
        step, sampled = serving.begin()
        self.canonical = row_blocks(serving, 0, "A")
        self.duplicates = set(row_blocks(serving, 0, "B").values()) - set(self.canonical.values())
        serving.end(step, sampled)
        assert ("A" in serving.finished) is not running

    def step(self) -> None:
        self.duplicates |= set(row_blocks(self.serving, 0, "B").values()) - set(self.canonical.values())
        self.serving.step()

    def place_and_refs(self, block: int) -> tuple[int, int]:
        a = inside.pools(self.serving.cache).arrays
        return int(a.place[int(a.meta[0, Col.BASE]) + block]), int(a.refs[int(a.meta[0, Col.BASE]) + block])


@pytest.mark.parametrize("running", [False, True], ids=["on the free list", "held"])
def test_a17_nano_vllm_219_243_a_late_merge_acquires_the_block_that_it_merges_into(make_serving, running):
    twins = Twins(make_serving, running)
    last = twins.canonical[4]
    assert twins.place_and_refs(last) == ((Place.HELD, 1) if running else (Place.CACHED, 0))
    twins.serving.steps_until(lambda: twins.serving.known("B") == 20)
    twins.step()
    assert row_blocks(twins.serving, 0, "B") | twins.canonical == row_blocks(twins.serving, 0, "B")
    assert twins.place_and_refs(last) == (Place.HELD, 1 + running)
    check_free_lists(inside.pools(twins.serving.cache))
    twins.serving.run()


@pytest.mark.parametrize("running", [False, True], ids=["on the free list", "held"])
def test_a18_mini_sglang_142_pages_freed_by_a_merge_are_read_by_nobody(make_serving, running):
    """A third request takes the freed duplicates at once; B's text is compared when it ends."""
    twins = Twins(make_serving, running)
    serving, taken = twins.serving, set()
    serving.add("C", prompt(7, 1), 30, priority=-1)  # takes its blocks before B takes its next
    while "B" not in serving.finished:
        twins.step()
        if serving.is_running("C") and serving.is_running("B"):
            mine, others = set(row_blocks(serving, 0, "B").values()), set(row_blocks(serving, 0, "C").values())
            assert not mine & others
            taken |= others & twins.duplicates
    assert taken, "C was to get blocks that B had"
    serving.run()


# --- every step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a19_sglang_35270_the_books_balance_after_every_step(make_serving, store):
    """usable = empty + cached + fenced + held + quarantined, in each pool and tier, while windows and copies come
    and go; ``core/test_fuzz.py`` does the same at random."""
    serving = make_serving(GROUPS, {"full": 12, "win": 6, "chunk": 6}, 9, hold=[STORE], store=store)
    for k in range(6):
        serving.add(str(k), prompt(k % 3, 9 + 3 * k), 7)
    n = 0
    while serving.scheduler.has_work():
        serving.step()
        n += 1
        if n % 3 == 0:
            serving.engine.end(error="torn" if n % 2 else "", bad=[0] if n % 2 else None)
        for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
            assert conserved(pools)
            check_free_lists(pools)
    assert n > 10
