"""Section K: what makes a tier slow, counted and not timed."""

from __future__ import annotations

import inside
import pytest
from breadth import sample
from core.driving import LOAD, STORE, prompt, scheduled
from field.hosted import FULL, GROUPS, device_forgets, land, only_on_host

from benchmarks.e2e import back_to_back
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.cpu_offload import store_queue
from kvtier.testing import Faults, SimulatedDevice


@pytest.mark.parametrize("layers", [1, 8])
@pytest.mark.parametrize("tokens", [33, 481])
def test_k1_vllm_38460_a_step_submits_one_copy_a_direction_whatever_blocks_and_layers(make_serving, layers, tokens):
    spec = CacheSpec(
        [
            GroupSpec("full", FullAttention(), layers, 1, 8, block_tokens=4),
            GroupSpec("win", SlidingWindow(20), layers, 1, 8, block_tokens=4),
            GroupSpec("chunk", ChunkedLocal(16), layers, 1, 8, block_tokens=4),
        ]
    )
    serving = make_serving(spec, 130, 130, hold=[], device="meta", scheduler={"max_batched_tokens": 512})
    serving.add("A", prompt(1, tokens), 3)
    serving.steps_until(lambda: "A" in serving.finished)
    by_steps = len(serving.engine.submitted)
    assert by_steps <= 2, "one for the prompt's step, one for what the end of the text leaves"
    assert sum(len(t.groups) for t in serving.engine.submitted) >= (tokens - 1) // 4
    serving.run()
    device_forgets(serving)
    serving.engine.submitted.clear()
    serving.serve("again", prompt(1, tokens), 1)
    assert [t.direction for t in serving.engine.submitted if t.direction is LOAD] == [LOAD]


@pytest.mark.parametrize(("store", "stored"), [("eager", 30), ("lazy", 0)])
def test_k3_vllm_43946_traffic_without_hits_is_bounded(make_serving, store, stored):
    """Six prompts of five full blocks that nobody repeats, in a pool that holds them all: each block is stored once
    (eager), or not at all while there is room (lazy)."""
    serving = make_serving(FULL, 200, 64, hold=[], store=store, scheduler={"max_batched_tokens": 16})
    for k in range(6):
        serving.serve(f"{k}", prompt(k, 21), 1)
    assert serving.cache.stats().transfers.stored_blocks == stored


def test_k3_vllm_43946_lazy_stores_as_much_as_is_evicted_and_a_margin(make_serving):
    serving = make_serving(FULL, 30, 200, hold=[], store="lazy", scheduler={"max_batched_tokens": 8})
    for k in range(12):
        serving.serve(f"{k}", prompt(k, 21), 1)
    stats, margin = serving.cache.stats(), 2 * 8 // 4 + 2
    assert 0 < stats.transfers.stored_blocks <= stats.device["full"].evicted + margin


@pytest.mark.parametrize("host", [True, False])
def test_k6_lmcache_1061_the_benchmark_publishes_where_its_prompt_tokens_came_from(host):
    result = back_to_back.measure(800, host, repeats=1)
    for phase, sources in result["prompt_tokens"].items():
        assert set(sources) == {"device", "host", "computed"}, phase
        assert sum(sources.values()) == 800, phase
    assert (result["prompt_tokens"]["host_hit" if host else "pushed_out"]["host"] > 0) == host


@pytest.mark.parametrize("groups", [FULL, GROUPS])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_k7_vllm_45595_a_request_that_arrives_while_stores_drain_runs_in_the_next_step(make_serving, groups, store):
    serving = make_serving(groups, 24, 64, hold=[STORE], store=store)
    serving.add("A", prompt(0, 41), 1)
    serving.steps_until(lambda: "A" in serving.finished)
    if store == "eager":
        assert serving.engine.live, "stores were to be under way"
    serving.add("B", prompt(1, 13), 1)
    assert scheduled(serving.step()) == {"B": 13}
    assert serving.engine.ordered == [], "and it waited for none of them"
    land(serving)
    serving.run()


def test_k9_atom_2053_a_load_is_submitted_at_once_however_many_stores_wait(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 2 * 128)
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    serving = make_serving(FULL, 64, 128, hold=[])
    only_on_host(serving, prompt(0, 21))
    serving.engine.hold = {STORE, LOAD}
    serving.add("backlog", prompt(1, 61), 1)
    serving.step()
    assert serving.cache.stats().transfers.live == 15
    assert len(serving.engine.live) == 2, "the others are not submitted yet"
    serving.add("again", prompt(0, 21), 1)
    serving.step()
    assert [t.direction for t in serving.engine.live.values()] == [STORE, STORE, LOAD]
    land(serving)
    serving.run()


class OneStream(SimulatedDevice):
    """Loads and stores queue behind each other."""

    def new_stream(self, name):
        return (
            self._copies if hasattr(self, "_copies") else self.__dict__.setdefault("_copies", super().new_stream(name))
        )


def steps_to_first_token(make_serving, device: SimulatedDevice, backlog: int) -> int:
    """Steps from the arrival of a request whose prefix the host has to its first token, behind so many stores."""
    inside.set_faults(device, Faults(max_delay_s=0.0))
    serving = make_serving(
        FULL, 200, 400, copy_engine=device.engine, scheduler={"max_batched_tokens": 400}, deadline_s=1e6
    )
    serving.serve("before", prompt(0, 41), 1)
    device_forgets(serving)
    inside.set_faults(device, Faults(max_delay_s=8.0))
    if backlog:
        serving.add("backlog", prompt(1, 4 * backlog + 1), 1)
        serving.step()
        assert len(device.under_way()) == backlog
    serving.add("again", prompt(0, 41), 2)
    start = serving.steps
    serving.steps_until(lambda: serving.known("again") > 41)
    took = serving.steps - start
    serving.run()
    assert serving.finished["again"].cached_tokens == {"device": 0, "host": 40}
    return took


@pytest.mark.parametrize("seed", sample(range(3), [0]))
def test_k9_atom_2053_behind_64_stores_a_load_takes_at_most_twice_as_long(make_serving, monkeypatch, seed):
    """In steps, of which each costs a second of the simulated device; on one stream it would take the stores' time."""
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    alone, behind = (steps_to_first_token(make_serving, SimulatedDevice(seed), backlog) for backlog in (0, 64))
    assert behind <= 2 * alone
    assert steps_to_first_token(make_serving, OneStream(seed), 64) > 4 * alone


@pytest.mark.parametrize("groups", [FULL, GROUPS], ids=["full", "all"])
@pytest.mark.parametrize(("found", "expected"), [("nothing", 5), ("device", 1), ("host", 2)])
def test_k5_dynamo_4774_steps_to_the_first_token_are_what_they_were(make_serving, groups, found, expected):
    """33 tokens, 8 a step: five steps if nothing is found, one on the device, and one more for the load."""
    serving = make_serving(groups, 40, 60, hold=[], scheduler={"max_batched_tokens": 8})
    if found != "nothing":
        serving.serve("before", prompt(0, 33), 1)
    if found == "host":
        device_forgets(serving)
    serving.add("A", prompt(0, 33), 2)
    start = serving.steps
    serving.steps_until(lambda: serving.known("A") > 33)
    assert serving.steps - start == expected
    serving.run()


def test_k10_vllm_47234_what_the_host_evicted_is_stored_again_when_it_is_hit(make_serving):
    """And only that: a hit looks at the blocks that it hit, once, not at all that was ever stored."""
    serving = make_serving(FULL, 40, 8, hold=[])
    serving.serve("A", prompt(0, 25), 1)
    serving.serve("B", prompt(1, 25), 1)  # of A's six host blocks two are left
    before = serving.cache.stats().transfers.stored_blocks
    serving.serve("A again", prompt(0, 25), 1)
    assert serving.cache.stats().transfers.stored_blocks - before == 4
    device_forgets(serving)
    assert serving.serve("A third", prompt(0, 25), 1).cached_tokens["host"] == 24


@pytest.mark.usefixtures("unaudited")
def test_k10_vllm_47234_steps_look_up_only_blocks_that_are_new(make_serving):
    """A long text: the host tier is asked once for each block of it, not for all of them in every step."""
    serving = make_serving(FULL, 64, 64, hold=[], scheduler={"audit_every": 1000})  # audits look up everything
    host, asked = inside.host(serving.cache), []
    choose, find = host.take_for_stores, host.find
    host.take_for_stores = lambda device, groups, *rest: (asked.append(len(groups)), choose(device, groups, *rest))[1]
    host.find = lambda groups, keys: (asked.append(len(groups)), find(groups, keys))[1]
    serving.serve("A", prompt(0, 41), 60)
    assert sum(asked) == (41 + 59) // 4
