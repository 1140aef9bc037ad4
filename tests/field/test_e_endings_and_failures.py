"""Section E: aborts, ends and failed copies."""

from __future__ import annotations

import math
import random
import threading
import time

import inside
import pytest
from breadth import sample
from core.driving import LOAD, STORE, HeldEngine, Serving, conserved, prompt, scheduled
from field.hosted import FULL, GROUPS, device_forgets, land, only_on_host
from patience import PATIENCE_S

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.testing import Faults, SimulatedEngine, expected_tokens

LENGTH = 25  # six full blocks and a token


def loading(make_serving, groups=FULL, blocks=16, length=LENGTH, **options) -> Serving:
    """Prompt 0 is in the host tier only; request "A" is loading it."""
    serving = make_serving(groups, blocks, 64, hold=[], **options)
    only_on_host(serving, prompt(0, length))
    serving.add("A", prompt(0, length), 3)
    serving.step()
    return serving


@pytest.mark.parametrize("when", ["before submit", "under way", "ended, not noticed", "noticed"])
def test_e1_vllm_32255_an_abort_frees_what_a_load_writes_once_and_not_while_it_runs(make_serving, when):
    serving = make_serving(FULL, 16, 64, hold=[])
    only_on_host(serving, prompt(0, LENGTH))
    serving.add("A", prompt(0, LENGTH), 3)
    if when != "before submit":
        serving.step()
    if when in ("ended, not noticed", "noticed"):
        serving.engine.end()
    if when == "noticed":
        serving.step()
    assert serving.scheduler.abort("A")
    serving.add("whole pool", prompt(1, 64), 1)
    serving.step()
    under_way = when == "under way"
    assert serving.is_running("whole pool") or "whole pool" in serving.finished or under_way
    if under_way:
        (load,) = serving.engine.live.values()
        refs = inside.pools(serving.cache).arrays.refs[load.device]
        assert refs.tolist() == [1] * 6, "the copy still writes them"
        assert not serving.is_running("whole pool")
    land(serving)
    serving.run()
    assert conserved(inside.pools(serving.cache))
    assert conserved(inside.host(serving.cache))
    assert serving.finished["A"].finish_reason == "abort"


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_e4_vllm_45823_a_reset_does_not_hand_out_what_a_copy_still_touches(make_serving, direction):
    """The device ends of a load, and the host ends of both, belong to the copy until it ends, whatever is forgotten."""
    if direction is LOAD:
        serving = loading(make_serving)
    else:
        serving = make_serving(FULL, 16, 64, hold=[STORE])
        serving.add("A", prompt(0, LENGTH), 3)
        serving.step()
    (copy,) = serving.engine.live.values()
    serving.cache.reset()
    serving.audit()
    pools, host = inside.pools(serving.cache).arrays, inside.host(serving.cache).arrays
    for _ in range(2):
        assert host.refs[copy.host].tolist() == [1] * 6
        if direction is LOAD:
            assert min(pools.refs[copy.device].tolist()) == 1
            touched = {int(b) for t in serving.engine.live.values() if t is not copy for b in t.device}
            assert not touched & set(copy.device.tolist())
        else:
            assert pools.fence[copy.device].tolist() == [copy.ticket] * 6
        serving.step()
    land(serving)
    serving.run()
    assert conserved(inside.pools(serving.cache))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("j", range(6))
def test_e5_vllm_26813_one_block_of_a_shared_load_fails(make_serving, policy, j):
    """Both who need it give the right text or the typed end; nobody ever hits the bad block."""
    serving = loading(make_serving, on_load_error=policy)
    serving.add("sharer", prompt(0, LENGTH), 5)
    serving.step()
    (load,) = serving.engine.live.values()
    bad = int(load.host[j])
    serving.engine.end(error="bad link", bad=[j])
    assert inside.host(serving.cache).arrays.mark[bad] == 2, "not noticed yet"
    serving.step()
    assert inside.host(serving.cache).arrays.mark[bad] != 2, "nobody can find it"
    land(serving)
    serving.run()
    assert serving.finished["A"].finish_reason == {"recompute": "length", "fail": "load_error"}[policy]
    assert serving.finished["sharer"].finish_reason == "length"
    assert serving.serve("later", prompt(0, LENGTH), 2).finish_reason == "length"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("group", range(3))
def test_e6_vllm_50388_a_failed_block_in_any_group_ends_neither_engine_nor_bystander(make_serving, policy, group):
    serving = loading(make_serving, GROUPS, 24, length=29, on_load_error=policy)
    serving.add("bystander", prompt(7, 9), 6)
    serving.step()
    (load,) = serving.engine.live.values()
    at = [k for k, g in enumerate(load.groups.tolist()) if g == group]
    assert at, "the group was to load something"
    serving.engine.end(error="bad link", bad=at[:1])
    land(serving)
    serving.run()
    assert serving.finished["A"].finish_reason == {"recompute": "length", "fail": "load_error"}[policy]
    assert serving.finished["bystander"].finish_reason == "length"
    for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
        nulls = pools.arrays.meta[:, 0]
        assert pools.arrays.refs[nulls].tolist() == [0, 0, 0], "a null block is nobody's"


@pytest.mark.parametrize("bad", [None, [0], [3]])
@pytest.mark.parametrize("groups", [FULL, GROUPS], ids=["full", "all"])
def test_e7_vllm_49250_who_shares_a_load_that_failed_waits_for_whoever_computes_it_anew(make_serving, groups, bad):
    """Two identical prompts, and the load of what they share is rejected, all of it or a block."""
    serving = loading(make_serving, groups, 24)
    serving.add("sharer", prompt(0, LENGTH), 5)
    serving.step()
    assert not serving.is_running("sharer"), "what it waits for is on the way"
    (load,) = serving.engine.live.values()
    serving.engine.end(error="no link", bad=bad)
    land(serving)
    computed = dict.fromkeys(("A", "sharer"), 0)
    while serving.scheduler.has_work():
        step = serving.step()
        for name, tokens in scheduled(step).items():
            computed[name] += tokens
    serving.run()
    assert serving.cache.stats().transfers.failed_loads == 1
    arrived = 0 if bad is None else 4 * bad[0]
    assert computed["A"] >= LENGTH + 2 - arrived, "what did not arrive is computed again"
    found = serving.finished["sharer"].cached_tokens
    assert found["device"] > 0 and found["host"] == 0, "the sharer found what A had computed"
    for name, new in (("A", 3), ("sharer", 5)):
        done = serving.finished[name]
        assert done.finish_reason == "length"
        assert done.token_ids == expected_tokens(serving.spec, prompt(0, LENGTH), new)
    assert len(load.groups) > 3


class FailingLoads(ThreadsEngine):
    """Every load ends with an error; stores are well."""

    def _copy(self, transfer):
        if transfer.direction is LOAD:
            return Outcome(transfer.ticket, "the link is gone")
        return super()._copy(transfer)


def ends(call) -> bool:
    """Whether ``call`` returns."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


class LoadsThatFailLate(ThreadsEngine):
    """A load fails once somebody sleeps for it, and nothing else ever wakes the sleeper."""

    def __init__(self, memory):
        self.is_slept_for, self.has_failed = threading.Event(), threading.Event()
        super().__init__(memory)

    def _copy(self, transfer):
        if transfer.direction is not LOAD:
            return super()._copy(transfer)
        assert self.is_slept_for.wait(PATIENCE_S)
        time.sleep(0.05)  # it sleeps before it is told
        self.has_failed.set()
        return Outcome(transfer.ticket, "the link is gone")

    def wait(self, timeout_s):
        if not self._woken:
            self.is_slept_for.set()
        return super().wait(timeout_s)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_e8_local_inference_191_a_failed_load_wakes_an_idle_engine(make_serving, policy):
    """Real threads, one request, no other event: ``wait``, without a limit, ends, and the next step goes on."""
    serving = make_serving(FULL, 16, 64, copy_engine=LoadsThatFailLate, on_load_error=policy)
    serving.serve("before", prompt(0, LENGTH), 1)
    device_forgets(serving)
    serving.engine.is_slept_for.clear()

    def idle():
        while not serving.engine.has_failed.is_set():
            serving.scheduler.wait(math.inf)

    serving.add("A", prompt(0, LENGTH), 3)
    assert serving.step().num_tokens == 0, "it waits for its load"
    assert ends(idle), "nobody has woken the engine"
    step = serving.step()
    if policy == "recompute":
        assert scheduled(step) == {"A": LENGTH}
    else:
        assert serving.finished["A"].finish_reason == "load_error"
    serving.run()
    assert serving.cache.stats().transfers.failed_loads == 1


class SleepsForEver(HeldEngine):
    """Whoever waits for a copy that has not ended sleeps until somebody else comes, and nobody does."""

    def wait(self, timeout_s):
        if not self.ended:
            threading.Event().wait()
        return True


@pytest.mark.parametrize("noticed", ["by the commit", "by the next schedule"])
def test_e8_local_inference_191_a_failed_load_is_news_whoever_has_noticed_it(make_serving, noticed):
    """The failure is reported between a step's ``schedule`` and its ``commit``, or after it: ``wait`` returns."""
    serving = make_serving(FULL, 16, 64, copy_engine=lambda memory: SleepsForEver(memory, []))
    only_on_host(serving, prompt(0, LENGTH))
    serving.add("A", prompt(0, LENGTH), 3)
    step, ids = serving.begin()
    serving.scheduler.wait(0)  # from here on, the request's arrival is no news
    if noticed == "by the commit":
        serving.engine.end(error="the link is gone")
    serving.end(step, ids)
    if noticed == "by the next schedule":
        serving.engine.end(error="the link is gone")
    assert serving.scheduler.has_work()
    assert ends(lambda: serving.scheduler.wait(math.inf)), "nothing will ever wake it"
    assert scheduled(serving.step()) == {"A": LENGTH}
    assert serving.run()["A"].finish_reason == "length"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_e9_miaai_100_a_source_that_always_fails_is_tried_once_per_request(make_serving, policy):
    serving = make_serving(FULL, 16, 64, copy_engine=FailingLoads, on_load_error=policy)
    serving.serve("before", prompt(0, LENGTH), 1)
    for k in range(4):
        device_forgets(serving)
        serving.serve(f"r{k}", prompt(0, LENGTH), 2)
        assert serving.cache.stats().transfers.failed_loads <= k + 1
    if policy == "fail":
        reasons = [serving.finished[f"r{k}"].finish_reason for k in range(4)]
        assert reasons == ["load_error", "length", "load_error", "length"], "the bad key was forgotten, then made anew"


@pytest.mark.parametrize("store", sample(["eager", "lazy"], ["lazy"]))
def test_e10_vllm_54914_a_long_run_of_aborts_and_failures_keeps_every_promise(make_serving, store):
    """In small what took days there: every step is audited, and what was matched can always be loaded or ends well."""
    faults = Faults(fail=0.15, tear=0.1, lose=0.01, max_delay_s=2.0)
    engine = lambda memory: SimulatedEngine(memory, 5, faults)  # noqa: E731
    sizes = {"full": 12, "win": 6, "chunk": 6}
    serving = make_serving(GROUPS, sizes, {"full": 30, "win": 16, "chunk": 16}, copy_engine=engine, store=store)
    rng = random.Random(11)
    for k in range(100):
        serving.add(f"r{k}", prompt(rng.randrange(6), rng.randint(1, 34)), rng.randint(1, 4))
        if k % 5 == 0:
            serving.scheduler.abort(f"r{k - rng.randint(0, min(k, 4))}")
        while serving.scheduler.num_waiting > 3:
            serving.step()
        serving.engine.end_lost()
    serving.run(limit=5000)
    assert len(serving.finished) == 100
    assert serving.cache.stats().transfers.failed_loads > 0


@pytest.mark.parametrize("store", sample(["eager", "lazy"], ["eager"]))
def test_e11_vllm_28950_a_host_tier_of_one_block_survives_a_long_workload(make_serving, store):
    """The engine there broke between 550 and 565 prompts, always after stores had been skipped."""
    serving = make_serving(FULL, 8, 1, hold=[], device="meta", store=store, scheduler={"audit_every": 20})
    for k in range(600):
        serving.add(f"r{k}", prompt(k % 40, 5 + k % 17), 1)
        serving.step()
    serving.run()
    stats = serving.cache.stats()
    assert {done.finish_reason for done in serving.finished.values()} == {"length"}
    assert len(serving.finished) == 600
    assert stats.host["full"].cached == 1
    assert stats.transfers.dropped_blocks > 0
