"""A text is the cold text, whatever brought its prompt, and the counters prove what did. Controls show the opposite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from driving import Answer, Engine, prompt
from link import noise
from models import NAMES

SIZE = 1500
HIT = 1472
"""All whole blocks of a prompt of 1,500 tokens."""


@pytest.fixture(scope="module", params=NAMES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(engine_of: Callable[..., Engine], shape: str) -> Iterator[Engine]:
    """Of each model, with a device pool of one and a half prompts."""
    engine = engine_of(shape)
    engine.reset()
    yield engine
    engine.check_nothing_is_held()


@pytest.fixture
def unverified(engine_of: Callable[..., Engine], shape: str) -> Iterator[Engine]:
    """The same without checksums."""
    engine = engine_of(shape, verify="off")
    engine.reset()
    yield engine
    engine.check_nothing_is_held()


def difference(a: Answer, b: Answer) -> float:
    """The largest of logprobs."""
    return max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))


def check(answer: Answer, cold: Answer) -> None:
    assert answer.ids == cold.ids
    assert difference(answer, cold) < 1e-4


def test_a_prompt_that_nobody_has_sent_is_computed(engine: Engine) -> None:
    (first,) = engine.ask([prompt(1, SIZE)])
    assert (first.cached, first.loaded) == (0, 0)
    check(first, engine.cold(prompt(1, SIZE)))


def test_a_host_hit_is_a_device_hit_bit_by_bit(engine: Engine) -> None:
    cold = engine.cold(prompt(1, SIZE))
    engine.ask([prompt(1, SIZE)])
    (on_device,) = engine.ask([prompt(1, SIZE)])
    assert (on_device.cached, on_device.loaded) == (HIT, 0)
    check(on_device, cold)
    engine.forget_device()
    before = engine.transfers
    (on_host,) = engine.ask([prompt(1, SIZE)])
    assert (on_host.cached, on_host.loaded) == (HIT, HIT)
    assert engine.transfers.verified_blocks - before.verified_blocks >= HIT // 32
    assert (on_host.ids, on_host.logprobs) == (on_device.ids, on_device.logprobs)


def test_two_long_prompts_in_turn_hit_although_the_device_holds_one_and_a_half(engine: Engine) -> None:
    colds = {seed: engine.cold(prompt(seed, SIZE)) for seed in (1, 2, 3)}
    seen, loaded = set[int](), 0
    for seed in (1, 2, 1, 2, 3, 1):
        (answer,) = engine.ask([prompt(seed, SIZE)])
        assert answer.cached == (HIT if seed in seen else 0)
        check(answer, colds[seed])
        seen.add(seed)
        loaded += answer.loaded
    assert loaded > HIT
    assert engine.transfers.dropped_blocks == 0


def test_three_at_once(engine: Engine) -> None:
    prompts = [prompt(seed, SIZE) for seed in (1, 2, 3)]
    colds = [engine.cold(tokens) for tokens in prompts]
    engine.ask(prompts)
    engine.forget_device()
    before = engine.transfers
    for answer, cold in zip(engine.ask(prompts), colds, strict=True):
        assert (answer.cached, answer.loaded) == (HIT, HIT)
        check(answer, cold)
    assert engine.transfers.loads - before.loads == 3


SHORT = {"llama": 76, "gemma3": 155, "gptoss": 86, "llama4": 145}
"""Device blocks for some prompts of 700 tokens at once, but not for their texts of 1,000, in chunks of 64 tokens."""


def test_requests_that_give_way_and_come_back(engine_of: Callable[..., Engine], shape: str) -> None:
    engine = engine_of(shape, SHORT[shape], chunk=64)
    prompts = [prompt(seed, 700) for seed in (11, 12, 13, 14)]
    colds = [engine.cold(tokens, 300) for tokens in prompts]
    preemptions = engine.preemptions
    answers = engine.ask(prompts, 300)
    assert engine.preemptions > preemptions
    assert max(answer.reached for answer in answers) > 704  # generated tokens, which preemption had taken away
    for answer, cold in zip(answers, colds, strict=True):
        check(answer, cold)
    engine.check_nothing_is_held()


def test_a_damaged_host_block_is_computed_again(engine: Engine) -> None:
    cold = engine.cold(prompt(1, SIZE))
    engine.link.stored.clear()
    engine.ask([prompt(1, SIZE)])
    engine.forget_device()
    before, flips = engine.transfers, engine.link.damage(every=20)
    assert flips > 2
    (answer,) = engine.ask([prompt(1, SIZE)])
    assert answer.loaded >= HIT  # what was not damaged is loaded again
    check(answer, cold)
    found = engine.transfers.corrupt_blocks - before.corrupt_blocks
    assert 0 < found <= flips
    assert engine.transfers.failed_loads - before.failed_loads == 1
    engine.forget_device()
    (again,) = engine.ask([prompt(1, SIZE)])
    assert again.cached == HIT  # of blocks that were stored anew
    check(again, cold)
    assert engine.transfers.corrupt_blocks - before.corrupt_blocks == found


def test_other_prompts_do_not_see_what_a_refused_load_has_left(engine: Engine) -> None:
    """vLLM's attention on CPUs multiplies what it masks: a NaN in a reused block would be everywhere."""
    colds = {seed: engine.cold(prompt(seed, SIZE)) for seed in (1, 2, 3, 4)}
    engine.link.stored.clear()
    engine.ask([prompt(1, SIZE)])
    engine.forget_device()
    before = engine.transfers
    assert engine.link.damage(every=2) > 2
    for seed in (1, 2, 3, 4, 1, 2):
        (answer,) = engine.ask([prompt(seed, SIZE)])
        check(answer, colds[seed])
    assert engine.transfers.corrupt_blocks > before.corrupt_blocks


def test_control_unverified_damage_is_used(unverified: Engine) -> None:
    cold = unverified.cold(prompt(1, SIZE))
    unverified.link.stored.clear()
    unverified.ask([prompt(1, SIZE)])
    unverified.forget_device()
    unverified.link.flip_signs()
    (answer,) = unverified.ask([prompt(1, SIZE)])
    assert (answer.cached, answer.loaded) == (HIT, HIT)
    assert unverified.transfers.failed_loads == 0
    assert difference(answer, cold) > 1e-3


def test_control_noise_gives_another_text(unverified: Engine) -> None:
    colds = [unverified.cold(prompt(seed, SIZE)) for seed in (1, 2, 3)]
    for seed in (1, 2, 3):
        unverified.ask([prompt(seed, SIZE)])
    for seed, cold in zip((1, 2, 3), colds, strict=True):
        unverified.forget_device()
        with unverified.link.doing(loads=noise(unverified.link.memory)):
            (answer,) = unverified.ask([prompt(seed, SIZE)])
        assert answer.loaded == HIT
        assert answer.ids != cold.ids


def test_with_store_off_nothing_is_stored(engine_of: Callable[..., Engine], shape: str) -> None:
    engine = engine_of(shape, store="off")
    for _ in range(2):
        for seed in (1, 2):
            cold = engine.cold(prompt(seed, SIZE))
            (answer,) = engine.ask([prompt(seed, SIZE)])
            assert answer.loaded == 0
            check(answer, cold)
    assert engine.transfers.stores == 0
    engine.check_nothing_is_held()
