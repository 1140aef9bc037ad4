"""Which states of a text stay: one shortly before its prompt's end, and one at its own end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inside
import numpy as np
import pytest

from core.folding import Engine, text_of
from core.outside import chain
from kvtier import (
    CacheSpec,
    Fragment,
    FullAttention,
    GroupSpec,
    HostText,
    HostTier,
    KVCache,
    OutsideGroup,
    Part,
    RecurrentState,
    Request,
    Scheduler,
)
from kvtier.coordinator.keeping import SHORT, SHORT_PAYS

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


def state_after(cache: KVCache, tokens: list[int]) -> int:
    """The block with the state after these tokens, 0 if there is none."""
    chain = inside.coordinator(cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(tokens, np.int32), np.empty((0, 2), np.uint64))
    return int(inside.pools(cache).find(np.array([1], np.int32), keys[-1:])[0])


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


class Tier:
    """A host tier, and an engine that keeps the states of a text at each boundary, or at its ``ends`` alone."""

    def __init__(self, ends: bool) -> None:
        groups = [
            OutsideGroup("full", FullAttention(), 64, 99, (Fragment(0, 1024, 1024),)),
            OutsideGroup("state", RecurrentState([Part("0", (16,), "float32")]), 64, 99, (Fragment(99 << 10, 64, 64),)),
        ]
        self.tier = HostTier(groups, np.zeros(99 * 1088, np.uint8), "64KiB", "off")
        self.ends = ends

    def begin(self, tokens: list[int], answer: int) -> tuple[HostText, list[int]]:
        """A text up to its prompt's end, and what it is in the end."""
        said = [*tokens, *text_of(tokens, answer)]
        text = self.tier.text(chain(said, 64))
        self.hit = text.match(0, len(tokens)).end
        text.drop()
        self.computed(text, len(tokens), (len(tokens) - 1) // 64)
        return text, said

    def end(self, text: HostText, said: list[int]) -> None:
        self.computed(text, len(said), len(said) // 64)
        text.close()

    def ask(self, tokens: list[int], answer: int) -> int:
        """A text from its beginning to its end; returns its hit."""
        self.end(*self.begin(tokens, answer))
        return self.hit

    def computed(self, text: HostText, end: int, last: int) -> None:
        blocks = np.arange(end // 64, dtype=np.int32)
        text.computed([blocks, np.where(self.ends & (blocks + 1 != last), -1, blocks)], end, is_end=True)
        self.settle()

    def settle(self) -> None:
        self.tier.poll()
        while self.tier.has_work:
            self.tier.wait(1)
            self.tier.poll()

    def age(self, tokens: list[int]) -> int:
        """The place of the state after these tokens in the order of going."""
        (block,) = self.tier.pools.find(np.array([1], np.int32), chain(tokens, 64)[-1:])
        return self.tier.pools.coldest(1, 40).tolist().index(int(block))


def test_a_host_tier_keeps_as_many_states_of_a_text() -> None:
    engine = Tier(ends=False)
    with engine.tier as tier:
        assert engine.ask(prompt(), 100) == 0
        assert hot_states(tier.pools)[1] == 2
        following = prompt() + text_of(prompt(), 100) + prompt(600, 1)
        assert engine.ask(following, 70) == 1088
        assert hot_states(tier.pools)[1] == 2, "those of the turn before are old now"
        last = (len(following) - 1) // 64 * 64
        assert engine.ask(following[: last - 70] + [91] * 300, 1) == last - SHORT


def test_in_a_host_tier_the_state_before_a_prompt_s_end_is_as_young_as_the_text() -> None:
    engine = Tier(ends=False)
    with engine.tier:
        first = engine.begin(prompt(), 200)
        engine.ask(prompt(seed=1), 2)
        engine.end(*first)
        ages = [engine.age(prompt(seed=seed)[: LAST - SHORT]) for seed in (0, 1)]
        assert ages[0] > ages[1], "its text has ended later"


def test_an_engine_that_keeps_no_state_there_has_none_of_an_earlier_turn_in_its_place() -> None:
    engine = Tier(ends=True)
    with engine.tier:
        engine.ask(prompt(), 100)
        following = engine.begin(prompt() + text_of(prompt(), 100) + prompt(600, 1), 70)
        engine.ask(prompt(seed=1), 100)
        engine.end(*following)
        before, other = prompt() + text_of(prompt(), 100), prompt(seed=1) + text_of(prompt(seed=1), 100)
        assert engine.age(before[:1088]) < engine.age(other[:1088]), "it is as old as its last use"
