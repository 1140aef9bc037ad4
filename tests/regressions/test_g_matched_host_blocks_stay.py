"""Defect g: a host block that a request was matched with is evicted before it is loaded."""

from __future__ import annotations

import inside
import pytest
from breadth import covering
from core.driving import LOAD, STORE, prompt

from kvtier import ChunkedLocal, FullAttention, SlidingWindow

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
LENGTH = 25  # six full blocks and a token


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_g_a_full_host_tier_still_serves_the_prefix_it_holds(make_serving, store):
    """Making room on the device for the load needs host blocks (lazy stores), but not those that were matched."""
    serving = make_serving({"full": GROUPS["full"]}, 8, {"full": 6}, hold=[], store=store)
    serving.serve("original", prompt(0, LENGTH), 1)
    if store == "lazy":
        serving.serve("pushes it out", prompt(1, 24), 1)
    else:
        inside.pools(serving.cache).forget_all()
    assert serving.cache.stats().host["full"].cached == 6
    done = serving.serve("again", prompt(0, LENGTH), 1)
    assert sum(done.cached_tokens.values()) == 24
    assert done.cached_tokens["host"] > 0


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_g_the_source_of_a_load_under_way_is_not_evicted_by_stores(make_serving, store):
    serving = make_serving(GROUPS, 24, {"full": 6, "win": 4, "chunk": 4}, hold=[], store=store)
    serving.serve("original", prompt(0, LENGTH), 1)
    if store == "lazy":
        for k in range(1, 5):
            serving.serve(f"push {k}", prompt(k, 24), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 4)
    serving.step()
    loads = [t for t in serving.engine.submitted if t.direction is LOAD]
    for k in range(5, 15):  # stores that want host blocks
        serving.add(f"other {k}", prompt(k, 24), 2)
        serving.step()
    if loads:
        taken = {(int(g), int(b)) for t in loads for g, b in zip(t.groups, t.host, strict=True)}
        stores = [t for t in serving.engine.submitted if t.direction is STORE and t.ticket > loads[0].ticket]
        written = {(int(g), int(b)) for t in stores for g, b in zip(t.groups, t.host, strict=True)}
        assert not taken & written
    serving.engine.release()
    serving.run()


def test_g_an_aborted_load_gives_its_host_blocks_back(make_serving):
    serving = make_serving({"full": GROUPS["full"]}, 8, {"full": 6}, hold=[])
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 1)
    serving.step()
    assert serving.cache.stats().host["full"].held == 6
    serving.scheduler.abort("again")
    serving.step()
    assert serving.cache.stats().host["full"].held == 6, "the copy still reads them"
    serving.engine.release()
    serving.run()
    assert serving.cache.stats().host["full"].cached == 6


@pytest.mark.parametrize(("host", "store"), covering([1, 2, 3, 5, 8], ["eager", "lazy"]))
def test_g_texts_are_right_with_a_host_tier_that_is_always_full(make_serving, store, host):
    serving = make_serving(GROUPS, {"full": 10, "win": 5, "chunk": 5}, host, store=store, verify="full")
    for k in range(12):
        serving.add(f"r{k}", prompt(k % 4, 13 + 3 * (k % 4)), 5)
    serving.run()


def test_g_two_requests_share_one_load(make_serving):
    serving = make_serving(GROUPS, 16, 32, hold=[])
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("A", prompt(0, LENGTH), 3)
    serving.add("B", prompt(0, LENGTH), 3)
    serving.step()
    assert [t.direction for t in serving.engine.live.values()] == [LOAD]
    assert not serving.is_running("B"), "B waits, holding nothing"
    serving.engine.release()
    serving.run()
    assert serving.finished["B"].cached_tokens == {"device": 24, "host": 0}
    assert serving.finished["A"].cached_tokens == {"device": 0, "host": 24}


def test_g_what_gives_up_its_row_is_not_stored_over_the_match(make_serving):
    """An urgent request gets the only row; the anchors of the one that leaves need host blocks, but not the match's."""
    groups = {name: GROUPS[name] for name in ("full", "win")}
    serving = make_serving(
        groups, {"full": 60, "win": 6}, {"full": 60, "win": 7}, hold=[], scheduler={"max_running": 1}
    )
    for k in range(3):
        serving.serve(f"original {k}", prompt(k, 17), 1)  # two window anchors each; the third pushes out the first's
    serving.add("leaves", prompt(9, 6), 20, priority=1)
    for _ in range(4):
        serving.step()
    stores = [t for t in serving.engine.submitted if t.direction is STORE]
    serving.add("urgent", prompt(0, 17), 4, priority=-1)
    serving.run()
    assert serving.finished["leaves"].preemptions == 1
    assert len([t for t in serving.engine.submitted if t.direction is STORE]) > len(stores)
