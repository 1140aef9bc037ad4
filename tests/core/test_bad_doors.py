"""Bad input at the doors for engines with memory of their own: a typed error, and nothing has changed."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import inside
import numpy as np
import pytest

from core.outside import SOUND, Outside, chain
from kvtier import (
    CacheClosed,
    ConfigError,
    Fragment,
    FullAttention,
    HostPlan,
    HostTier,
    HostTierScheduler,
    HostTierWorker,
    InvalidRequest,
    Journal,
    KVTierError,
    OutsideGroup,
    StepError,
)
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.host_tier.orders import Orders, Report
from kvtier.machine.arguments import NO_KEYS
from kvtier.machine.journal import Runs
from kvtier.remote.estimate import Estimate
from kvtier.testing import Faults, SimulatedEngine


class Anything:
    """An object that knows nothing."""

    def __repr__(self) -> str:
        return "Anything"


class Nowhere:
    """What cannot be turned into an array, nor be compared."""

    def __array__(self, *_: Any, **__: Any) -> None:
        raise TypeError("can't convert a device tensor to numpy")

    def __eq__(self, other: object) -> bool:
        raise TypeError("no two are comparable")

    __hash__ = None  # type: ignore[assignment]


BAD = [
    None,
    *("1GiB", "", "full", b"x", "file://", "\ud800"),
    *(True, -1, 0, 1, 3, 2**31, 2**63, -(2**31), -(2**40), -(2**63) - 1, 2**70, 10**400),
    *(1.5, -0.5, float("nan"), float("inf"), 1e300, 3j),
    *(np.int64(3), np.int64(-4), np.float32("nan"), np.uint64(2**63), np.True_),
    *([], [None], ["a"], [1.5], [-1], [0], [2**70], [[1], [2, 3]], [[0], [0], [0]], [[2**40]] * 3, (), {}, {1: 2}),
    *({1, 2}, iter([1]), range(3), object(), Anything(), Nowhere(), Anything, np.random.default_rng(0)),
    *(np.array(5), np.empty(0), np.ones((2, 2)), np.array(["a", "b"]), np.array([np.nan]), np.array([None])),
    *(np.zeros((2, 2), np.uint64), np.zeros((3, 2), np.int64), np.zeros((0, 2), np.uint64)),
    np.zeros((2, 3), np.uint64),
    *(np.array([2**63], np.uint64), np.array([-(2**32)]), np.zeros(4096, np.uint8), np.arange(20)),
    lambda *_: 5,
    lambda *_: None,
]
"""Some are right for some arguments."""


def group(**fields: Any) -> OutsideGroup:
    given = {"name": "full", "attention": FullAttention(), "block_tokens": 4, "num_blocks": 8}
    return OutsideGroup(**(given | {"fragments": (Fragment(0, 64, 64),)} | fields))


MEMORY = np.zeros(4096, np.uint8)
KEYS = chain(list(range(40)))
MORE = chain(list(range(80)))
TABLES = [np.arange(20, dtype=np.int32)] * 3


def made_of(**given: Any) -> None:
    """A plan of one group, with these fields of the group and of its fragment."""
    fragment = Fragment(**{name: given.pop(name, 64 * (name != "offset")) for name in Fragment._fields})
    HostPlan([group(**{"fragments": (fragment,)} | given)], 4096, 2048)


def closing(make: Any) -> Any:
    """Makes it and closes it."""

    def made(**given: Any) -> None:
        make(**given).close()

    return made


MAKES = {
    HostTier: {
        "groups": [group()],
        "memory": MEMORY,
        "host_memory": 2048,
        "verify": "full",
        "deadline_s": 30.0,
        "copy_engine": SimulatedEngine,
        "remote_uri": None,
        "model_id": "m",
        "key_secret": b"s",
    },
    HostTierWorker: {
        "plan": HostPlan([group()], 4096, 2048),
        "memory": MEMORY,
        "deadline_s": 30.0,
        "copy_engine": SimulatedEngine,
        "shared": None,
    },
    HostTierScheduler: {"plan": HostPlan([group()], 4096, 2048), "deadline_s": 30.0, "workers": 1},
}
MADE = [
    *((closing(door), door.__name__, name, given) for door, given in MAKES.items() for name in given),
    *(
        (HostPlan, "HostPlan", name, given)
        for given in ({"groups": [group()], "memory_bytes": 4096, "host_memory": 2048, "verify": "full", "sharers": 1},)
        for name in given
    ),
    *((made_of, "OutsideGroup", name, {}) for name in (*OutsideGroup.__dataclass_fields__, *Fragment._fields)),
    (Journal, "Journal", "size", {}),
]


@pytest.mark.parametrize(("make", "_door", "name", "given"), MADE, ids=[f"{door}-{name}" for _, door, name, _ in MADE])
def test_a_door_is_made_or_refused_by_a_typed_error(make, _door, name, given):
    for bad in BAD:
        if name == "copy_engine" and callable(bad):
            continue  # what a user's function raises is the user's
        try:
            make(**given | {name: bad})
        except KVTierError as refused:
            assert len(str(refused)) < 700


class World:
    """A tier with content, a text that holds a hit, a load under way, and stores that are planned."""

    def __init__(self, door: str) -> None:
        engine = Outside()
        self.tier = engine.tier
        if door == "relayed":
            self.tier = HostTierScheduler(HostPlan(engine.groups, len(engine.memory), 12_000), 40.0)
        self.worker = HostTierWorker(HostPlan([group()], 4096, 2048), MEMORY, 40.0, SimulatedEngine)
        self.text = self.tier.text(KEYS)
        if door == "tier":
            self.text.computed(TABLES, 40, is_end=True)
            for _ in range(4):
                self.tier.poll()
            loading = self.tier.text(KEYS)
            loading.load(np.arange(40, 40 + len(loading.match(0, 41).hosts)))
            self.text.match(0, 41)
        planned = self.tier.text(chain(list(range(100, 140))))
        planned.match(0, 41)
        planned.computed(TABLES, 40)
        self.tier.wake()  # no wait takes time
        self.journal = Journal(4)
        self.journal.add("r", Runs())

    def state(self) -> Any:
        return inside.everything([self.tier, self.text, self.worker, self.journal])


CALLS = {
    "tier": {
        "text": {"keys": KEYS, "with_remote": True},
        "overwrite": {"groups": [0], "blocks": [0]},
        "estimate_compute": {"seconds": lambda start, end: None},
        "wait": {"timeout_s": 0.0},
    },
    "text": {
        "extend": {"keys": chain(list(range(200, 204)))},
        "announce": {"count": 30, "read": lambda first, end: MORE[first:end]},
        "part": {"boundary": 8},
        "match": {"start": 0, "num_tokens": 41, "ask_remote": False},
        "load": {"blocks": np.arange(15)},
        "computed": {"tables": TABLES, "end": 40, "is_end": False},
        "computed_by": {"blocks_of": lambda g, at: np.full(len(at), -1, np.int32), "end": 40, "is_end": True},
    },
    "worker": {
        "begin": {"orders": Orders()},
        "load": {"orders": Orders()},
        "wait": {"timeout_s": 0.0},
        "use_remote": {"uri": "memory://", "key_secret": b"s", "rank": 0},
    },
    "journal": {
        "add": {"fact": Runs()},
        "replace": {"number": 0, "fact": Runs()},
        "since": {"number": 0},
    },
}
OF_RELAYED = {
    "use_remote": {"uri": "memory://", "model_id": "m", "key_secret": b"s"},
    "report": {"report": Report()},
    "spoil": {"groups": [0], "blocks": [0]},
    "text": CALLS["tier"]["text"],
}
ALL = [
    *(("tier", of, call, given) for of, calls in CALLS.items() for call, given in calls.items()),
    *(("relayed", "tier", call, given) for call, given in OF_RELAYED.items()),
]


@pytest.mark.parametrize(("door", "of", "call", "given"), ALL, ids=[f"{d}-{o}.{c}" for d, o, c, _ in ALL])
def test_a_call_works_or_changes_nothing(door, of, call, given):
    def call_of(world: World) -> Any:
        found = getattr(getattr(world, of), call)
        return partial(found, "r") if found.__name__ == "add" else found

    world = World(door)
    before = world.state()
    for name in given:
        for bad in BAD:
            what = f"{of}.{call}({name}={bad!r})"
            try:
                call_of(world)(**given | {name: bad})
            except KVTierError as refused:
                assert len(str(refused)) < 700
                assert world.state() == before, what
                continue
            except Exception as problem:
                assert callable(bad), f"{what} raised {type(problem).__name__}"  # else it is the function's own
                assert world.state() == before, what
                continue
            assert world.tier.audit() == [], what
            if world.state() != before:
                world.tier.close()
                world = World(door)
                before = world.state()
    call_of(world)(**given)
    assert world.tier.audit() == []
    world.tier.close()


def a_tier(**options: Any) -> HostTier:
    return HostTier([group()], MEMORY, 2048, copy_engine=SimulatedEngine, **options)


@pytest.mark.parametrize("start", [-1, -4, -(2**31), -(2**40), -(2**63), -(2**70), None, True, 1.5, "0", float("nan")])
def test_a_match_from_nowhere_is_refused_and_what_is_held_stays_held(start):
    """From -2**31 on it read outside of its arrays, and the process ended."""
    world = World("tier")
    held, before = world.text.held, world.state()
    with pytest.raises(InvalidRequest, match="start must be"):
        world.text.match(start, 41)
    assert world.text.held is held is not None
    assert world.state() == before
    assert world.text.match(np.int64(0), np.uint8(41)).num_tokens == held.num_tokens


def test_keys_that_are_read_otherwise_than_announced_are_refused_and_the_hit_stays_held():
    """One number for all of them made all keys equal."""
    world = World("tier")
    held = world.text.held
    for bad in [*BAD, KEYS, MORE[20:30].astype(np.int64), MORE[20:30, 0], MORE[20:30, :, None], MORE[20:30].tolist()]:
        world.text.announce(30, lambda first, end, bad=bad: bad)
        before = world.state()
        for call in (
            partial(world.text.match, 0, 61),
            partial(world.text.computed, TABLES, 60, True),
            partial(world.text.extend, MORE[30:]),
            world.text.disown,
        ):
            with pytest.raises(InvalidRequest, match=r"what read gives must be uint64 \[10, 2\], got"):
                call()
            assert world.state() == before, f"{call}, {bad!r}"
            assert world.text.held is held is not None
    world.text.announce(30, lambda first, end: MORE[first:end])
    assert world.text.match(0, 61).num_tokens == held.num_tokens


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda text: text.announce(2**31, len), "fewer than"),
        (lambda text: text.announce(19, len), "20 keys, as before, or more"),
        (lambda text: text.announce(20, None), "read must be a function"),
        *((lambda text, at=at: text.part(at), "multiple of hit_tokens, 4") for at in (0, 1, 2, 6)),
        *((lambda text, at=at: text.part(at), "fewer than") for at in (2**31, 10**40)),
    ],
)
def test_what_no_text_can_have_is_refused(call, named):
    world = World("tier")
    before = world.state()
    with pytest.raises(InvalidRequest, match=named):
        call(world.text)
    assert world.state() == before


@pytest.mark.parametrize(("closed", "error"), [("text", StepError), ("tier", CacheClosed)])
def test_after_its_end_a_text_takes_nothing(closed, error):
    world = World("tier")
    getattr(world, closed).close()
    before = world.state()
    for call in ("extend", "announce", "part", "match", "load", "computed", "computed_by"):
        with pytest.raises(error):
            getattr(world.text, call)(**CALLS["text"][call])
    assert world.state() == before


@pytest.mark.parametrize("extended", [False, True])
def test_two_equal_keys_of_a_text_are_refused_and_other_texts_are_found(extended):
    """They were stored under one name twice, and then texts of others were not found."""
    tier = a_tier()
    keys = chain(list(range(32)), 4)
    twice = keys.copy()
    twice[6] = twice[2]
    near = keys.copy()
    near[6, 0] = near[2, 0]  # half of a key is no key
    tier.text(near)
    text = tier.text(keys[:4])
    with pytest.raises(InvalidRequest, match="two keys of one text are equal"):
        text.extend(keys[2:4]) if extended else tier.text(twice)
    text.extend(keys[4:])
    text.computed([np.arange(8)], 32, is_end=True)
    for _ in range(5):
        tier.poll()
    assert tier.text(keys).match(0, 33).num_tokens == 32
    assert tier.audit() == []


def stored(tier: HostTier, tokens: int = 32) -> np.ndarray:
    keys = chain(list(range(tokens)), 4)
    tier.text(keys).computed([np.arange(tokens // 4)], tokens, is_end=True)
    for _ in range(5):
        tier.poll()
    return keys


@pytest.mark.parametrize("faults", [SOUND, Faults(lose=1.0)], ids=["under way", "overdue"])
def test_a_load_over_a_load_is_refused_until_the_first_one_writes_no_more(faults):
    """Two copies wrote the same device blocks, in no order."""
    tier = a_tier(deadline_s=3.0)
    engine = inside.copy_engine(tier)
    keys = stored(tier)
    inside.use_faults(engine, faults)
    first, second = tier.text(keys), tier.text(keys)
    first.match(0, 17)
    ticket = first.load([0, 1, 2, 3])
    hit, before = second.match(0, 9), inside.everything(tier)
    released = ()
    while ticket not in released:
        with pytest.raises(InvalidRequest, match="a load still writes"):
            second.load([5, 3])
        assert second.held is hit
        assert inside.everything(tier) == before
        released = tier.poll().released
        if faults is not SOUND and engine.now() > 12:
            engine.end_lost()
        before = inside.everything(tier)
    second.load([5, 3])
    assert engine.missing_edges == []
    assert tier.audit() == []


def test_a_simulated_copy_of_no_blocks_is_not_corrupt():
    """Its ``poll`` raised."""
    engine = inside.copy_engine(a_tier())
    inside.use_faults(engine, Faults(corrupt=1.0))
    nothing = np.empty(0, np.int32)
    engine.submit(Transfer(7, Direction.LOAD, nothing, nothing, nothing, NO_KEYS, 0, 0))
    assert [(end.ticket, end.error) for _ in range(5) for end in engine.poll()] == [(7, "")]


def test_a_worker_with_less_memory_than_its_plan_is_refused():
    """Copies went beyond the end of its memory."""
    with pytest.raises(ConfigError, match="memory has 2,048"):
        HostTierWorker(HostPlan([group()], 4096, 2048), MEMORY[:2048], copy_engine=SimulatedEngine)


def test_a_block_id_is_not_cut_to_32_bits():
    world = World("tier")
    with pytest.raises(InvalidRequest, match=r"below 2\*\*31"):
        world.tier.overwrite([0], [-(2**32)])


def test_plain_ints_and_numpy_ints_give_one_name_in_a_store():
    """NumPy's ints would be written as such into the names of objects."""
    specs = [HostPlan([group(block_tokens=kind(4), num_blocks=kind(8))], 4096, 2048).spec for kind in (int, np.int64)]
    assert repr(specs[0].groups) == repr(specs[1].groups)


def test_a_worker_and_its_books_take_one_store():
    for door, call in (("tier", "worker"), ("relayed", "tier")):
        world = World(door)
        given = {"uri": "memory://", "key_secret": b"s"} | ({} if call == "worker" else {"model_id": "m"})
        getattr(world, call).use_remote(**given)
        with pytest.raises(ConfigError, match="already"):
            getattr(world, call).use_remote(**given)
        getattr(world, call).close()


def fails(start: int, end: int) -> float:
    raise ZeroDivisionError(f"from {start}")


@pytest.mark.parametrize(
    "seconds",
    [
        fails,
        lambda: 1.0,
        *(lambda *_, told=told: told for told in (float("nan"), -1.0, "soon", True, [1.0], 3j, 10**400, Anything())),
    ],
)
def test_a_compute_time_that_fails_is_not_known_and_told_once(seconds, caplog):
    """It came out of ``schedule``, and ended the engine."""
    with caplog.at_level(logging.WARNING, "kvtier.remote"):
        estimate = Estimate(seconds)
        assert [estimate(0, 7), estimate(7, 9)] == [None, None]
    [line] = caplog.messages
    assert "estimate_compute" in line
    assert "tokens 0 to 7" in line


@pytest.mark.parametrize("told", [None, 0, 2, 1.5, np.float32(1.5), np.int64(3), float("inf")])
def test_a_compute_time_is_what_the_engine_says(told, caplog):
    assert Estimate(lambda start, end: told)(0, 7) == told
    assert caplog.messages == []


@pytest.mark.parametrize("bad", [None, 1.0, "fast", [], Anything()])
def test_what_is_no_function_says_nothing_of_compute_times(bad, make_cache):
    for of in (make_cache(), make_cache(host=8), a_tier()):
        with pytest.raises(ConfigError, match="estimate_compute takes a function"):
            of.estimate_compute(bad)
