"""vLLM's asynchronous scheduler: a step is planned while the one before it still runs, and texts are the cold texts.

vLLM turns it off on CPUs. Its scheduler and its queue of batches run here all the same, once they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Answer, Engine, prompt
from link import late

SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
SHORT = {"llama": 76, "gemma3": 130, "gptoss": 86}
"""Device blocks for some prompts of 300 tokens at once, but not for their texts of 700, in chunks of 64 tokens."""


class AsyncEngine(Engine):
    """Two batches are under way at once."""

    def __init__(self, model: Path, num_blocks: int, **options: Any) -> None:
        from vllm.config import VllmConfig

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VllmConfig, "max_concurrent_batches", 2)
            super().__init__(model, num_blocks, engine={"scheduler_cls": SCHEDULER}, **options)
        self.overlapping = 0
        """Steps that were planned while another one was under way."""
        plan = self.scheduler.connector.build_connector_meta

        def build_connector_meta(output: Any) -> Any:
            self.overlapping += len(self.core.batch_queue) > 0
            return plan(output)

        self.scheduler.connector.build_connector_meta = build_connector_meta


@pytest.fixture(scope="module", params=SHORT)
def engine(request: pytest.FixtureRequest, model: Callable[[str], Path]) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(model(request.param), SHORT[request.param], chunk=64)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(engine: AsyncEngine) -> Iterator[None]:
    engine.reset()
    yield
    assert engine.overlapping > 10
    engine.check_nothing_is_held()


def check(answer: Answer, cold: Answer) -> None:
    assert answer.ids == cold.ids
    assert max(abs(a - b) for a, b in zip(answer.logprobs, cold.logprobs, strict=True)) < 1e-4


def test_prompts_in_turn_come_back_from_the_host(engine: AsyncEngine) -> None:
    cold = engine.cold(prompt(1, 700))
    engine.ask([prompt(1, 700)])
    engine.forget_device()
    (answer,) = engine.ask([prompt(1, 700)])
    assert answer.loaded == answer.cached == 672
    check(answer, cold)


def test_requests_that_give_way_and_come_back(engine: AsyncEngine) -> None:
    prompts = [prompt(seed, 300) for seed in (11, 12, 13, 14)]
    colds = [engine.cold(tokens, 400) for tokens in prompts]
    preemptions = engine.preemptions
    with engine.link.doing(stores=late(0.005)):
        answers = engine.ask(prompts, 400)
    assert engine.preemptions > preemptions
    assert max(answer.reached for answer in answers) > 320  # generated tokens, which preemption had taken away
    for answer, cold in zip(answers, colds, strict=True):
        check(answer, cold)


def test_a_damaged_block_is_computed_again(engine: AsyncEngine) -> None:
    cold = engine.cold(prompt(1, 700))
    engine.link.stored.clear()
    engine.ask([prompt(1, 700)])
    engine.forget_device()
    before, flips = engine.transfers, engine.link.damage(every=5)
    (answer,) = engine.ask([prompt(1, 700)])
    check(answer, cold)
    assert 0 < engine.transfers.corrupt_blocks - before.corrupt_blocks <= flips
    engine.forget_device()
    (again,) = engine.ask([prompt(1, 700)])
    assert again.cached == 672
    check(again, cold)


def test_clients_that_leave_while_the_next_step_is_planned(engine: AsyncEngine) -> None:
    cold = engine.cold(prompt(2, 700))
    for steps in (1, 2, 3, 5, 8, 13):
        name = engine.add(prompt(2, 700), 24)
        for _ in range(steps):
            engine.step()
        engine.abort(name)
        engine.settle()
        engine.forget_device()
    (answer,) = engine.ask([prompt(2, 700)])
    check(answer, cold)
