"""Groups of recurrent states: their blocks come from vLLM's hand-off, and a hit has the state of every group."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from breadth import sample, sized

from integrations.fake_vllm import FakeEngine, stems
from integrations.fake_worker import PAGE, SPECS, STATE, kv_cache_config
from integrations.served_once import push_out
from integrations.standin import STATES
from integrations.test_vllm_connector import UNKIND, random_requests
from kvtier import ConfigError, OutsideGroup
from kvtier.geometry.kinds import FullAttention, Kind, Part, RecurrentState
from kvtier.geometry.outside import Fragment, OutsideSpec
from kvtier.integrations.vllm.geometry import geometry_of
from kvtier.integrations.vllm.identity import facts_of
from kvtier.remote.names import outside_namespace
from kvtier.testing import Faults

HYBRID = ("state", "state", "full")


@pytest.mark.parametrize("kinds", [HYBRID, ("state",), ("state", "window", "full")], ids=str)
def test_what_was_pushed_out_comes_back_from_the_host(kinds):
    engine = FakeEngine(kinds, 34, host_memory=40_000)
    first, second = (text[:41] + [n] * (59 - len(text[:41])) for n, text in enumerate(stems(1, 2)))
    assert engine.serve(first).cached_tokens == 0
    assert engine.serve(second).cached_tokens == 0
    engine.settle()
    for block in engine.pool.blocks:
        engine.pool.forget(block)
    assert engine.serve(first).cached_tokens == 56
    engine.settle()
    assert engine.serve([*second, 5, 6, 7]).cached_tokens == 56
    engine.settle()
    assert engine.loads == 2
    engine.check()


@pytest.mark.parametrize("v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("faults", [Faults(max_delay_s=3.0), UNKIND], ids=["sound", "unkind"])
@pytest.mark.parametrize(("seed", "workers"), sample(itertools.product(range(40), [1, 2]), [(0, 1), (1, 2)]))
def test_random_requests_read_only_what_was_written(monkeypatch, seed, faults, workers, v2):
    kinds, blocks = [(HYBRID, 34), (("state", "window", "full"), 36), (("state",), 10)][seed % 3]
    memory = [6_000, 20_000][seed % 2] * workers
    engine = FakeEngine(kinds, blocks, workers, seed, faults, settings={"v2": v2}, host_memory=memory)
    random_requests(engine, seed, sized(60, 90), monkeypatch)
    assert engine.loads + engine.preemptions > 3


@pytest.mark.parametrize("seed", [3, 6])
def test_model_runner_v2_begins_new_states_before_anybody_is_asked(monkeypatch, seed):
    """Stores that are so late read what it has written; these seeds found it. With V1's order they are ordered."""
    faults, memory = Faults(max_delay_s=6.0), [6_000, 20_000][seed % 2]
    engine = FakeEngine(HYBRID, 34, 1, seed, faults, settings={"v2": True}, host_memory=memory)
    random_requests(engine, seed, 60, monkeypatch)


def served(kinds: tuple[str, ...] = HYBRID, size: int = 59, **options: Any) -> tuple[FakeEngine, list[int]]:
    """An engine with a text in the host tier alone."""
    engine = FakeEngine(kinds, 50, host_memory=40_000, **options)
    text = [n * 7 % 1000 for n in range(size)]
    engine.serve(text)
    engine.settle()
    push_out(engine)
    return engine, text


def stored_states(engine: FakeEngine) -> int:
    """Blocks of states in the host tier."""
    stats = engine.books.stats().host
    return sum(pool.cached for name, pool in stats.items() if "state" in name)


def offering(engine: FakeEngine, change: Callable[[list[Any]], list[Any]]) -> None:
    """From now on vLLM offers what ``change`` makes of the (group, block, end) that it would offer."""
    output = engine.output

    def changed(*given: Any) -> Any:
        found = output(*given)
        state = found.kv_connector_block_state
        state.boundary_state_offloads = {name: change(each) for name, each in state.boundary_state_offloads.items()}
        return found

    engine.output = changed


def test_states_are_taken_from_what_vllm_offers_and_from_nowhere_else():
    engine, _ = served()
    assert stored_states(engine) == 2, "one of each group, at the prompt's last boundary"
    output = engine.output
    engine.output = lambda *given: SimpleNamespace(**vars(output(*given)) | {"kv_connector_block_state": None})
    engine.serve([5] * 59, 13)
    engine.settle()
    assert stored_states(engine) == 2, "nothing was offered"
    assert engine.serve([5] * 59).cached_tokens == 56, "on the device"
    push_out(engine)
    assert engine.serve([5] * 59).cached_tokens == 0, "keys and values alone are no hit"
    engine.check()


def test_a_state_of_one_group_alone_is_no_hit():
    engine, text = served()
    offering(engine, lambda offers: [offer for offer in offers if offer[0] != 1])
    other = [n + 1 for n in text]
    engine.serve(other)
    engine.settle()
    push_out(engine)
    assert stored_states(engine) == 3
    assert engine.serve(other).cached_tokens == 0
    assert engine.serve(text).cached_tokens == 56
    engine.check()


def test_offers_of_finer_boundaries_and_of_vllms_null_block_are_left_alone():
    engine, text = served()
    offering(engine, lambda offers: [*((g, block, end + 1) for g, block, end in offers), (0, 0, 56)])
    engine.serve([n + 1 for n in text])
    engine.settle()
    assert stored_states(engine) == 2
    engine.check()


def test_where_prompts_part_a_state_is_kept_though_only_the_host_tier_knows_the_first_prompt():
    engine, text = served()
    for answer in (0, 40, 40):
        request = engine.serve([*text[:41], *(1000 + engine.steps + n for n in range(18))])
        assert request.cached_tokens == answer
        engine.settle()
        push_out(engine)
    engine.check()


def test_a_device_hit_makes_the_host_tiers_state_newer():
    engine, text = served()
    assert engine.serve(text).cached_tokens == 56
    engine.settle()
    touched = []
    touch = engine.books._parts.stores.touch
    engine.books._parts.stores.touch = lambda groups, keys, cold=False: (
        touched.extend(groups.tolist()) if not cold else None,
        touch(groups, keys, cold),
    )[1]
    assert engine.serve([*text[:57], 1]).cached_tokens == 56
    assert {0, 1} <= set(touched)


def test_a_state_is_copied_as_large_as_it_is():
    spec = SPECS["state"]()
    group, full = geometry_of(kv_cache_config([spec, SPECS["full"]()], 8)).groups
    assert group.attention == RecurrentState((Part("0", (4,), "bfloat16"), Part("1", (2, 1), "float32")))
    assert [fragment.num_bytes for fragment in group.fragments] == [STATE, STATE]
    assert [fragment.num_bytes for fragment in full.fragments] == [PAGE, PAGE]
    spec.real_page_size_bytes = 20
    assert geometry_of(kv_cache_config([spec], 8)).groups[0].fragments[0].num_bytes == 32, "what a GPU's copies come in"


CHANGES = {
    "shapes": ((2, 2), (2, 1)),
    "dtypes": (torch.float16, torch.float32),
    "mamba_type": "mamba2",
    "real_page_size_bytes": 32,
}


def test_names_of_the_remote_tier_tell_states_apart():
    def name(kind: str = "state", **changes: Any) -> bytes:
        spec = SPECS[kind]()
        vars(spec).update(changes)
        return outside_namespace("m", OutsideSpec(geometry_of(kv_cache_config([spec], 8)).groups), b"secret")

    names = [name(), name("window", sliding_window=2), *(name(**{field: value}) for field, value in CHANGES.items())]
    assert len(set(names)) == len(names)


def test_how_convolutions_states_lie_is_a_fact_of_a_worker(monkeypatch):
    layer = SimpleNamespace(mamba_type="mamba2")
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"0": layer, "1": object()}))
    caches = {"0": torch.zeros(8, 1, 1, 32), "1": torch.zeros(8, 1, 1, 32)}
    before = facts_of(config, 8, caches)
    monkeypatch.setattr(sys.modules[STATES], "get_conv_state_layout", lambda: "DS")
    assert facts_of(config, 8, caches) != before
    del layer.mamba_type
    assert facts_of(config, 8, caches) != before
    monkeypatch.undo()
    assert "SD" not in facts_of(config, 8, caches), "of other models nothing has changed"


def test_blocks_of_states_end_where_hits_do():
    state = RecurrentState((Part("0", (4,), "float32"),))
    groups = [
        OutsideGroup("a", state, 4, 8, (Fragment(0, 16, 16),)),
        OutsideGroup("b", FullAttention(), 8, 8, (Fragment(256, 16, 16),)),
    ]
    with pytest.raises(ConfigError, match="multiples of 8 tokens"):
        OutsideSpec(groups)
    assert OutsideSpec(groups[:1]).groups[0].attention.kind is Kind.STATE
