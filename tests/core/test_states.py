"""States as groups of a cache: what a step keeps, gaps, partings, hits from all tiers, and texts that stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest
from breadth import sized
from hypothesis import given, settings, strategies as st

from core.folding import STATE, Engine, spec_of, text_of
from kvtier import (
    CacheManager,
    CacheSpec,
    ConfigError,
    FullAttention,
    GroupSpec,
    KVCache,
    Part,
    RecurrentState,
    Request,
    Scheduler,
    SlidingWindow,
    Step,
    StepError,
)
from kvtier.geometry.capacity import full_blocks, held_blocks, peak_blocks
from kvtier.gpu_pool.block_table import BlockTables

PART = Part("recurrent0", (2, 3), "float32")
HALF_GIB = Part("recurrent0", (2**27,), "float32")


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 90, n).tolist()


def cache_of(spec: CacheSpec, state: int = 40, full: int = 200, host: int = 400, **options: Any) -> KVCache:
    device = {"full": full, "state": state}
    hosts = dict.fromkeys(spec.names, host) if host else None
    return KVCache(spec, device_blocks={name: device[name] for name in spec.names}, host_blocks=hosts, **options)


# --- the spec -------------------------------------------------------------------------------------------------------


def test_a_block_has_the_parts_of_all_layers_on_borders() -> None:
    group = GroupSpec("state", RecurrentState((Part("conv0", (5,), "bfloat16"), PART)), num_layers=3)
    assert group.block_tokens == 64, "unless given"
    assert group.block_bytes == 3 * (16 + 32)
    assert group.token_bytes == 0
    assert group.dtype == "bfloat16"
    assert GroupSpec("state", RecurrentState([PART]), 1, block_tokens=16).block_tokens == 16
    assert GroupSpec("full", FullAttention(), 1, 1, 8).block_tokens == 16
    assert hash(group) == hash(GroupSpec("state", RecurrentState((Part("conv0", (5,), "bfloat16"), PART)), 3))


def state_of(part: str, dtype: str) -> GroupSpec:
    return GroupSpec("s", RecurrentState((Part(part, (4,), dtype),)), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecurrentState(()), "takes a tuple of Part"),
        (lambda: RecurrentState("conv"), "takes a tuple of Part"),
        (lambda: RecurrentState(("conv",)), "takes Parts, got str"),
        (lambda: RecurrentState((PART, PART)), "names of their own, got"),
        (lambda: Part("", (1,), "float32"), "non-empty name"),
        (lambda: Part("x", (), "float32"), "part 'x': shape must be a tuple of sizes"),
        (lambda: Part("x", 4, "float32"), "part 'x': shape must be"),
        *((lambda of=of: Part("x", of(b"ab"), "float32"), "shape must be") for of in (bytes, bytearray, memoryview)),
        (lambda: Part("x", (4, 0), "float32"), "part 'x': a size must be a positive integer"),
        (lambda: Part("x", (4,), "int32"), "part 'x': unknown dtype 'int32'"),
        (lambda: Part("x", (2**20, 2**20), "float32"), "2 GiB are too many"),
        (lambda: state_of("x", "float16"), "part 'x': float16 overflows or drifts"),
        (lambda: state_of("conv0", "fp8"), "part 'conv0': float8_e4m3fn overflows"),
        (lambda: GroupSpec("s", RecurrentState((HALF_GIB,)), 4), "4 layers takes 2,147,483,648 bytes; .* below 2 GiB"),
        (lambda: GroupSpec("s", RecurrentState((PART,)), 1, num_kv_heads=2), "num_kv_heads is of keys and values"),
        (lambda: GroupSpec("s", RecurrentState((PART,)), 1, head_dim=2), "head_dim is of keys and values"),
        (lambda: GroupSpec("s", RecurrentState((PART,)), 1, head_dim_v=0), "head_dim_v is of keys and values"),
        (lambda: GroupSpec("s", RecurrentState((PART,)), 1, num_kv_heads=np.ones(2)), "num_kv_heads is of keys and"),
        (lambda: GroupSpec("s", RecurrentState((PART,)), 1, kv_scales=np.ones(2)), "kv_scales is of keys and values"),
        (lambda: Part("x", (2**30,) * 600, "float32"), "part 'x': shape has 600 sizes, and tensors 16 at most"),
        (lambda: GroupSpec("s", RecurrentState((PART,)), 0), "num_layers must be a positive integer"),
        (lambda: GroupSpec("full", FullAttention(), 1), "num_kv_heads must be a positive integer"),
        (lambda: spec_of(4, 8), "group 'state': states are kept where hits end, at multiples of 8 tokens"),
        (lambda: CacheSpec(spec_of().groups, layers=[{"kv": ("state", 0)}]), "'state' is of role 'state', not 'kv'"),
        (lambda: CacheSpec(spec_of().groups, layers=[{"state": ("full", 0)}]), "'full' is of role 'kv', not 'state'"),
    ],
)
def test_what_is_no_state_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_layers_of_states_have_that_role_unless_others_are_given() -> None:
    spec = spec_of()
    assert spec.layers == ({"kv": ("full", 0)}, {"state": ("state", 0)}, {"state": ("state", 1)})
    both = CacheSpec(spec.groups, layers=[{"kv": ("full", 0), "state": ("state", 0)}, ("state", 1)])
    assert both.layers == ({"kv": ("full", 0), "state": ("state", 0)}, {"state": ("state", 1)})


def test_parts_are_views_of_a_block_and_do_not_overlap() -> None:
    spec = spec_of(layers=3)
    with cache_of(spec, state=5) as cache:
        views = [part for layer in range(3) for part in cache.state("state", layer)]
        assert [tuple(part.shape) for part in views] == [(7, 3), (7, 2, 2)] * 3, "5, the null block, and a spare one"
        for n, part in enumerate(views):
            part[:] = n
        assert all(bool((part == n).all()) for n, part in enumerate(views))
        size = spec.group("state").block_bytes
        assert {part[1].data_ptr() - part[0].data_ptr() for part in views} == {size}
        for call, message in (
            (lambda: cache.kv("state", 0), r"keeps states: ask state\(group, layer\)"),
            (lambda: cache.state("full", 0), r"keeps keys and values: ask kv\(group, layer\)"),
            (lambda: cache.state("state", 3), "has layers 0..2, not 3"),
            (lambda: cache.state("other", 0), "no group 'other'"),
        ):
            with pytest.raises(ConfigError, match=message):
                call()


def test_keys_and_names_tell_states_apart() -> None:
    from kvtier.geometry.keys import KeyChain

    def root(*parts: Part) -> bytes:
        spec = CacheSpec([GroupSpec("state", RecurrentState(parts), 1, block_tokens=4)])
        return KeyChain(spec, "m", b"s").root(None, None, ()).tobytes()

    parts = [
        PART,
        Part("recurrent0", (3, 2), "float32"),
        Part("recurrent0", (2, 3), "bfloat16"),
        Part("x", (2, 3), "float32"),
    ]
    assert len({root(part) for part in parts} | {root(*parts[2:])}) == 5


# --- what a step takes ----------------------------------------------------------------------------------------------


def one_step(spec: CacheSpec, count: int, told: tuple[int, ...] = ()) -> tuple[Any, KVCache, Scheduler]:
    cache = cache_of(spec, full=600, host=0)
    scheduler = Scheduler(cache, max_batched_tokens=10_000, max_running=2)
    scheduler.add(Request("a", tokens(count), 4, boundaries=told))
    return scheduler.schedule(), cache, scheduler


def test_a_long_prompt_takes_four_states_and_not_one_for_each_block() -> None:
    step, cache, _ = one_step(spec_of(64, 16), 8192)
    with cache:
        states = step.group("state").states()
        assert cache.stats().device["state"].held == 4
        assert states.source.tolist() == [0]
        assert states.end.tolist() == [64, 7872, 8128, 8192], "its first, one shortly before its end, its last two"
        assert len(set(states.target.tolist())) == 4
        assert states.entry.tolist() == [0, 0, 0, 0]


def test_partings_that_a_caller_tells_of_take_one_each_up_to_a_few() -> None:
    step, cache, _ = one_step(spec_of(64, 16), 8000, told=(640, 1281, 3000, 3001, 5000, 7000, 8000))
    with cache:
        assert step.group("state").states().end.tolist() == [64, 640, 1280, 2944, 4992, 7936, 8000]
        assert cache.stats().device["state"].held == 7


def test_a_chunk_of_a_prompt_ends_where_a_state_can_be_kept() -> None:
    cache = cache_of(spec_of(8), full=600)
    with cache:
        scheduler = Scheduler(cache, max_batched_tokens=30, max_running=2)
        engine = Engine(cache, scheduler)
        scheduler.add(Request("a", tokens(61), 2))
        ends = []
        engine.run(lambda step: not ends.append(int(step.seq_lens[0])))
    assert ends == [24, 48, 61, 62]


def test_groups_of_states_have_no_slots_and_others_no_states() -> None:
    step, cache, _ = one_step(spec_of(), 9)
    with cache:
        view = step.group("state")
        for ask in (lambda: view.slot_mapping, view.paged, lambda: view.padded(4)):
            with pytest.raises(StepError, match=r"keeps nothing of single tokens; ask states\(\)"):
                ask()
        with pytest.raises(StepError, match="is of a group of states"):
            step.group("full").states()
        assert view.block_table.shape == (1, 3)


def test_capacity_counts_what_is_held() -> None:
    spec = spec_of(64, 16)
    assert held_blocks(spec, 640) == full_blocks(spec, 640) == (40, 1)
    assert peak_blocks(spec, 8192) == (512, 2)
    assert peak_blocks(spec, 8192, 8192) == (512, 3)
    assert peak_blocks(spec, 60, 60) == (4, 1)


# --- hits -----------------------------------------------------------------------------------------------------------


def served(engine: Engine, *texts: list[int], new: int = 5) -> list[dict[str, int]]:
    """Serves these prompts at once; what each has found."""
    first = engine.taken
    for i, text in enumerate(texts):
        engine.scheduler.add(Request(f"{first + i}", text, new))
    engine.taken += len(texts)
    reports = {int(report.request_id) - first: report for report in engine.run()}
    for i, text in enumerate(texts):
        assert reports[i].token_ids == text_of(text, new)
    return [dict(reports[i].cached_tokens) for i in range(len(texts))]


@pytest.mark.parametrize(("block", "full"), [(4, 4), (8, 4), (8, 0)])
def test_hits_on_the_device_end_where_a_state_was_kept(block: int, full: int) -> None:
    with cache_of(spec_of(block, full)) as cache:
        engine = Engine(cache, Scheduler(cache, max_batched_tokens=64, max_running=2))
        text = tokens(48)
        assert served(engine, text) == [{"device": 0, "host": 0}]
        assert served(engine, text) == [{"device": 48 - block, "host": 0}], "the same again, less the last token"
        answer = text + text_of(text, 5)
        (found,) = served(engine, [*answer, *tokens(9, 2)])
        assert found["device"] == 52 // block * block
        (found,) = served(engine, text[:30] + tokens(9, 3))
        assert found["device"] == block, "none was kept at the parting, and now one is, for the next who parts there"
        (found,) = served(engine, text[:30] + tokens(9, 4))
        assert found["device"] == 28 // block * block
        assert cache.audit() == []


def test_prompts_that_come_at_once_share_what_they_have_in_common() -> None:
    with cache_of(spec_of(8, 4)) as cache:
        engine = Engine(cache, Scheduler(cache, max_batched_tokens=400, max_running=4))
        common = tokens(50)
        found = served(engine, *(common + tokens(20, seed) for seed in range(1, 5)))
        assert [of["device"] for of in found] == [0, 48, 48, 48]


def test_states_come_back_from_the_host_and_from_a_store_after_a_restart(tmp_path: Path) -> None:
    text = tokens(61)
    store = {"remote_uri": f"file://{tmp_path}", "key_secret": b"t", "model_id": "m"}
    with cache_of(spec_of(8, 4), state=4, full=20, **store) as cache:
        engine = Engine(cache, Scheduler(cache, max_batched_tokens=64, max_running=1))
        served(engine, text)
        for seed in range(3):
            served(engine, tokens(61, seed + 5))
        (found,) = served(engine, text)
        assert (found["device"], found["host"]) == (0, 56)
    with cache_of(spec_of(8, 4), **store) as cache:
        cache.estimate_compute(lambda start, end: 1e9)
        engine = Engine(cache, Scheduler(cache, max_batched_tokens=64, max_running=1))
        (found,) = served(engine, text)
        assert found == {"device": 0, "host": 0, "remote": 56}
        assert cache.audit() == []


def test_a_cancelled_step_leaves_no_state_behind() -> None:
    """S6: its engine may have written some of them."""
    text = tokens(48)
    with cache_of(spec_of(8)) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=64, max_running=1)
        engine = Engine(cache, scheduler)
        scheduler.add(Request("a", text, 5))
        step = scheduler.schedule()
        engine.forward(step)
        scheduler.cancel(step)
        assert cache.stats().device["state"].cached == 0
        (report,) = engine.run()
        assert report.token_ids == text_of(text, 5)
        assert report.cached_tokens == {"device": 0, "host": 0}


def test_an_engine_with_a_scheduler_of_its_own() -> None:
    with cache_of(spec_of(8), host=0) as cache:
        manager = CacheManager(cache, max_batched_tokens=64, max_running=2)
        text = tokens(45)
        for n, hit in ((0, 0), (1, 40)):
            sequence = manager.open(Request(f"{n}", text, 3))
            assert manager.match(sequence).num_tokens == hit
            assert manager.start(sequence) is None
            step = manager.plan([(sequence, 45 - hit)])
            assert step.group("state").states().end.tolist() == ([8, 40, 45] if n == 0 else [45])
            manager.commit(step, [1])
            manager.close(sequence)
        assert cache.audit() == []


# --- everything at once ---------------------------------------------------------------------------------------------


@settings(max_examples=sized(25, 200), deadline=None)
@given(st.data())
def test_texts_are_those_without_a_cache_whatever_happens(data: st.DataObject) -> None:
    """S9: shared stems, little memory, steps of any length, cancelled steps, both tiers, lazy or eager, with slabs."""
    draw = data.draw
    block, full = draw(st.sampled_from([(2, 2), (4, 2), (4, 4), (8, 4), (4, 0)]))
    spec = spec_of(block, full)
    memory: dict[str, Any] = {"device_bytes": 4000, "host_bytes": draw(st.sampled_from([0, 6000]))}
    if draw(st.booleans()):
        most = {"full": draw(st.integers(24, 40)), "state": draw(st.integers(5, 14))}
        memory = {"device_blocks": {name: most[name] for name in spec.names}}
        memory["host_blocks"] = dict.fromkeys(spec.names, draw(st.integers(4, 40)))
    stems = [tokens(draw(st.integers(1, 30)), seed) for seed in range(2)]
    with KVCache(spec, **memory, store=draw(st.sampled_from(["eager", "lazy"])), verify="full") as cache:
        scheduler = Scheduler(cache, max_batched_tokens=draw(st.integers(4, 40)), max_running=draw(st.integers(1, 4)))
        engine, wanted = Engine(cache, scheduler), {}
        for round in range(draw(st.integers(1, 3))):
            for i in range(draw(st.integers(1, 4))):
                stem = draw(st.sampled_from(stems))
                text = stem[: draw(st.integers(1, len(stem)))] + tokens(
                    draw(st.integers(0, 12)), draw(st.integers(5, 7))
                )
                told = tuple(draw(st.lists(st.integers(1, len(text)), max_size=2)))
                request = Request(f"{round}-{i}", text, draw(st.integers(1, 8)), boundaries=told)
                scheduler.add(request)
                wanted[request.request_id] = text_of(text, request.max_new_tokens)
            rng = np.random.default_rng(draw(st.integers(0, 3)))
            fails = draw(st.sampled_from([0.0, 0.2]))
            for report in engine.run(lambda step, rng=rng, fails=fails: bool(rng.random() >= fails)):
                assert report.token_ids == wanted[report.request_id][: len(report.token_ids)]
                assert report.finish_reason == "length" or report.finish_reason == "capacity"
        assert cache.audit() == []


def test_texts_stay_right_where_cached_blocks_move_so_that_the_oldest_can_go_for_a_state() -> None:
    with KVCache(spec_of(8, 4, layers=16), device_bytes=20_000) as cache:
        engine = Engine(cache, Scheduler(cache, max_batched_tokens=64, max_running=2))
        rng, compactor = np.random.default_rng(3), inside.coordinator(cache).compactor
        chats = [tokens(20, seed) for seed in range(12)]
        for _ in range(150):
            k = int(rng.integers(12)) if rng.random() < 0.3 else int(rng.integers(4))
            served(engine, chats[k])
            chats[k] = [*chats[k], *text_of(chats[k], 5), *tokens(3, len(chats[k]))]
            if len(chats[k]) > 90:
                chats[k] = tokens(20, int(rng.integers(10**6)))
        assert compactor.num_moved > 20
        assert cache.audit() == []


def test_states_beside_windows() -> None:
    """Three kinds of groups, which all must have what a hit needs (S7)."""
    window = GroupSpec("win", SlidingWindow(6), 1, 1, 2, "float32", 4)
    groups = [*spec_of(8, 4).groups, window]
    blocks = {"full": 60, "state": 20, "win": 40}
    with KVCache(CacheSpec(groups), device_blocks=blocks, host_blocks=blocks) as cache:
        engine = Engine(cache, Scheduler(cache, max_batched_tokens=32, max_running=2))
        text = tokens(44)
        served(engine, text, tokens(30, 1))
        assert served(engine, text)[0]["device"] == 40
        assert cache.audit() == []


def test_one_layer_of_state_alone_is_enough() -> None:
    with KVCache(CacheSpec([GroupSpec("state", STATE, 1, block_tokens=4)]), device_blocks={"state": 3}) as cache:
        engine = Engine(cache, Scheduler(cache, max_batched_tokens=16, max_running=1))
        served(engine, tokens(30))
        assert cache.audit() == []


# --- what nobody may find -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_what_a_failed_request_has_computed_is_not_sealed_or_stored(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are not finite: after a chunk of its prompt, at the prompt's end, after some tokens of its answer."""
    text, names, seal = tokens(60), list[int](), BlockTables.seal
    monkeypatch.setattr(BlockTables, "seal", lambda self, *args, **named: (names.append(1), seal(self, *args, **named)))
    with cache_of(spec_of(8, 4)) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=48, max_running=2)
        engine = Engine(cache, scheduler)
        scheduler.add(Request("a", text, 20))
        for n in range(steps):
            step = scheduler.schedule()
            ids = engine.forward(step)
            names.clear()
            if n == steps - 1:
                assert scheduler.fail("a")
            reports = scheduler.commit(step, ids)
            assert bool(names) is (n in (0, 1) and n < steps - 1)
        assert [report.finish_reason for report in reports] == ["error"]
        assert cache.stats().transfers.stored_blocks == 0 or steps > 1, "only what was sealed is stored"
        assert served(engine, text) == [{"device": 0, "host": 0}]
        assert cache.audit() == []


def test_nor_is_the_end_of_a_sequence_that_an_engine_closes_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    names, seal = list[int](), BlockTables.seal
    monkeypatch.setattr(BlockTables, "seal", lambda self, *args, **named: (names.append(1), seal(self, *args, **named)))
    with cache_of(spec_of(8)) as cache:
        manager = CacheManager(cache, max_batched_tokens=64, max_running=2)
        for reason in ("stop", "error"):
            sequence = manager.open(Request(reason, tokens(20, len(reason)), 9))
            manager.match(sequence)
            manager.start(sequence)
            manager.commit(manager.plan([(sequence, 20)]), [1])
            for _ in range(5):
                manager.commit(manager.plan([(sequence, 1)]), [1])
            names.clear()
            assert manager.close(sequence, reason).finish_reason == reason
            assert bool(names) is (reason == "stop")
        assert cache.audit() == []


@pytest.mark.parametrize("memory", [{"device_bytes": 20_000}, {"device_blocks": {"full": 20, "state": 8}}], ids=str)
def test_rows_that_pad_a_step_write_to_a_block_that_is_in_no_pool(memory: dict[str, Any]) -> None:
    """S8: never to block 0, from which nobody goes on, and never to another's."""
    with KVCache(spec_of(8, 4), **memory) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=64, max_running=3)
        engine = Engine(cache, scheduler)
        for i in range(3):
            scheduler.add(Request(f"{i}", tokens(20, i), 6))
        spare = len(cache.state("state", 0)[0]) - 1
        seen = set()

        def look(step: Step) -> bool:
            view = step.group("state")
            states, mine = view.states(len(step.rows) + 2), view.states()
            assert states.target[len(mine.target) :].tolist() == [spare, spare]
            assert spare not in {*mine.target.tolist(), *mine.source.tolist()}
            seen.update(states.target.tolist())
            for rows in (len(step.rows) - 1, True, 1 << 40, "2"):
                with pytest.raises(StepError):
                    view.states(rows)
            return True

        reports = engine.run(look)
        assert spare in seen and engine.steps > 4
        assert [report.token_ids for report in sorted(reports, key=lambda report: report.request_id)] == [
            text_of(tokens(20, i), 6) for i in range(3)
        ]
        for part in (part for layer in range(2) for part in cache.state("state", layer)):
            assert bool((part[0] == 0).all()), "the null block is never written"
            assert bool((part[spare] != 0).any())
        held = cache.core.coordinator.pools
        assert spare == held.layout.rows[1], "no pool has this block"
        assert cache.audit() == []


def test_a_cache_without_states_keeps_no_such_block() -> None:
    full = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 2, "float32", 4)])
    with KVCache(full, device_blocks={"full": 5}) as cache:
        assert cache.arenas[0].num_bytes == 6 * full.groups[0].block_bytes
    with KVCache(spec_of(8, 4), device_blocks={"full": 5, "state": 3}, host_blocks={"full": 5, "state": 3}) as cache:
        each = [group.block_bytes for group in cache.spec.groups]
        assert [arena.num_bytes for arena in cache.arenas] == [6 * each[0] + 5 * each[1], 6 * each[0] + 4 * each[1]]
