"""The bundled model through the engine: the answer hangs on the blocks that the cache says it needs, and on no other.

Damage is done to the pools between the cache's decision and the forward, as a stale, lost or foreign block would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import inside
import numpy as np
import pytest
import torch
from breadth import sample, sized

from kvtier.pools.block_pool import Col, Mark
from runner import LLM, SamplingParams
from runner.model.hybrid import HybridModel
from runner.needle import NeedlePrompt, make_prompt, weights_path

from .recorder import Recorder

GREEDY = SamplingParams(max_tokens=12, temperature=0)
TOKENS, MEMORY = sized((3_328, "12MiB"), (6_400, "24MiB"))
"""The device holds about three such prompts."""
BLOCK = 16


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return HybridModel.load(weights_path())


@pytest.fixture
def llm(model: HybridModel) -> Iterator[LLM]:
    with LLM(model, "cpu", MEMORY, "128MiB", max_batched_tokens=1024, key_secret=b"needle") as served:
        yield served


def ask(llm: LLM, prompt: NeedlePrompt, before: Callable[[Any, Any], None] | None = None) -> str:
    llm.engine.model = Recorder(llm.model, before)
    (output,) = llm.generate(prompt.token_ids, GREEDY, use_tqdm=False)
    ask.cached = output.cached_tokens
    return llm.tokenizer.decode(output.token_ids)


def damage(group: str, position: int, fill: float = 0.0) -> Callable[[Any, Any], None]:
    """Overwrites the block that holds ``position`` in one group, just before the first forward of a request."""
    seen: set[str] = set()

    def before(step: Any, cache: Any) -> None:
        if step.request_ids[0] in seen:
            return
        seen.add(step.request_ids[0])
        block = int(step.group(group).block_table[0, position // BLOCK])
        assert block > 0, "the block that matters is not in the table"
        for layer in range(cache.spec.group(group).num_layers):
            for tensor in cache.kv(group, layer):
                tensor[block] = fill

    return before


def matters(prompt: NeedlePrompt) -> dict[str, int]:
    """A token per group without whose KV the question cannot be answered."""
    return {
        "full": prompt.needle_range.start + 3,
        "sliding": prompt.asked_key_position,
        "chunked": prompt.header_range.start + 2,
    }


@pytest.mark.parametrize("depth", sample([0.03, 0.5, 0.9], [0.03]))
def test_needles_are_found_cold_and_from_both_tiers(llm: LLM, depth: float) -> None:
    prompt = make_prompt(TOKENS, seed=3, depth=depth)
    assert ask(llm, prompt) == prompt.answer
    assert ask(llm, prompt) == prompt.answer
    assert ask.cached["device"] == TOKENS - BLOCK
    for seed in range(4, 4 + sized(5, 8)):
        ask(llm, make_prompt(TOKENS, seed=seed))
    assert ask(llm, prompt) == prompt.answer
    assert ask.cached["host"] > 0


@pytest.mark.parametrize("group", ["full", "sliding", "chunked"])
def test_damage_to_the_block_that_matters_changes_the_answer(llm: LLM, group: str) -> None:
    prompt = make_prompt(TOKENS, seed=3, depth=0.4)
    assert ask(llm, prompt) == prompt.answer
    assert ask(llm, prompt, damage(group, matters(prompt)[group])) != prompt.answer
    assert ask.cached["device"] == TOKENS - BLOCK, "the damaged block was not read from the cache"


@pytest.mark.parametrize("group", ["full", "sliding", "chunked"])
def test_damage_to_another_block_in_the_window_of_the_same_group_does_not(llm: LLM, group: str) -> None:
    prompt = make_prompt(TOKENS, seed=3, depth=0.4, ask_gap=100)
    other = {"full": prompt.needle_range.stop + 4 * BLOCK, "sliding": TOKENS - 3 * BLOCK, "chunked": TOKENS - 3 * BLOCK}
    assert not any(abs(other["full"] - fact.start) < 3 * BLOCK for fact in prompt.distractors)
    assert ask(llm, prompt) == prompt.answer
    assert ask(llm, prompt, damage(group, other[group])) == prompt.answer


def test_nan_wherever_the_cache_says_nothing_is_needed_changes_nothing(llm: LLM) -> None:
    """Needed are what the tables show and, for the hit to come and for merging twins, what can be found by its key."""

    def poison(step: Any, cache: Any) -> None:
        pools = inside.pools(cache).arrays
        for g, group in enumerate(cache.spec.groups):
            view = step.group(group.name)
            k, _ = cache.kv(group.name, 0)
            base = int(pools.meta[g, Col.BASE])
            others = ~inside.pools(cache).is_own(g)  # blocks whose memory another group has now
            findable = torch.from_numpy((pools.mark[base : base + len(k)] == Mark.READY) | others)
            live = findable[:, None].expand(k.shape[:2]).clone()
            for row, length in zip(view.block_table, step.seq_lens, strict=True):
                for j in np.flatnonzero(row):
                    live[row[j], : max(0, int(length) - j * BLOCK)] = True
            for layer in range(group.num_layers):
                for tensor in cache.kv(group.name, layer):
                    tensor[~live] = float("nan")

    prompt = make_prompt(TOKENS, seed=5, depth=0.2)
    assert ask(llm, prompt, poison) == prompt.answer
    assert ask(llm, prompt, poison) == prompt.answer
    assert ask.cached["device"] == TOKENS - BLOCK


@pytest.mark.parametrize("verify", sample(["off", "full"], ["full"]))
def test_damage_in_host_memory_is_caught_if_restores_are_verified(model: HybridModel, verify: str) -> None:
    """Without verification the needle's damaged host block shows in the answer; with it, it is recomputed."""
    with LLM(model, "cpu", MEMORY, "128MiB", max_batched_tokens=1024, verify=verify) as llm:
        prompt = make_prompt(TOKENS, seed=3, depth=0.97)
        assert ask(llm, prompt) == prompt.answer
        for seed in range(4, 4 + sized(5, 8)):
            ask(llm, make_prompt(TOKENS, seed=seed))
        llm.settle()
        assert inside.host_arena(llm.cache) is not None
        inside.host_arena(llm.cache).bytes[:] = 0
        answer = ask(llm, prompt)
        failed = llm.cache.stats().transfers.failed_loads
        assert (answer == prompt.answer, failed > 0) == ((True, True) if verify == "full" else (False, False))


def test_the_question_at_the_far_end_of_the_window_is_restored(llm: LLM) -> None:
    """With a gap of 240 the asked key lies in the oldest block that the window still reaches."""
    prompt = make_prompt(TOKENS, seed=8, ask_gap=240)
    assert ask(llm, prompt) == prompt.answer
    assert ask(llm, prompt) == prompt.answer
    assert ask(llm, prompt, damage("sliding", prompt.asked_key_position)) != prompt.answer
