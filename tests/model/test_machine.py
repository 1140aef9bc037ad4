"""The state machine: whatever happens to a small world, every invariant holds and every text is right."""

from __future__ import annotations

import random

import inside
import numpy as np
import pytest
from breadth import sample, sized
from core.slabs import shared_serving
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier import FullAttention, InvariantBroken, SlidingWindow
from kvtier.coordinator.room import Room
from kvtier.pools import block_pool
from kvtier.pools.pool_state import Col
from kvtier.testing import canary_spec
from model import preemptions
from model.played_backend import FATES, ROTS
from model.preemptions import Preemption
from model.walk import SHORT_WALKS, random_config, replay, script, short_walk, shrink
from model.world import Config, Counts, World

LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17])
SMALL = Config(
    {"full": ("full", 0, 2, 8, 6), "window": ("window", 3, 2, 6, 6), "chunk": ("chunk", 4, 2, 5, 6)}, host=True
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Every shape that the long walks use."""
    seed = draw(st.integers(0, 2**16))
    return random_config(random.Random(seed), seed)


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses; ``World`` does and checks."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(config=configs())
    def open(self, config: Config) -> None:
        self.world = World(config)

    @rule(
        stem=st.integers(0, 3),
        length=LENGTHS,
        extra=st.sampled_from([0, 0, 1, 2, 5]),
        new_tokens=st.integers(1, 7),
        salt=st.sampled_from([0, 0, 0, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        eos=st.booleans(),
    )
    def submit(self, **arguments: int) -> None:
        self.world.submit(**arguments)

    @rule(k=st.integers(0, 5), new_tokens=st.integers(1, 4))
    def revisit(self, k: int, new_tokens: int) -> None:
        self.world.revisit(k, new_tokens)

    @rule(stem=st.integers(0, 3), more=st.integers(0, 2), new_tokens=st.sampled_from([6, 9, 16]))
    def crowd(self, stem: int, more: int, new_tokens: int) -> None:
        self.world.crowd(stem, more, new_tokens)

    @rule(stem=st.integers(0, 3), length=st.sampled_from([6, 8, 9, 12, 16]))
    def urgent(self, stem: int, length: int) -> None:
        self.world.urgent(stem, length)

    @rule()
    def schedule(self) -> None:
        self.world.schedule()

    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule(n=st.integers(1, 5))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.world.schedule()
            self.world.commit()

    @rule()
    def cancel(self) -> None:
        self.world.cancel()

    @rule(k=st.integers(0, 5), how=st.sampled_from(["abort", "finish", "fail"]))
    def end_request(self, k: int, how: str) -> None:
        getattr(self.world, how)(k)

    @rule(k=st.integers(0, 5), fate=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def end_copy(self, k: int, fate: int) -> None:
        self.world.end_copy(k, fate)

    @rule(k=st.integers(0, 20))
    def rot(self, k: int) -> None:
        self.world.rot(k)

    @rule(k=st.integers(0, 5), fate=st.sampled_from([*[0] * 10, *range(1, len(FATES))]))
    def end_call(self, k: int, fate: int) -> None:
        self.world.end_call(k, fate)

    @rule(k=st.integers(0, 200), how=st.integers(0, len(ROTS) - 1))
    def rot_store(self, k: int, how: int) -> None:
        self.world.rot_store(k, how)

    @rule(stem=st.integers(0, 2), length=st.sampled_from([4, 9, 13, 17]), salt=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def elsewhere(self, stem: int, length: int, salt: int) -> None:
        self.world.elsewhere(stem, length, salt)

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 3.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(n=st.integers(0, 3))
    def fill_host(self, n: int) -> None:
        self.world.fill_host(n)

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule()
    def reopen(self) -> None:
        self.world.reopen()

    @rule(fate=st.integers(0, 3), late=st.booleans())
    def drain(self, fate: int, late: bool) -> None:
        self.world.drain(fate, late)

    @invariant()
    def there_is_work_while_anybody_is_unfinished(self) -> None:
        if self.world is not None and self.world.requests:
            assert self.world.scheduler.has_work()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.drain()
            self.world.cache.close()


Machine.TestCase.settings = settings(
    max_examples=sized(4, 60),
    stateful_step_count=sized(40, 50),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMachine = Machine.TestCase


@pytest.mark.parametrize("seed", sample(SHORT_WALKS, range(3)))
def test_random_walks(seed):
    counts = Counts()
    replay(*short_walk(seed), counts)
    assert counts.seen["steps"] > 20


# --- the machinery itself ---------------------------------------------------------------------------


@pytest.mark.usefixtures("damaged")
def test_a_failing_walk_is_cut_down_to_what_it_needs_and_printed_as_a_script(monkeypatch):
    """With a release that forgets window blocks the world finds it, and a handful of rules is left."""
    rules = [
        ("pass_time", (1.0,)),
        ("submit", (0, 9, 0, 3, 0, 0, False)),
        ("reset", ()),
        ("schedule", ()),
        ("commit", ()),
        ("pass_time", (1.0,)),
        ("fill_host", (0,)),
        ("drain", (0,)),
    ]
    replay(SMALL, rules)
    monkeypatch.setattr(block_pool.BlockPools, "unfence", lambda *_: None)
    short = shrink(SMALL, rules)
    assert 2 <= len(short) <= 3
    names: dict[str, World] = {}
    with pytest.raises(Exception, match=r"I17|fenced"):
        exec(compile(script(SMALL, short), "script", "exec"), names)
    names["world"].cache.close()


@pytest.mark.usefixtures("damaged")
def test_damage_stops_the_scheduler_with_all_that_was_found(make_cache):
    """KVTIER_AUDIT=2: the next call that notices raises, and says what is wrong after what."""
    from kvtier import Request, Scheduler

    cache = make_cache(blocks=8)
    scheduler = Scheduler(cache)
    scheduler.add(Request("A", [1, 2, 3, 4, 5], 4))
    step = scheduler.schedule()
    inside.pools(cache).arrays.refs[int(step.group("full").block_table[0, 0])] += 1
    with pytest.raises(InvariantBroken, match="after commit") as caught:
        scheduler.commit(step, [7])
    assert {violation.invariant for violation in caught.value.violations} >= {"I2"}
    cache.close()


CROWDED = Config(
    {"full": ("full", 0, 2, 7, 30), "window": ("window", 3, 2, 8, 54), "chunk": ("chunk", 8, 4, 7, 60)}, max_running=3
)
RULES = [
    ("submit", (1, 8, 2, 6, 0, 0, False)),
    ("submit", (0, 13, 0, 1, 1, 0, False)),
    ("crowd", (0, 2, 9)),
    ("urgent", (3, 8)),
    ("abort", (0,)),
    ("abort", (1,)),
    ("drain", (0,)),
]


def test_victims_that_do_not_make_room_are_found(monkeypatch):
    """The last one in service order gives way, whatever that frees."""
    replay(CROWDED, RULES)
    monkeypatch.setattr(Room, "choose_victims", lambda self, candidates, *_, **__: list(candidates[:1]))
    with pytest.raises(AssertionError, match="enough=False"):
        replay(CROWDED, RULES)


def test_victims_that_nobody_needs_are_found(monkeypatch):
    """Where somebody must give way, all do."""
    choose = Room.choose_victims
    monkeypatch.setattr(
        Room,
        "choose_victims",
        lambda self, candidates, *needs: list(candidates) if choose(self, candidates, *needs) else [],
    )
    with pytest.raises(AssertionError, match="needed=False"):
        replay(CROWDED, RULES)


@pytest.mark.usefixtures("damaged")
def test_what_a_load_holds_fast_is_not_wanting(make_cache):
    """A soak's find: blocks that a load writes may lie in more slabs than so many need; they can be moved after it."""
    groups = {"full": (FullAttention(), 4), "window": (SlidingWindow(3), 2)}
    coordinator = inside.coordinator(shared_serving(make_cache, canary_spec(groups), 8).cache)
    meta, used = coordinator.pools.arrays.meta, np.ones(len(coordinator.spec.groups), np.int64)
    before = meta[:, Col.STUCK].copy()
    assert preemptions.would_fit(coordinator, used, before)
    meta[0, Col.STUCK] = len(coordinator.pools.arrays.slabs)
    assert not preemptions.would_fit(coordinator, used, meta[:, Col.STUCK].copy())
    assert preemptions.would_fit(coordinator, used, before)
    meta[:, Col.STUCK] = before


def test_requests_that_push_each_other_out_too_often_are_found(monkeypatch):
    replay(CROWDED, RULES)
    monkeypatch.setattr(World, "_blocks", lambda self, name: -1)
    with pytest.raises(AssertionError, match="Preemption"):
        replay(CROWDED, RULES)


def test_a_first_request_that_waits_for_nothing_is_found(monkeypatch):
    """What those who give way to it were promised counts as taken."""
    config = Config({"full": ("full", 0, 2, 8, 30)}, store="lazy", max_batched_tokens=1)
    rules = [("submit", (0, 8, 1, 4)), ("schedule", ()), ("commit", ()), ("urgent", (3, 12)), ("schedule", ())]
    replay(config, rules)
    choose = Room.choose_victims
    monkeypatch.setattr(Room, "choose_victims", lambda self, givers, want, *_: choose(self, givers, want))
    with pytest.raises(AssertionError, match="the first could run, and does not"):
        replay(config, rules)


@pytest.mark.parametrize(
    ("event", "wrong"),
    [
        (Preemption("r", ran=True, first=False, row_free=False), ""),
        (Preemption("r", ran=True, first=False, row_free=True), "for a row while one is free"),
        (Preemption("r", ran=False, first=False, row_free=False), "before it has advanced"),
        (Preemption("r", ran=True, first=True, row_free=False), "though it is the first in service order"),
        (Preemption("r", ran=True, first=False, row_free=True, left=1, enough=False), ""),
        (Preemption("r", ran=True, first=False, row_free=True, left=0, enough=True), ""),
        (Preemption("r", ran=True, first=False, row_free=True, left=1, needed=False), "though the others who give way"),
        (Preemption("r", ran=True, first=False, row_free=True, left=1, in_vain=True), "too few blocks all the same"),
        (
            Preemption("r", True, False, True, left=0, enough=False, lack=(1, 0), gained=(0, 1)),
            r"for [1, 0] blocks, but only [0, 1] became free",
        ),
    ],
)
def test_what_a_preemption_may_not_be(event: Preemption, wrong: str):
    found = event.wrong()
    assert len(found) == (wrong != "")
    assert all(wrong in text for text in found)
