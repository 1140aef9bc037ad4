"""The world with a remote tier: walks reach it, and what its checks must see."""

from __future__ import annotations

import random

import pytest
from breadth import sized

from kvtier.remote.envelope import Envelope
from kvtier.remote.tier import RemoteTier
from model.played_backend import FATES, ROTS, Shelf, of_an_older_format
from model.walk import random_config, random_rule, replay
from model.world import Config, Counts, World

GROUPS = {"full": ("full", 0, 2, 12, 30), "window": ("window", 3, 2, 12, 30), "chunk": ("chunk", 4, 2, 12, 30)}
WORLD = Config(GROUPS, streams=False, objects=1, quick=1.0)
ASKS = [("submit", (0, 9, 0, 2)), ("drain", (0,))]


def test_walks_with_a_store_reach_it():
    counts = Counts()
    for seed in range(sized(1, 24)):
        rnd = random.Random(f"store {seed}")
        config = random_config(rnd, seed, has_remote=True)
        replay(config, [*(random_rule(rnd) for _ in range(250)), ("drain", (0,))], counts)
    assert counts.seen["prompt tokens from store"] > 0
    assert counts.seen["store: spilled_objects"] > 0
    assert counts.seen["store calls that may go wrong"] + counts.seen["stored objects damaged"] > 0


@pytest.mark.parametrize("how", range(len(ROTS)), ids=ROTS)
def test_whatever_happens_to_objects_is_a_miss(how):
    """All that another engine has left is damaged."""
    counts = Counts()
    replay(WORLD, [("elsewhere", (0, 9)), *(("rot_store", (k, how)) for k in range(24)), *ASKS], counts)
    assert counts.seen["stored objects damaged"] >= 8
    assert (counts.seen["store: damaged_objects"] > 0) == (ROTS[how] != "drop")


@pytest.mark.usefixtures("damaged")
def test_an_object_under_another_name_would_be_seen_in_the_text(monkeypatch):
    rules = [("elsewhere", (0, 9)), ("elsewhere", (1, 9)), *(("rot_store", (k, 2)) for k in range(24)), *ASKS]
    replay(WORLD, rules)
    monkeypatch.setattr(Envelope, "check", lambda *_, **__: "")
    with pytest.raises(AssertionError):
        replay(WORLD, rules)


@pytest.mark.usefixtures("damaged")
def test_a_fetch_that_is_waited_for_too_long_is_found(monkeypatch):
    """Its time passes, and nobody gives it up."""
    calls = [("schedule", ()), ("commit", ()), ("end_call", (0, 0)), ("schedule", ()), ("commit", ())]
    rules = [("elsewhere", (0, 9)), ("submit", (0, 9, 0, 2)), *calls, ("pass_time", (60.0,)), ("schedule", ())]
    config = Config(GROUPS, streams=False, objects=1, deadline_s=20.0)
    replay(config, rules)
    monkeypatch.setattr(RemoteTier, "_expire", lambda self, move: None)
    with pytest.raises(AssertionError, match="waits for the remote"):
        replay(config, rules)


def test_a_text_without_objects_is_not_deleted_for_ever():
    """A soak's find: nothing of it was ever named in the remote, and the engine had work for ever."""
    groups = {"full": ("full", 0, 6, 12, 30), "window": ("window", 3, 2, 12, 30)}
    config = Config(groups, streams=False, objects=1, quick=1.0)
    replay(config, [("submit", (0, 3, 0, 2)), ("fail", (0,)), ("drain", (0,))])


def test_puts_of_an_engine_that_ends_are_done_torn_or_not_begun():
    counts = Counts()
    world = World(Config(GROUPS, streams=False, objects=1), counts)
    for k in range(6):
        world.submit(3, 9, k, 1)
        world.schedule()
        world.commit()
        world.end_call(0)  # it is asked for, and not there
        for _ in range(8):
            world.schedule()
            world.commit()
            while world._under_way():
                world.end_copy(0)
        assert world.calls.calls
        world.reopen()
    assert 0 < len(world._shelf.spoiled) < len(world._shelf.objects)
    assert world._shelf.wrong() == []
    world._shelf.spoiled.clear()
    assert world._shelf.wrong(), "torn objects are seen as such"
    world.cache.close()


def test_an_object_of_an_older_format_has_a_trailer_that_is_whole():
    counts, shelf = Counts(), Shelf(0)
    world = World(WORLD, counts)
    world.elsewhere(0, 9)
    shelf.objects = {name: of_an_older_format(data) for name, data in world._shelf.objects.items()}
    world.cache.close()
    assert shelf.objects
    assert all("of an older format, 0" in reason for reason in shelf.wrong())
    assert len(FATES) == len(set(FATES))
