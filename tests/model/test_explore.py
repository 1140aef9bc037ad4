"""The explorer on a few tiny configurations, and planted bugs that it must find."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import inside
import numpy as np
import pytest
from breadth import breadth, sample

from kvtier.cache.warmup import warm_up
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.extension import Extension
from kvtier.coordinator.room import Room
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.scheduler import Scheduler
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.ledger import Ledger
from kvtier.gpu_pool.exports import Exports
from kvtier.pools.block_pool import BlockPools, Mark
from kvtier.remote.tier import RemoteTier

from . import explore as explorer
from .explore import Config, components, configurations, explore
from .snapshot import canonical, freeze, name_of, thaw
from .tiny import INDEXED, World, watched

pytestmark = pytest.mark.usefixtures("unaudited", "warm")  # the explorer audits every state itself

CONFIGURATIONS = {config.name: config for config in configurations()}
LOADS = CONFIGURATIONS["load and stores"]
TIGHT = CONFIGURATIONS["one tier, second first, one row"]
TORN = replace(CONFIGURATIONS["entries, a torn restore"], prompts=((1, 2, 3),), new=(1,), priorities=(0,))
SHORT_INDEX = replace(TORN, host=(6, 6, 1), warm=(1, 2, 3, 4, 5), prompts=((1, 2, 3, 4, 5),))
DISTINCT = replace(CONFIGURATIONS["one tier, distinct"], can=frozenset({"cancel"}))


@pytest.fixture(scope="module")
def warm():
    """In the unbroken state: the planted bugs would keep it from ever ending."""
    warm_up()


@cache
def explored(name):
    return explore(CONFIGURATIONS[name], recheck=50)


@pytest.mark.parametrize(
    "name",
    sample(
        [
            "one tier, second first, one row",
            "one tier, outgrows the pool",
            "one tier, shared stem, a token a step",
            "load and stores",
            "loads, one row, cancel",
        ],
        ["load and stores"],
    ),
)
def test_in_every_state_all_is_well_and_from_every_state_all_ends(name):
    result = explored(name)
    assert result.violations == []
    assert result.whole
    assert result.states > 500
    assert 0 < result.longest <= result.bound
    assert (result.loading > 0) == ("load" in name)
    assert (result.both > 0) == ("load" in name)


@pytest.mark.parametrize(
    "name",
    sample(
        ["store, fetches fail", "store, fetches hang", "store, spills fail", "store, two, tight"],
        ["store, fetches fail"],
    ),
)
def test_with_a_store_behind_the_host_tier_all_is_well_too(name):
    result = explored(name)
    assert (result.violations, result.whole) == ([], True)
    assert result.states > (90 if "spills" in name else 150)
    assert 0 < result.longest <= result.bound
    assert (result.loading > 0) == ("spills" not in name), "what was fetched is loaded"


@pytest.mark.parametrize("name", sample(["states, parting", "states, longer"], ["states, parting"]))
def test_with_states_all_is_well_too(name):
    result = explored(name)
    assert (result.violations, result.whole) == ([], True)
    assert result.states > (3000 if name == "states, longer" else 100)
    assert 0 < result.longest <= result.bound


@breadth
def test_an_index_without_its_keys_is_no_hit():
    """Loads of windows, entries and index keys fail in part: nothing of them is used, and all goes on."""
    result = explored("entries, a torn restore")
    assert (result.violations, result.whole) == ([], True)
    assert result.states > 150
    assert result.loading > 0


def test_a_state_that_goes_to_the_null_block_is_found(monkeypatch):
    """S3: so the explorer looks at what steps do with states."""
    own = Exports.states

    def broken(*args):
        states = own(*args)
        states.target[:-1] = 0
        return states

    monkeypatch.setattr(Exports, "states", broken)
    found = explore(CONFIGURATIONS["states, parting"]).violations
    assert any("S3" in violation for violation in found)


@breadth
def test_preemptions_happen_and_are_counted():
    assert (explored(TIGHT.name).violations, explored(TIGHT.name).preemptions) == ([], 1)


def test_a_thawed_world_goes_on_as_the_frozen_one():
    with watched():
        world = World(LOADS)
        for action in [("add", "r0"), ("schedule",), ("add", "r1"), ("commit",)]:
            world.do(action)
        while world.actions():
            copy = thaw(freeze(world))
            assert name_of(copy) == name_of(world)
            action = world.actions()[-1]
            assert vars(copy.do(action)) == vars(world.do(action))
            assert canonical(copy) == canonical(world)
    assert set(world.reported.values()) == {"length"}


def test_what_is_held_of_a_hit_while_a_victim_leaves_is_not_counted_as_lacking():
    """r1's first block is in the pool and nobody's; r0 gives way to it."""
    path = "add r1, schedule, commit, schedule, cancel, add r0, schedule, commit, schedule, cancel, schedule"
    with watched():
        world = World(CONFIGURATIONS["one tier, distinct"])
        for action in path.split(", "):
            happened = world.do(tuple(action.split()))
            assert happened.wrong == []
    assert (happened.preempted, happened.tokens) == (("r0",), 1)


def test_the_command_runs_from_the_root_of_the_repository():
    command = [sys.executable, "-m", "tests.model.explore", "-k", "no such name"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert (done.returncode, "0 configurations" in done.stdout) == (0, True), done.stderr


def test_components_come_after_what_they_lead_to():
    edges = {0: [1], 1: [2], 2: [1, 3], 3: [], 4: [4, 3]}
    parts = [sorted(part) for part in components(5, edges.__getitem__)]
    assert sorted(parts) == [[0], [1, 2], [3], [4]]
    assert parts.index([3]) < parts.index([1, 2]) < parts.index([0])


@breadth
def test_states_that_differ_and_were_merged_are_reported(monkeypatch):
    """A name that forgets the pools merges too much."""
    names = {}

    def coarse(world):
        plain = canonical(world)
        return names.setdefault(repr(plain[5:-2]), bytes([0, *len(names).to_bytes(8, "little")]))

    monkeypatch.setattr(explorer, "name_of", coarse)
    result = explore(TIGHT, recheck=500)
    assert any("merged states differ" in violation for violation in result.violations)


# --- planted bugs ---------------------------------------------------------------------------------


def found(config: Config) -> str:
    return "\n".join(explore(config).violations)


def test_a_lost_wake_up_is_found(monkeypatch):
    monkeypatch.setattr(Ledger, "is_live", lambda self, ticket: True)
    assert "I8: an empty step, nothing to report, no transfer under way" in found(LOADS)


def test_landed_loads_that_wait_behind_a_head_that_is_short_are_found(monkeypatch):
    settle = Scheduler._settle_loads

    def unless_the_head_is_short(self):
        if not self.waiting or ": needs " not in self.waiting[0].wait_reason:
            settle(self)

    monkeypatch.setattr(Scheduler, "_settle_loads", unless_the_head_is_short)
    assert "I9: the load of r0 has landed, but it does not run" in found(LOADS)


@breadth
def test_a_victim_that_frees_nothing_is_found(monkeypatch):
    """Two requests with one prompt share its blocks: neither's release frees them."""
    monkeypatch.setattr(Room, "can_go_on", lambda *_: True)  # else whoever lacks more than the other has ends
    monkeypatch.setattr(Room, "choose_victims", lambda self, candidates, *_, **__: list(candidates[:1]))
    equal = Config("equal", (4, 6, 6), prompts=((1, 2, 3, 4),) * 2, new=(6, 6), can=frozenset())
    assert "I10: r1 is preempted for [1, 0, 0] blocks, but only [0, " in found(equal)


@breadth
def test_preempting_the_older_for_the_younger_is_found(monkeypatch):
    monkeypatch.setattr(Roster, "younger", lambda self, seq: [s for s in reversed(self.running) if s is not seq])
    assert "is preempted, though it is the first in service order" in found(DISTINCT)


@breadth
def test_a_failing_load_that_is_tried_for_ever_is_a_livelock(monkeypatch):
    unpublish = BlockPools.unpublish

    def keep_what_is_ready(self, groups, blocks):
        ready = self.arrays.mark[self.entries(groups, blocks)] == Mark.READY
        unpublish(self, groups[~ready], blocks[~ready])

    def match(self, seq):
        return self._matcher.match(self.tables, seq.keys, len(seq.tokens), True)

    monkeypatch.setattr(BlockPools, "unpublish", keep_what_is_ready)
    monkeypatch.setattr(Coordinator, "match", match)
    config = Config("retry", (4, 4, 4), (4, 4, 4), warm=(1, 2, 3), prompts=((1, 2, 3),), new=(1,), priorities=(0,))
    assert "I8: a livelock" in found(config)


def test_blocks_that_are_never_given_back_are_found(monkeypatch):
    monkeypatch.setattr(Connector, "unpin_host", lambda self, groups, hosts: None)
    assert "I2: host" in found(LOADS)


@breadth
def test_an_empty_step_that_nobody_ends_is_found(monkeypatch):
    """Nobody is admitted: the first schedule is empty, and nothing is under way."""
    monkeypatch.setattr("kvtier.coordinator.admission.Admission._admit", lambda self, *_: None)
    assert "I8: an empty step" in found(TIGHT)


@pytest.mark.parametrize("lost", INDEXED.names)
def test_a_restore_that_brings_a_part_of_a_layer_is_found(monkeypatch, lost):
    """Entries without their index's keys, an index without entries, or both without the window."""
    own = Connector.load

    def torn(self, groups, *others):
        brought = groups != INDEXED.names.index(lost)
        return own(self, groups[brought], *(other[brought] for other in others))

    monkeypatch.setattr(Connector, "load", torn)
    assert f"waits for blocks of group {lost} that no load brings" in found(TORN)


def test_entries_whose_first_index_keys_are_gone_are_no_hit():
    """The host has all entries and the window, and room for one block of index keys."""
    result = explore(SHORT_INDEX)
    assert (result.violations, result.whole, result.loading) == ([], True, 0)


def test_names_are_made_of_plain_values():
    """Names are made of plain values only, so that equal states give equal bytes."""

    def plain(value):
        if isinstance(value, (tuple, list)):
            return all(map(plain, value))
        return value is None or (isinstance(value, (str, int, bytes)) and not isinstance(value, np.generic))

    with watched():
        world = World(LOADS)
        world.do(("add", "r0"))
        world.do(("schedule",))
        assert plain(canonical(world))


def test_a_fetch_that_nobody_gives_up_is_found(monkeypatch):
    monkeypatch.setattr(RemoteTier, "_expire", lambda self, move: None)
    assert "is overdue, and still waited for" in found(CONFIGURATIONS["store, fetches hang"])


@breadth
def test_a_first_request_that_lets_others_pass_is_found(monkeypatch):
    def sit_out(self, position):
        inside.running(self).entries.placed[inside.running(self).roster.running[position].row] = 1

    monkeypatch.setattr(Extension, "_answer_shortage", sit_out)
    assert "I8: r0, the first in service order, stands still" in found(DISTINCT)
