"""Copies that are late, hang or fail, clients that leave, resets: texts stay right, and everything is given back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from driving import BLOCK, Answer, Engine, Tokens, prompt
from link import Held, Unlucky, late

SIZE = 1500
HIT = 1472
AMPLE = 320
"""Device blocks for two prompts and what a load holds."""


def settled(engine: Engine) -> Iterator[Engine]:
    engine.reset()
    yield engine
    engine.check_nothing_is_held()


@pytest.fixture
def engine(engine_of: Callable[..., Engine]) -> Iterator[Engine]:
    """Gemma-3, with a device pool of one and a half prompts."""
    yield from settled(engine_of("gemma3"))


@pytest.fixture
def hasty(engine_of: Callable[..., Engine]) -> Iterator[Engine]:
    """Gives copies up after half a second."""
    yield from settled(engine_of("gemma3", AMPLE, deadline_s=0.5))


@pytest.fixture
def ample(engine_of: Callable[..., Engine]) -> Iterator[Engine]:
    """With room for everything."""
    yield from settled(engine_of("gemma3", AMPLE))


def store(engine: Engine, *seeds: int) -> None:
    """These prompts are in the host tier alone."""
    for seed in seeds:
        engine.ask([prompt(seed, SIZE)])
        engine.settle()
    engine.forget_device()


def begin_load(engine: Engine, loads: Held, seed: int = 1) -> str:
    """A request with its load under way; its name."""
    name = engine.add(prompt(seed, SIZE), 24)
    end_s = time.monotonic() + 30
    while not loads.begun:
        engine.step()
        assert time.monotonic() < end_s
    return name


# --- order ------------------------------------------------------------------------------------------


def texts_after_late_stores(engine: Engine, orders: bool) -> list[tuple[Answer, Answer]]:
    """(text from the host, cold text) of three prompts that were stored late."""
    colds = [engine.cold(prompt(seed, SIZE)) for seed in (1, 2, 3)]
    engine.reset()
    with engine.link.doing(stores=late(0.3), orders=orders):
        for seed, cold in zip((1, 2, 3), colds, strict=True):
            (answer,) = engine.ask([prompt(seed, SIZE)])
            assert answer.ids == cold.ids
        engine.settle()
    found = []
    for seed, cold in zip((1, 2, 3), colds, strict=True):
        engine.forget_device()
        (answer,) = engine.ask([prompt(seed, SIZE)])
        assert answer.loaded == HIT
        found.append((answer, cold))
    return found


def test_blocks_are_written_after_late_stores_have_read_them(engine: Engine) -> None:
    waits = engine.link.num_waits
    found = texts_after_late_stores(engine, orders=True)
    assert engine.link.num_waits > waits
    assert [answer.ids for answer, _ in found] == [cold.ids for _, cold in found]


def test_control_without_the_order_late_stores_read_other_content(engine: Engine) -> None:
    found = texts_after_late_stores(engine, orders=False)
    assert any(answer.ids != cold.ids for answer, cold in found)
    assert engine.transfers.corrupt_blocks == 0  # checksums are of what was read: only the order protects a store


# --- hanging copies ---------------------------------------------------------------------------------


def test_a_load_that_hangs_is_given_up_and_its_blocks_wait_for_its_end(hasty: Engine) -> None:
    colds = {seed: hasty.cold(prompt(seed, SIZE)) for seed in (1, 2)}
    store(hasty, 1)
    before, loads = hasty.transfers, Held()
    with hasty.link.doing(loads=loads):
        begun = time.monotonic()
        (answer,) = hasty.ask([prompt(1, SIZE)])
        assert 0.5 < time.monotonic() - begun < 30
        assert (answer.ids, answer.loaded) == (colds[1].ids, HIT)
        assert hasty.transfers.expired - before.expired == 1
        assert loads.ended == 0
        num_held = hasty.free - hasty.num_free()
        assert num_held >= HIT // BLOCK
        assert hasty.ask([prompt(2, SIZE)])[0].ids == colds[2].ids
        assert hasty.free - hasty.num_free() == num_held
        loads.release()
        hasty.settle()
    assert loads.ended == 1
    assert hasty.num_free() == hasty.free
    for seed in (1, 2):  # what the late load wrote belongs to nobody
        assert hasty.ask([prompt(seed, SIZE)])[0].ids == colds[seed].ids
    hasty.forget_device()
    (again,) = hasty.ask([prompt(1, SIZE)])
    assert again.ids == colds[1].ids


def test_stores_that_hang_are_given_up_and_no_text_waits_for_them(hasty: Engine) -> None:
    cold = hasty.cold(prompt(1, SIZE))
    before, stores = hasty.transfers, Held()
    with hasty.link.doing(stores=stores):
        assert hasty.ask([prompt(1, SIZE)])[0].ids == cold.ids
        time.sleep(0.6)
        hasty.ask([prompt(0, 8)], 1)
        assert hasty.transfers.expired > before.expired
        hasty.forget_device_now()
        (answer,) = hasty.ask([prompt(1, SIZE)])
        assert (answer.ids, answer.loaded) == (cold.ids, 0)
        stores.release()
        hasty.settle()


def test_a_load_under_way_does_not_spin_the_engine(ample: Engine) -> None:
    store(ample, 1)
    before, loads = ample.empty_steps, Held()
    with ample.link.doing(loads=loads):
        timer = threading.Timer(1.5, loads.release)
        begin_load(ample, loads)
        begun = time.monotonic()
        timer.start()
        ample.run()
        took = time.monotonic() - begun
        timer.join()
    assert took > 1.4
    assert 5 < ample.empty_steps - before < 400 * took


# --- clients that leave, and resets -----------------------------------------------------------------


def test_a_client_that_leaves_during_its_load(ample: Engine) -> None:
    cold = ample.cold(prompt(1, SIZE))
    store(ample, 1)
    loads = Held()
    with ample.link.doing(loads=loads):
        name = begin_load(ample, loads)
        ample.abort(name)
        for _ in range(3):
            ample.step()
        assert ample.free - ample.num_free() >= HIT // BLOCK  # the load still writes there
        loads.release()
        ample.settle()
    assert ample.num_free() == ample.free
    (answer,) = ample.ask([prompt(1, SIZE)])
    assert answer.ids == cold.ids


def test_a_client_that_leaves_during_a_load_that_is_late(hasty: Engine) -> None:
    cold = hasty.cold(prompt(1, SIZE))
    store(hasty, 1)
    loads = Held()
    with hasty.link.doing(loads=loads):
        name = begin_load(hasty, loads)
        hasty.abort(name)
        time.sleep(0.6)
        hasty.ask([prompt(0, 8)], 1)
        assert hasty.free - hasty.num_free() >= HIT // BLOCK
        loads.release()
        hasty.settle()
    assert hasty.num_free() == hasty.free
    assert hasty.ask([prompt(1, SIZE)])[0].ids == cold.ids


def test_a_reset_during_a_load(ample: Engine) -> None:
    cold = ample.cold(prompt(1, SIZE))
    store(ample, 1)
    loads = Held()
    with ample.link.doing(loads=loads):
        name = begin_load(ample, loads)
        assert not ample.llm.reset_prefix_cache(reset_connector=True)  # vLLM's: a request has blocks
        loads.release()
        answer = ample.run()[name]
    assert answer.ids == cold.ids
    ample.forget_device()
    (again,) = ample.ask([prompt(1, SIZE)])
    assert (again.ids, again.cached, again.loaded) == (cold.ids, 0, 0)  # the host tier's content was forgotten


def test_a_reset_during_stores(ample: Engine) -> None:
    cold = ample.cold(prompt(1, SIZE))
    before, stores = ample.transfers, Held()
    with ample.link.doing(stores=stores):
        assert ample.ask([prompt(1, SIZE)])[0].ids == cold.ids
        assert ample.transfers.live > 0
        assert ample.num_free() == ample.free  # a store holds no block
        assert ample.llm.reset_prefix_cache(reset_connector=True)
        stores.release()
        ample.settle()
    assert stores.ended > 0
    (answer,) = ample.ask([prompt(1, SIZE)])
    assert (answer.ids, answer.cached, answer.loaded) == (cold.ids, 0, 0)
    assert ample.transfers.loads == before.loads


def test_a_reset_of_both_tiers_while_requests_run(ample: Engine) -> None:
    colds = [ample.cold(prompt(seed, 700), 60) for seed in (1, 2)]
    names = [ample.add(prompt(seed, 700), 60) for seed in (1, 2)]
    ended = dict[str, Answer]()
    for _ in range(20):
        ended |= ample.step()
    assert not ended
    assert ample.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    ended = ample.run()
    assert [ended[name].ids for name in names] == [cold.ids for cold in colds]


# --- chance -----------------------------------------------------------------------------------------

STEMS = [prompt(seed, num_tokens) for seed, num_tokens in ((101, 160), (102, 256), (103, 448), (104, 96))]
REQUESTS = 300


def drawn(rnd: random.Random, num: int) -> list[Tokens]:
    """Prompts that share stems, of random lengths."""
    found = []
    for _ in range(num):
        stem = rnd.choice(STEMS)
        found.append(stem[: rnd.randrange(32, len(stem) + 1)] + prompt(rnd.randrange(6), rnd.randrange(1, 200)))
    return found


@pytest.mark.parametrize("shape", ["gemma3", "llama4"])
def test_whatever_happens_texts_are_right_and_everything_is_given_back(
    engine_of: Callable[..., Engine], shape: str
) -> None:
    """A tenth of the copies fails, is torn, damages what it stores or hangs; a tenth of the clients leaves."""
    engine = engine_of(shape, deadline_s=0.15, host_memory="4MiB")
    engine.reset()
    rnd = random.Random(7)
    prompts = drawn(rnd, 60)
    colds = [engine.cold(tokens, 12) for tokens in prompts]
    engine.reset()
    loads = Unlucky(engine.link.memory, seed=1, chance=0.1, hang_s=0.3)
    stores = Unlucky(engine.link.memory, seed=2, chance=0.1, hang_s=0.3)
    before, asked, wanted, left, wrong = engine.transfers, 0, dict[str, tuple[int, int]](), set[str](), []
    ended, num_loaded = 0, 0
    with engine.link.doing(loads=loads, stores=stores):
        while asked < REQUESTS or wanted:
            while asked < REQUESTS and len(wanted) < 6 and rnd.random() < 0.5:
                number, num_tokens = rnd.randrange(len(prompts)), rnd.randrange(1, 13)
                wanted[engine.add(prompts[number], num_tokens)] = number, num_tokens
                asked += 1
            for name, answer in engine.step().items():
                number, num_tokens = wanted.pop(name)
                ended, num_loaded = ended + 1, num_loaded + (answer.loaded > 0)
                if answer.ids != colds[number].ids[:num_tokens]:
                    wrong.append((name, number))
            if wanted and rnd.random() < 0.08:
                name = rnd.choice([*wanted])
                engine.abort(name)
                left.add(name)
                del wanted[name]
            if rnd.random() < 0.02:
                assert engine.books.audit() == []
            if rnd.random() < 0.02:
                engine.llm.reset_prefix_cache(reset_connector=rnd.random() < 0.5)
        engine.settle()
    assert wrong == []
    assert ended + len(left) == REQUESTS
    assert len(left) > 10
    counts = loads.counts + stores.counts
    assert min(counts[fate] for fate in ("ok", "fail", "tear", "corrupt", "hang")) > 0
    assert num_loaded > 30
    assert engine.transfers.failed_loads > before.failed_loads
    engine.check_nothing_is_held()
