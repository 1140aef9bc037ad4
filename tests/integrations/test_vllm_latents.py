"""Latents (MLA) on several ranks, which all have the same: the host tier and the remote tier keep them once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from breadth import sample, sized
from remote.fake_backend import Shared

from integrations.fake_vllm import FakeEngine
from integrations.fake_worker import PAGE, SPECS, kv_cache_config
from integrations.served_once import TEXT, push_out, use
from integrations.standin import be_rank
from integrations.test_vllm_connector import UNKIND, random_requests
from integrations.test_vllm_remote import Made, made, serve  # noqa: F401
from kvtier import ConfigError, HostPlan, MemoryUnavailable, UnsupportedModel
from kvtier.cpu_offload.transfer import Direction
from kvtier.integrations.vllm.geometry import geometry_of, sharers_of
from kvtier.integrations.vllm.worker import shared_by_ranks
from kvtier.remote.envelope import TRAILER_BYTES
from kvtier.testing import Faults

HOST = 40_000
BLOCKS = (len(TEXT) + 4) // 4
"""Whole ones of a text and its answer."""
HIT = (len(TEXT) - 1) // 4
"""Those of them that its prompt can hit."""
BLOCK_BYTES = 2 * PAGE


def watched(workers: int, **options) -> tuple[FakeEngine, dict[Direction, list[int]]]:
    """An engine, and the bytes that each of its ranks has copied, by direction."""
    engine = FakeEngine(("latents",), 50, workers, **{"host_memory": HOST} | options)
    moved = {direction: [0] * workers for direction in Direction}
    for rank, copier in enumerate(engine.engines):

        def submit(transfer, rank=rank, whole=copier.submit):
            moved[transfer.direction][rank] += len(transfer.groups) * PAGE
            whole(transfer)

        copier.submit = submit
    return engine, moved


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_ranks_store_each_block_once_and_load_it_from_one_memory(workers):
    engine, moved = watched(workers)
    serve(engine, TEXT)
    assert sum(moved[Direction.STORE]) == BLOCKS * BLOCK_BYTES, "one copy, whatever the number of ranks"
    assert all(moved[Direction.STORE]), "each rank stores its part"
    push_out(engine)
    assert serve(engine, TEXT) == HIT * 4
    assert moved[Direction.LOAD] == [HIT * BLOCK_BYTES] * workers
    memories = [copier.memory.arenas[1].bytes for copier in engine.engines]
    assert {memory.size for memory in memories} == {HOST}, "all of host_memory, once"
    for memory in memories[1:]:
        assert np.array_equal(memory, memories[0])
    stats = engine.books.stats().transfers
    assert (stats.stored_blocks, stats.loaded_blocks, stats.failed_loads) == (BLOCKS, HIT, 0)


@pytest.mark.parametrize("faults", [Faults(max_delay_s=2.0), UNKIND], ids=["sound", "unkind"])
@pytest.mark.parametrize(("seed", "workers"), sample(itertools.product(range(60), [2, 3]), [(0, 2), (1, 3)]))
def test_random_requests_read_only_what_was_written(monkeypatch, seed, faults, workers):
    engine = FakeEngine(("latents",), 24, workers, seed, faults, host_memory=6_000 + 10_000 * (seed % 2))
    random_requests(engine, seed, sized(60, 90), monkeypatch)
    assert engine.books.counts.stores > 0, "what a seed loads is left to chance: the tests above count it"
    assert engine.books.counts.corrupt_blocks == 0 or faults is UNKIND


def test_a_store_that_fails_on_one_rank_is_found_on_none():
    engine, moved = watched(2)
    use(SimpleNamespace(engines=engine.engines[1:]), Faults(fail=1.0))
    serve(engine, TEXT)
    assert all(moved[Direction.STORE])
    push_out(engine)
    assert serve(engine, TEXT) == 0 and engine.loads == 0


def test_a_bit_that_rots_is_seen_on_every_rank_and_its_text_is_computed():
    engine, _ = watched(2)
    serve(engine, TEXT)
    push_out(engine)
    engine.engines[0].memory.arenas[1].bytes[:] ^= 1
    serve(engine, TEXT)
    assert engine.failures == 1 and engine.wrong == 0
    assert engine.books.counts.corrupt_blocks == HIT


def test_a_load_that_one_rank_never_ends_is_computed_and_stored_again():
    engine, _ = watched(2)
    serve(engine, TEXT)
    push_out(engine)
    use(engine, Faults(lose=1.0))
    use(SimpleNamespace(engines=engine.engines[:1]), Faults(max_delay_s=1.0))
    assert engine.serve(TEXT).cached_tokens == 0
    use(engine, Faults(max_delay_s=1.0))
    engine.settle(ends_lost=True)
    engine.step()
    engine.check()
    for cached in (0, HIT * 4):
        push_out(engine)
        assert serve(engine, TEXT) == cached


@pytest.mark.parametrize("workers", [2, 3])
def test_the_remote_tier_keeps_one_copy_that_every_rank_reads(made: Made, workers):  # noqa: F811
    serve(made.engine(("latents",)), TEXT)
    by_one, made.shared = made.shared.objects, Shared()
    one, other = (made.engine(("latents",), workers=workers) for _ in range(2))
    assert serve(one, TEXT) == 0
    assert sum(map(len, made.shared.objects.values())) == sum(map(len, by_one.values())) > 0, "as one rank has"
    puts = [name for store in one.stores for what, names in store.made if what == "put" for name in names]
    assert len(puts) == len(set(puts)) == len(by_one), "each object is put by one rank"
    assert one.books.remote_counts.spilled_bytes == sum(len(data) - TRAILER_BYTES for data in by_one.values())
    assert serve(other, TEXT) == HIT * 4
    assert (one.wrong, other.wrong, other.loads) == (0, 0, 1)


def test_ranks_take_turns_with_the_remote_tier(made: Made):  # noqa: F811
    engine = made.engine(("latents",), workers=2)
    for first in range(12):
        serve(engine, [first, *TEXT[1:]])
    puts = [sum(what == "put" for what, _ in store.made) for store in engine.stores]
    assert len([count for count in puts if count]) == 2, f"of the scheduler's and two workers' backends: {puts}"


def test_latents_beside_other_layers_are_refused_on_several_ranks():
    FakeEngine(("latents", "full"), 50)
    with pytest.raises(UnsupportedModel, match="same on each rank, beside layers whose blocks are not"):
        FakeEngine(("latents", "full"), 50, 2)


# --- the memory that ranks share ------------------------------------------------------------------


def plan_of(workers: int, **options) -> HostPlan:
    config = kv_cache_config([SPECS["latents"]()], 50)
    geometry = geometry_of(config)
    return HostPlan(geometry.groups, geometry.memory_bytes, HOST, sharers=sharers_of(config, workers), **options)


def test_a_rank_is_told_if_rank_0_has_no_memory(monkeypatch):
    monkeypatch.setattr("kvtier.cpu_offload.shared_memory.available_ram_bytes", lambda: 1000)
    be_rank(0)
    with pytest.raises(MemoryUnavailable, match=r"all ranks share, but .* has 1,000 bytes.*lower host_memory"):
        shared_by_ranks(plan_of(2))
    be_rank(1)
    with pytest.raises(MemoryUnavailable, match="rank 0 could not make the host memory"):
        shared_by_ranks(plan_of(2))


def test_a_copy_engine_with_memory_of_its_own_is_refused():
    from kvtier.cpu_offload.engines import EngineFactory
    from kvtier.testing import SimulatedEngine

    class Own(EngineFactory):
        def __call__(self, memory):
            return SimulatedEngine(memory)

        def host_memory(self, num_bytes, setting, seams):
            return np.zeros(num_bytes, np.uint8)

    with pytest.raises(ConfigError, match="host memory of its own, which workers cannot share"):
        FakeEngine(("latents",), 50, 2, host_memory=HOST, copy_engine=Own())
