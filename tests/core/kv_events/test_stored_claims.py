"""Blocks in the remote are told as far as a request would fetch them, and no further (docs/adr/0030)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import inside
import numpy as np
import pytest
from breadth import sample
from model.metrics import findable
from remote.fake_backend import FakeBackend, Shared

from core.driving import Serving, prompt
from core.kv_events.router import Path
from core.kv_events.test_claims import BT, FULL, HYBRID, TWO_FULL, Told
from kvtier import FullAttention, KVCache, Request
from kvtier.remote.breaker import Tried
from kvtier.remote.objects import Name, ObjectPlan, Objects

ID = {"model_id": "m", "key_secret": b"s"}
SHAPES = {"full": FULL, "hybrid": HYBRID, "two_full": TWO_FULL}
Make = Callable[..., Serving]


class Would:
    """Whether a fetch would bring a hit at a boundary, by the objects: docs/REMOTE.md, ``ObjectPlan``."""

    def __init__(self, told: ToldOfRemote, ids: tuple[int, ...], found: set[tuple[str, str, bytes]]) -> None:
        spec = told.cache.spec
        self.plan = ObjectPlan(spec)
        self.stored = set(told.remote.listen().take())
        self.keys = told.events.keys_of(Request("text", list(ids), 1))[spec.names[0]]
        groups = {name: g for g, name in enumerate(spec.names)}
        self.here = {(groups[group], key) for _, group, key in found}
        full = [g for g, group in enumerate(spec.groups) if isinstance(group.attention, FullAttention)]
        missing = (i for i, key in enumerate(self.keys) if any((g, key.tobytes()) not in self.here for g in full))
        self.prefix = BT * next(missing, len(self.keys))

    def __call__(self, n: int) -> bool:
        plan = self.plan
        tiles = range(self.prefix // plan.stride + 1, plan.tiles_of(n) // plan.stride + 1)
        asked = [name for i in tiles for name in plan.names_at(self.keys, i * plan.stride)]
        return {*asked, *plan.signs_of_end(self.keys, n)} <= self.stored and all(
            name in self.stored for name in self.read(plan.of_hit(self.keys, n))
        )

    def read(self, needed: Objects) -> set[Name]:
        """Objects with a block that is not here."""
        blocks = zip(needed.of.tolist(), needed.groups.tolist(), needed.keys, strict=True)
        return {needed.names[k] for k, g, key in blocks if (g, key.tobytes()) not in self.here}


class ToldOfRemote(Told):
    """As ``Told``, of a cache with a remote."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self.remote = cache.core.coordinator.door.remote
        self.changes = self.remote.listen()
        self.claims = type(self.claims)(cache.spec, 100_000, self.remote.plan)

    def poll(self) -> None:
        self.claims.note_remote(self.changes.take(), self.remote.is_usable)
        super().poll()

    def accepted(self, ids: tuple[int, ...], found: set[tuple[str, str, bytes]]) -> int:
        """The longest prefix that is here, or would be once what ``seek`` asks for has come."""
        here = super().accepted(ids, found)
        if not self.remote.is_usable:
            return here
        would_come = Would(self, ids, found)
        return next((n for n in range(len(ids) // BT * BT, here, -BT) if would_come(n)), here)

    def check(self) -> None:
        super().check()
        found, full = (
            findable(self.cache),
            [g.name for g in self.cache.spec.groups if isinstance(g.attention, FullAttention)],
        )
        for path in self.router.believed - self.router.found["GPU"]:
            keys = self.events.keys_of(Request("path", [t for block in path for t in block], 1))
            here = all(
                any((tier, name, key.tobytes()) in found for tier in ("device", "host"))
                for name in full
                for key in keys[name]
            )
            assert (path in self.router.found["CPU"]) == here


@pytest.fixture
def stored(make_serving: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes servings that share a remote."""
    shared = Shared()

    def make(groups: Any = HYBRID, blocks: Any = 40, host: Any = 60, least: int = 300, **options: Any) -> Any:
        monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", least)
        faults = options.pop("faults", {})
        store = FakeBackend(shared, **faults)
        made: Any = make_serving(groups, blocks, host, hold=(), remote_uri=store, **(ID | options))
        made.store = store
        return made

    make.shared = shared  # type: ignore[attr-defined]
    return make


def blocks(ids: list[int], n: int) -> set[Path]:
    parts = [tuple(ids[i : i + BT]) for i in range(0, n, BT)]
    return {tuple(parts[: i + 1]) for i in range(len(parts))}


def forget_here(serving: Any) -> None:
    inside.pools(serving.cache).forget_all()
    inside.host(serving.cache).forget_all()


WALKS = [(shape, least, seed) for shape in SHAPES for least in (1, 300, 700) for seed in range(6)]


@pytest.mark.parametrize(
    ("shape", "least", "seed"), sample(WALKS, [("full", 1, 0), ("hybrid", 300, 1), ("two_full", 700, 2)])
)
def test_a_listener_believes_what_a_request_would_fetch(stored: Make, shape: str, least: int, seed: int) -> None:
    rnd = random.Random(seed)
    groups = SHAPES[shape]
    faults = dict.fromkeys(("fail", "miss", "damage", "refuse"), 0.05 if seed % 2 else 0.0)
    one: Any = stored(groups, 24, 30, least, faults=faults)
    other: Any = stored(groups, 24, 30, least)
    told, by_remote = ToldOfRemote(one.cache), 0
    for k in range(36):
        tokens = [*prompt(rnd.randrange(4), rnd.randrange(1, 40)), *prompt(k, rnd.randrange(9))]
        serving = one if rnd.random() < 0.8 else other
        serving.add(f"{k}", tokens, rnd.randrange(1, 5))
        told.text(tokens)
        done = serving.run()[f"{k}"]
        told.text([*tokens, *done.token_ids])
        if rnd.random() < 0.15:
            forget_here(one)
        if rnd.random() < 0.1:
            one.engine.clock_s += 2  # a breaker that is open tries again
        told.poll()
        if k % 3 == 2:
            told.check()
        by_remote += len(told.router.found["STORAGE"])
    assert by_remote > 20
    if seed % 2:
        return  # where single objects are missing, a request may try a longer hit, once, and find out
    for i, ids in enumerate(sorted(told.texts)[::8]):
        forget_here(one)
        told.poll()
        accepted = told.accepted(ids, findable(one.cache))
        missed = one.cache.stats().remote.missed_objects
        done = one.serve(f"again {i}", [*ids, 1], 1)
        if one.cache.stats().remote.missed_objects == missed:  # else it has tried a longer hit, whose window lacks
            assert sum(done.cached_tokens.values()) >= accepted, "and it does; the other engine stores too"


def test_what_device_and_host_have_lost_is_told_as_the_stores(stored: Make) -> None:
    one: Any = stored()
    told = ToldOfRemote(one.cache)
    told.text(prompt(0, 50))
    one.serve("a", prompt(0, 50), 1)
    told.poll()
    assert (len(told.router.found["GPU"]), len(told.router.found["STORAGE"])) == (12, 0)
    forget_here(one)
    told.poll()
    assert told.router.found["STORAGE"] == blocks(prompt(0, 50), 48) == told.router.believed
    told.check()


def test_a_window_of_which_the_store_lacks_the_first_block_is_no_hit_and_is_not_told(stored: Make) -> None:
    one: Any = stored(HYBRID, least=1)
    told = ToldOfRemote(one.cache)
    told.text(prompt(0, 50))
    one.serve("a", prompt(0, 50), 1)
    keys = told.events.keys_of(Request("a", prompt(0, 50), 1))
    first = told.remote.plan.signs_of_end(keys["full"], 48)[0]
    assert first == ("b1", keys["win"][9].tobytes())
    told.remote.forget([first], were_believed=True)  # as after a spill that was refused
    objects = stored.shared.objects  # type: ignore[attr-defined]
    assert [objects.pop(name) for name in list(objects) if "/b1/" in name and name.endswith(first[1].hex())]
    for pools in (inside.pools(one.cache), inside.host(one.cache)):  # it is here, and the prompt's first blocks are not
        group = np.zeros(12, np.int32)
        found = pools.find(group, keys["full"])
        pools.unpublish(group[found > 0], found[found > 0])
    told.poll()
    told.check()
    assert not told.router.believed
    assert sum(one.serve("b", prompt(0, 50), 1).cached_tokens.values()) == 0


def test_a_text_whose_first_tile_the_store_has_lost_is_not_told_nor_is_its_continuation(stored: Make) -> None:
    one: Any = stored(FULL)
    told, text = ToldOfRemote(one.cache), prompt(0, 97)
    for tokens in (text[:48], text):  # two runs of blocks
        told.text(tokens)
    one.serve("a", text, 1)
    forget_here(one)
    told.poll()
    assert told.router.found["STORAGE"] == blocks(text, 96)
    plan = told.remote.plan
    keys = told.events.keys_of(Request("a", text, 1))["full"]
    assert plan.stride < 48 and plan.tile_tokens
    told.remote.forget(plan.names_at(keys, plan.stride), were_believed=True)
    told.poll()
    told.check()
    assert not told.router.believed


def test_another_engine_tells_of_the_store_only_what_it_has_fetched_itself(stored: Make) -> None:
    one: Any = stored()
    other: Any = stored()
    told = ToldOfRemote(other.cache)
    for k in range(2):
        told.text(prompt(k, 50))
        one.serve(f"{k}", prompt(k, 50), 1)
    told.poll()
    assert not told.router.believed, "the remote has them, and this engine has not seen it"
    assert other.serve("b", prompt(0, 50), 1).cached_tokens["remote"] == 48
    forget_here(other)
    told.poll()
    assert told.router.found["STORAGE"] == blocks(prompt(0, 50), 48)


def only_stored(stored: Make) -> tuple[Any, ToldOfRemote]:
    """A cache whose one text lies in the store alone, and a router that knows it."""
    one: Any = stored()
    told = ToldOfRemote(one.cache)
    told.text(prompt(0, 50))
    one.serve("a", prompt(0, 50), 1)
    forget_here(one)
    told.poll()
    assert told.router.found["STORAGE"]
    return one, told


def test_what_is_known_to_be_gone_is_taken_back(stored: Make) -> None:
    one, told = only_stored(stored)
    stored.shared.objects.clear()  # type: ignore[attr-defined]
    one.store.hold = True
    one.add("again", prompt(0, 50), 1)
    one.step()
    one.store.end("look")
    one.step()
    told.poll()
    assert not told.router.found["STORAGE"], "a question was enough"
    one.store.hold = False
    one.run()


@pytest.mark.parametrize("how", ["reset", "breaker"])
def test_nothing_is_told_of_a_store_that_is_left_alone(stored: Make, how: str) -> None:
    one, told = only_stored(stored)
    if how == "reset":
        one.cache.reset()
        one.serve("b", prompt(0, 50), 1)
    else:
        for _ in range(3):
            told.remote.breaker.on_end(Tried.LOOK, False, 0.0)
    told.poll()
    told.check()
    assert not told.router.found["STORAGE"]
    if how == "breaker":
        told.remote.breaker.on_end(Tried.MOVE, True, 0.0)
        told.poll()
        assert told.router.found["STORAGE"] == blocks(prompt(0, 50), 48)


def test_a_spill_of_what_was_disowned_meanwhile_is_not_told(stored: Make) -> None:
    one: Any = stored()
    told = ToldOfRemote(one.cache)
    told.text(prompt(0, 50))
    one.store.hold = True
    one.add("bad", prompt(0, 50), 20)
    one.step()
    one.steps_until(lambda: one.store.end("look") or any(what == "put" for what, _ in one.store.calls.values()))
    one.scheduler.fail("bad")
    one.step()
    one.store.end("put")
    one.step()
    told.poll()
    assert not told.router.believed
    assert told.changes.take() == {}
    one.store.hold = False
    one.run()


def test_what_the_tier_has_no_room_to_remember_is_taken_back(stored: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.remote.known.MOST_KNOWN", 3)
    one: Any = stored(least=1)
    told = ToldOfRemote(one.cache)
    for k in range(3):
        told.text(prompt(k, 9))
        one.serve(f"{k}", prompt(k, 9), 1)
        forget_here(one)
        told.poll()
        told.check()
    assert len(told.claims._loose_remote) <= 3
    assert len(told.remote.listen().take()) == 3


def test_keys_without_a_text_are_told_once_their_text_is_known(stored: Make) -> None:
    one: Any = stored()
    told = ToldOfRemote(one.cache)
    one.serve("a", prompt(0, 50), 1)
    forget_here(one)
    told.poll()
    assert not told.router.believed
    told.text(prompt(0, 50))
    told.poll()
    assert told.router.found["STORAGE"] == blocks(prompt(0, 50), 48)
    assert not told.claims._loose_remote


def test_changes_end_with_their_holder_and_cost_nothing_without_one(stored: Make) -> None:
    one: Any = stored()
    remote = one.cache.core.coordinator.door.remote
    changes = remote.listen()
    one.serve("a", prompt(0, 50), 1)
    there = changes.take()
    assert there and all(there.values()) and changes.take() == {}
    del changes
    assert not len(remote._known._listeners)
    assert np.all([name in there for name in remote.listen().take()])
