"""Two ranks, each in a process of its own, with one set of books."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driving import Engine, prompt
from one_rank import fails_on_rank_1

SIZE = 1500
HIT = 1472


@pytest.fixture(scope="module")
def pair(model: Callable[[str], Path]) -> Iterator[Engine]:
    """Gemma-3 on two ranks."""
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = Engine(model("gemma3"), 140, engine=two, copy_engine=fails_on_rank_1)
    yield engine
    engine.close()


def test_a_load_that_fails_on_rank_1_is_computed_on_both(pair: Engine) -> None:
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
