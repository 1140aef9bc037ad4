"""What the store modes promise: eager stores at once, lazy before eviction, off never; and both lose nothing."""

from __future__ import annotations

from typing import Any

import inside
import pytest
from breadth import covering

from core.driving import LOAD, STORE, HeldEngine, Serving, prompt
from core.slabs import shared_serving
from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.cpu_offload.transfer import Transfer
from kvtier.testing import Faults, SimulatedEngine, canary_spec

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def test_off_stores_nothing(make_serving):
    serving = make_serving(GROUPS, 8, 64, hold=[], store="off")
    for k in range(4):
        serving.serve(str(k), prompt(k, 21), 4)
    assert serving.engine.submitted == []
    assert all(pool.empty == 64 for pool in serving.cache.stats().host.values())


def test_eager_stores_every_full_block_and_anchor_in_the_step_that_seals_it(make_serving):
    serving = make_serving(GROUPS, 32, 64, hold=[STORE])
    serving.add("A", prompt(0, 21), 8)
    serving.step()
    stored = serving.cache.stats().host
    assert stored["full"].held == 5
    assert stored["win"].held >= 2, "the window before token 20"
    assert stored["chunk"].held >= 1, "the chunk before token 20"
    serving.step()
    serving.step()
    serving.step()
    assert serving.cache.stats().host["full"].held == 6, "a block that decoding has filled"
    serving.engine.release()
    serving.run()


def test_more_blocks_are_under_way_than_the_device_has_but_each_host_block_once(make_serving):
    """A writer that is ordered behind a store takes its block, which is stored again before that store has ended."""
    serving = make_serving(FULL, 8, 40, hold=[STORE])
    most = 0
    for k in range(30):
        serving.add(str(k), prompt(k, 21), 2)
    for _ in range(100):
        serving.step()
        under_way = [(g, h) for t in serving.engine.live.values() for g, h in zip(t.groups, t.host, strict=True)]
        assert len(set(under_way)) == len(under_way)
        most = max(most, len(under_way))
    assert most == 40
    serving.engine.release()
    serving.run()


def test_lazy_stores_nothing_before_blocks_are_short(make_serving):
    serving = make_serving(FULL, 200, 64, hold=[STORE], store="lazy", scheduler={"max_batched_tokens": 16})
    for k in range(3):
        serving.serve(str(k), prompt(k, 21), 2)
    assert serving.engine.submitted == []


def test_lazy_stores_nothing_while_there_are_slabs_that_no_group_has(make_cache):
    engine = {"copy_engine": lambda memory: HeldEngine(memory, [])}
    serving = shared_serving(make_cache, canary_spec(GROUPS), 200, 200, store="lazy", **engine)
    for k in range(3):
        serving.serve(str(k), prompt(k, 21), 2)
    assert inside.pools(serving.cache).unused.min() > 100
    assert serving.engine.submitted == []


def test_lazy_prepares_a_margin_ahead_of_need(make_serving):
    """Two chunks of prompt: copies start before the empty blocks are used up, so nobody has to wait."""
    serving = make_serving(FULL, 32, 64, hold=[STORE], store="lazy", scheduler={"max_batched_tokens": 16})
    for k in range(3):
        serving.add(str(k), prompt(k, 33), 1)
        serving.steps_until(lambda k=k: str(k) in serving.finished)
    serving.step()
    stats = serving.cache.stats().device["full"]
    assert stats.empty + stats.fenced >= 8
    assert stats.empty > 0
    assert serving.engine.ordered == [], "nobody waited for a copy"
    serving.engine.release()
    serving.run()


@pytest.mark.parametrize(
    ("engine", "groups", "store"), covering(["threads", "at once", "slow"], [GROUPS, FULL], ["eager", "lazy"])
)
def test_distinct_prompts_in_turn_are_all_hits_the_second_time(make_serving, store, groups, engine):
    """Store coverage: what leaves the device is in the host tier, however slow the copies are."""
    slow = lambda memory: SimulatedEngine(memory, 1, Faults(max_delay_s=20.0))  # noqa: E731
    options = {"threads": {}, "at once": {"hold": []}, "slow": {"copy_engine": slow}}[engine]
    limits = {"max_batched_tokens": 8, "audit_every": 5}
    serving = make_serving(groups, 24, 90, store=store, deadline_s=1e6, scheduler=limits, **options)
    for k in range(14):
        serving.add(f"one {k}", prompt(k, 21), 1)
        serving.steps_until(lambda k=k: f"one {k}" in serving.finished)
    serving.run()
    for k in range(14):
        done = serving.serve(f"two {k}", prompt(k, 21), 1)
        assert sum(done.cached_tokens.values()) == 20, f"prompt {k} was lost"
    assert sum(d.cached_tokens["host"] for d in serving.finished.values()) > 0


@pytest.mark.parametrize("groups", [FULL, GROUPS])
def test_lazy_loses_nothing_while_its_copies_are_held_up(make_serving, groups):
    """Copies end only after all prompts have run; a block that is not stored yet must not be evicted meanwhile."""
    limits = {"max_batched_tokens": 4, "audit_every": 5}
    serving = make_serving(groups, 24, 90, hold=[STORE], store="lazy", scheduler=limits)
    for k in range(20):
        serving.add(f"one {k}", prompt(k, 9), 1)
        serving.steps_until(lambda k=k: f"one {k}" in serving.finished)
    serving.engine.release()
    serving.run()
    for k in range(20):
        done = serving.serve(f"two {k}", prompt(k, 9), 1)
        assert sum(done.cached_tokens.values()) == 8, f"prompt {k} was lost"


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a_preempted_run_resumes_by_a_load_and_not_by_computing_again(make_serving, store):
    serving = make_serving(GROUPS, {"full": 12, "win": 8, "chunk": 8}, 64, hold=[], store=store)
    serving.add("A", prompt(0, 25), 12)
    serving.steps_until(lambda: serving.known("A") == 30)
    serving.add("urgent", prompt(1, 46), 1, priority=-1)
    serving.run()
    done = serving.finished["A"]
    assert done.preemptions == 1
    assert serving.cache.stats().transfers.loaded_blocks >= 7


def test_bytes_stored_are_those_of_the_blocks(make_serving):
    serving = make_serving(GROUPS, 64, 64, hold=[])
    serving.serve("A", prompt(0, 40), 1)
    stats = serving.cache.stats()
    by_group = {name: pool.cached for name, pool in stats.host.items()}
    assert by_group["full"] == 10
    assert stats.transfers.stored_bytes == sum(n * stats.host[name].block_bytes for name, n in by_group.items())
    assert stats.transfers.stored_blocks == sum(by_group.values())


def test_the_newest_content_survives_in_a_host_tier_that_is_smaller_than_the_device(make_serving):
    serving = make_serving(FULL, 40, 12)
    for k in range(8):
        serving.serve(f"one {k}", prompt(k, 25), 1)
    inside.pools(serving.cache).forget_all()
    assert serving.serve("newest", prompt(7, 25), 1).cached_tokens["host"] == 24


def test_reading_a_host_block_makes_it_the_last_to_be_evicted(make_serving):
    serving = make_serving(FULL, 40, 12, hold=[])
    serving.serve("A", prompt(0, 25), 1)
    serving.serve("B", prompt(1, 25), 1)
    inside.pools(serving.cache).forget_all()
    serving.serve("A again", prompt(0, 25), 1)
    serving.serve("C", prompt(2, 25), 1)
    inside.pools(serving.cache).forget_all()
    assert serving.serve("A third", prompt(0, 25), 1).cached_tokens["host"] == 24
    assert {t.direction for t in serving.engine.submitted} == {STORE, LOAD}


@pytest.mark.parametrize("blocks", [1, 6])
def test_a_hit_on_the_device_makes_the_host_copy_the_last_to_be_evicted(make_serving, blocks):
    serving, length = make_serving(FULL, 40, 2 * blocks, hold=[]), 4 * blocks + 1
    serving.serve("A", prompt(0, length), 1)
    serving.serve("B", prompt(1, length), 1)
    assert serving.serve("A again", prompt(0, length), 1).cached_tokens == {"device": 4 * blocks, "host": 0}
    serving.serve("C", prompt(2, length), 1)
    inside.pools(serving.cache).forget_all()
    assert serving.serve("A third", prompt(0, length), 1).cached_tokens["host"] == 4 * blocks


def test_an_empty_host_block_is_used_before_a_live_one(make_serving):
    serving = make_serving(FULL, 40, 8, hold=[])
    serving.serve("A", prompt(0, 25), 1)
    serving.serve("B", prompt(1, 9), 1)
    inside.pools(serving.cache).forget_all()
    assert serving.serve("A again", prompt(0, 25), 1).cached_tokens["host"] == 24


class RefusingEngine(HeldEngine):
    """Cannot even begin a store."""

    def submit(self, transfer: Transfer) -> None:
        if transfer.direction is STORE:
            raise OSError("no stores today")
        super().submit(transfer)


@pytest.mark.parametrize("shared", [False, True])
def test_lazy_stores_that_the_engine_refuses_are_lost_and_nobody_waits_for_them(make_cache, shared: bool):
    options: dict[str, Any] = {"store": "lazy", "copy_engine": lambda memory: RefusingEngine(memory, [])}
    if shared:
        serving = shared_serving(make_cache, canary_spec(GROUPS), 20, 60, **options)
    else:
        serving = Serving(make_cache(GROUPS, 12, 40, **options))
    for k in range(6):
        serving.serve(f"{k}", prompt(k, 20), 2)
    counts = serving.cache.stats().transfers
    assert counts.failed_stores > 0
    assert counts.dropped_blocks > 0
    assert counts.stored_blocks == 0
