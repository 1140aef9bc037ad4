"""Which states of a text stay: one shortly before its prompt's end, and one at its own end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest

from core.folding import Engine, spec_of, text_of
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Part, RecurrentState, Request, Scheduler
from kvtier.coordinator.boundaries import Boundaries
from kvtier.coordinator.keeping import SHORT, SHORT_PAYS, Course, Keeping, Text

TOKEN_BYTES = 16
"""Of K and V."""
PROMPT = 1000
LAST = (PROMPT - 1) // 64 * 64


def serving(state_bytes: int, host: bool = False, **remote: Any) -> tuple[KVCache, Engine]:
    parts = Part("conv0", (3,), "bfloat16"), Part("recurrent0", (state_bytes // 4 - 4,), "float32")
    groups = [
        GroupSpec("full", FullAttention(), 1, 1, 2, "float32", block_tokens=64),
        GroupSpec("state", RecurrentState(parts), 1),
    ]
    blocks = {"full": 200, "state": 40}
    cache = KVCache(CacheSpec(groups), device_blocks=blocks, host_blocks=blocks if host else None, **remote)
    return cache, Engine(cache, Scheduler(cache, max_batched_tokens=4096, max_running=2))


def ask(engine: Engine, name: str, tokens: list[int], count: int = 1, told: tuple[int, ...] = ()) -> int:
    """Serves one request; returns its hit."""
    engine.scheduler.add(Request(name, tokens, count, boundaries=told))
    (done,) = engine.run()
    assert done.token_ids == text_of(tokens, count)
    return sum(done.cached_tokens.values())


def prompt(n: int = PROMPT, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 90, n).tolist()


def hot_states(pools) -> tuple[int, int]:
    """States that nobody holds: (superseded ones, others)."""
    blocks = pools.coldest(1, 40)
    cold = int(pools.is_superseded(np.ones(len(blocks), np.int32), blocks).sum())
    return cold, len(blocks) - cold


@pytest.mark.parametrize("back", [1, 70, SHORT - 1])
def test_a_text_that_parts_shortly_before_a_long_prompt_s_end_finds_the_state_before_that(back: int) -> None:
    cache, engine = serving(64)
    with cache:
        ask(engine, "a", prompt(), 100)
        assert ask(engine, "b", prompt()[: LAST - back] + [91] * 300) == LAST - SHORT


@pytest.mark.parametrize(("size", "hit"), [(0, LAST - SHORT), (16, 64)])
def test_unless_a_state_costs_more_than_a_part_of_the_text(size: int, hit: int) -> None:
    cache, engine = serving(LAST * TOKEN_BYTES // SHORT_PAYS // 16 * 16 + size)
    with cache:
        ask(engine, "a", prompt(), 100)
        assert ask(engine, "b", prompt()[: LAST - 70] + [91] * 300) == hit


@pytest.mark.parametrize("host", [False, True])
def test_at_its_end_a_text_s_other_states_go_first(host: bool) -> None:
    cache, engine = serving(64, host)
    with cache:
        ask(engine, "a", prompt(), 100)
        tiers = [inside.pools(cache), *([inside.host(cache)] if host else [])]
        assert [hot_states(pools)[1] for pools in tiers] == [2] * len(tiers), (
            "short before the prompt's end, and the end"
        )
        following = prompt() + text_of(prompt(), 100)[:-1] + prompt(600, 1)
        assert ask(engine, "b", following, 70) == 1088
        assert [hot_states(pools)[1] for pools in tiers] == [2] * len(tiers), "those of the turn before are old now"


def names_of(cache: KVCache, tokens: list[int]) -> np.ndarray:
    """A key for each 64 tokens."""
    chain = inside.coordinator(cache).chain
    return chain.extend(chain.root(None, None, ()), np.array(tokens, np.int32), np.empty((0, 2), np.uint64))


def state_after(cache: KVCache, tokens: list[int]) -> int:
    """The block with the state after these tokens, 0 if there is none."""
    return int(inside.pools(cache).find(np.array([1], np.int32), names_of(cache, tokens)[-1:])[0])


def test_the_state_shortly_before_a_prompt_s_end_is_as_young_as_the_text() -> None:
    cache, engine = serving(64)
    with cache:
        engine.scheduler.add(Request("a", prompt(), 200))
        engine.scheduler.add(Request("b", prompt(seed=1), 2))
        engine.run()
        order = inside.pools(cache).coldest(1, 40).tolist()
        a, b = (order.index(state_after(cache, prompt(seed=seed)[:LAST])) for seed in (0, 1))
        assert a < b, "superseded, before others"
        a, b = (order.index(state_after(cache, prompt(seed=seed)[: LAST - SHORT])) for seed in (0, 1))
        assert a > b, "its text has ended later"


def test_after_a_turn_of_few_tokens_the_state_before_the_last_prompt_s_end_stays() -> None:
    cache, engine = serving(64)
    with cache:
        ask(engine, "a", prompt(), 100)
        assert ask(engine, "b", prompt() + text_of(prompt(), 100)[:-1] + prompt(100, 1), 300) == 1088
        block = np.array([state_after(cache, prompt()[: LAST - SHORT])], np.int32)
        assert not inside.pools(cache).is_superseded(np.array([1], np.int32), block).any()


@pytest.mark.parametrize(("told", "hit"), [((), 0), ((640,), 640), ((LAST - SHORT,), LAST - SHORT)])
def test_it_is_spilled_only_if_others_are_to_part_there(tmp_path: Path, told: tuple[int, ...], hit: int) -> None:
    remote = {"remote_uri": f"file://{tmp_path}", "key_secret": b"t", "model_id": "m"}
    cache, engine = serving(64, True, **remote)
    with cache:
        ask(engine, "a", prompt(), 100, told)
    cache, engine = serving(64, True, **remote)
    with cache:
        cache.estimate_compute(lambda start, end: 1e9)
        assert ask(engine, "b", prompt()[: LAST - SHORT + 30] + [91] * 300) == hit


def test_a_turn_of_few_tokens_keeps_the_state_that_it_goes_on_from() -> None:
    cache, engine = serving(64)
    with cache:
        ask(engine, "a", prompt(), 100)
        following = prompt() + text_of(prompt(), 100)[:-1] + prompt(150, 1)
        assert ask(engine, "b", following, 300) == 1088
        assert hot_states(inside.pools(cache))[1] == 2
        assert ask(engine, "c", following[:1100] + [91] * 300) == 1088


def test_what_several_have_wanted_stays() -> None:
    cache, engine = serving(64)
    with cache:
        for k in range(3):
            ask(engine, f"{k}", prompt()[:640] + prompt(700, 1 + k), 100)
        assert ask(
            engine, "on", prompt()[:640] + prompt(700, 1) + text_of(prompt()[:640] + prompt(700, 1), 100)[:-1], 70
        )
        pools = inside.pools(cache)
        blocks = pools.coldest(1, 40)
        cold = blocks[pools.is_superseded(np.ones(len(blocks), np.int32), blocks)]
        assert len(cold)
        assert ask(engine, "new", prompt()[:640] + prompt(300, 9)) == 640
        for b in cold.tolist():
            pools.unpublish(np.ones(1, np.int32), np.array([b], np.int32))
        assert ask(engine, "new 2", prompt()[:640] + prompt(300, 10)) == 640, (
            "what was superseded has gone, this has not"
        )


def keys_of(tokens: list[int]) -> np.ndarray:
    """A name for each 64 tokens, uint64 [n, 2]."""
    names = [hash(tuple(tokens[:end])) & (2**63 - 1) for end in range(64, len(tokens) + 1, 64)]
    return np.array([names, names], np.uint64).T.copy()


def test_a_text_that_goes_first_keeps_no_state_shortly_before_its_prompt_s_end(monkeypatch) -> None:
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": False)
    keeping = Keeping(spec_of(64).groups, 64, 64, shorts=True)
    for k, goes in enumerate([False, True, True]):
        course, tokens = Course(), prompt()[:128] + prompt(seed=k)[128:]
        keeping.begin(course, Text(keys_of(tokens), PROMPT, 0, 0), lambda _: 1e9)
        assert (course.gone_from < LAST, course.short) == (goes, 0 if goes else LAST - SHORT)
        keeping.end_prompt(course, keys_of(tokens), PROMPT)
        keeping.end(course, keys_of(tokens), PROMPT, is_answer=False)
        keeping.leave(course, keys_of(tokens), PROMPT, PROMPT)


@pytest.mark.parametrize(("missing", "kept", "cold"), [((), 1, 13), ((LAST - SHORT,), 1, 12), ((LAST,), 0, 0)])
def test_other_states_go_only_if_the_one_at_the_end_is_there(missing: tuple[int, ...], kept: int, cold: int) -> None:
    keeping, course, keys = Keeping(spec_of(64).groups, 64, 64, shorts=True), Course(), keys_of(prompt())
    keeping.begin(course, Text(keys, PROMPT, 0, 0), lambda _: 1e9)
    there = np.array([(n + 1) * 64 not in missing for n in range(len(keys))])
    stays, go = keeping.outrun(course, keys, PROMPT, False, lambda names: (there[: len(names)],) * 2)
    assert (len(stays), len(go)) == (kept, cold)
    if kept:
        assert np.array_equal(stays[0], keys[(LAST - SHORT) // 64 - 1 - len(missing)])


def test_all_groups_keep_the_states_of_the_same_boundaries() -> None:
    parts = Part("conv0", (3,), "bfloat16"), Part("recurrent0", (12,), "float32")
    groups = [GroupSpec(name, RecurrentState(parts), 1) for name in ("state", "other")]
    full = GroupSpec("full", FullAttention(), 1, 1, 2, "float32", block_tokens=64)
    with KVCache(CacheSpec([full, *groups]), device_blocks={"full": 200, "state": 40, "other": 40}) as cache:
        pools, scheduler = inside.pools(cache), Scheduler(cache, max_batched_tokens=4096, max_running=2)

        def serve(name: str, tokens: list[int], count: int) -> None:
            scheduler.add(Request(name, tokens, count))
            while scheduler.has_work():
                step = scheduler.schedule()
                scheduler.commit(step, np.full(len(step.sample_rows), 3, np.int64))

        serve("a", prompt(), 100)
        names = names_of(cache, prompt() + [3] * 99)
        lost = pools.find(np.array([2], np.int32), names[(LAST - SHORT) // 64 - 1 :][:1])
        pools.unpublish(np.array([2], np.int32), lost)
        serve("b", prompt() + [3] * 99 + prompt(100, 1), 200)
        hot = []
        for g in 1, 2:
            blocks = pools.find(np.full(len(names), g, np.int32), names)
            is_hot = ~pools.is_superseded(np.full(len(names), g, np.int32), np.maximum(blocks, 1))
            hot.append(np.flatnonzero((blocks > 0) & is_hot).tolist())
        assert hot[0] == hot[1]
