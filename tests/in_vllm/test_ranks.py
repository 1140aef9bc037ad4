"""Two ranks, each in a process of its own, with one set of books."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Engine, prompt
from one_rank import fails_on_rank_1

SIZE = 1500
HIT = 1472


TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture
def two_ranks(model: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """An engine of a model by name, on two ranks."""
    made: list[Engine] = []

    def make(name: str, blocks: int, **own: Any) -> Engine:
        made.append(Engine(model(name), blocks, engine=TWO | own, copy_engine=fails_on_rank_1))
        return made[0]

    yield make
    for engine in made:
        engine.close()


def test_a_load_that_fails_on_rank_1_is_computed_on_both(two_ranks: Callable[..., Engine]) -> None:
    pair = two_ranks("gemma3", 140)
    colds = {seed: pair.cold(prompt(seed, SIZE)) for seed in (1, 2)}
    for seed in (1, 2):
        pair.ask([prompt(seed, SIZE)])
    loads, before = 0, pair.transfers
    for seed in (1, 2, 1, 2):
        pair.forget_device()
        (answer,) = pair.ask([prompt(seed, SIZE)])
        loads += answer.loaded > 0
        assert answer.ids == colds[seed].ids
        assert max(abs(a - b) for a, b in zip(answer.logprobs, colds[seed].logprobs, strict=True)) < 1e-4
    after = pair.transfers
    assert after.loads - before.loads >= loads >= 2
    assert after.failed_loads - before.failed_loads == 2
    assert after.verified_blocks > before.verified_blocks
    pair.check_nothing_is_held()


def test_states_of_two_ranks_come_back(two_ranks: Callable[..., Engine]) -> None:
    """Qwen3-Next, half of each state on either rank. Loads fail on rank 1 at times."""
    engine = two_ranks("qwen3next_wide", 40, dtype="bfloat16", max_model_len=1600)
    colds = {seed: engine.cold(prompt(seed, 700)) for seed in (1, 2)}
    for seed in (1, 2):
        engine.ask([prompt(seed, 700)])
    (on_device,) = engine.ask([prompt(2, 700)])
    assert on_device.on_device >= 576 and on_device.loaded == 0
    before, loads = engine.transfers, 0
    for seed in (1, 2, 1, 2):
        engine.forget_device()
        (answer,) = engine.ask([prompt(seed, 700)])
        loads += answer.loaded > 0
        assert answer.ids == colds[seed].ids
        if seed == 2 and answer.loaded:
            assert answer.logprobs == on_device.logprobs
    after = engine.transfers
    assert after.loads - before.loads >= loads >= 2
    assert after.failed_loads - before.failed_loads == 2
    engine.check_nothing_is_held()
