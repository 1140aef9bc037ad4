"""``HostTier``: texts of an engine that owns its device memory, its block ids and its keys come back."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import random
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import inside
import numpy as np
import pytest
from breadth import sized

from core.outside import SOUND, UNKIND, Outside, chain
from kvtier import (
    CacheClosed,
    ChunkedLocal,
    ConfigError,
    Fragment,
    FullAttention,
    HostTier,
    InvalidRequest,
    MemoryUnavailable,
    OutsideGroup,
    SlidingWindow,
    StepError,
)
from kvtier.coordinator.boundaries import Boundaries, End
from kvtier.cpu_offload.engines import EngineFactory
from kvtier.geometry import layout
from kvtier.testing import Faults, SimulatedEngine


def test_a_text_comes_back_in_every_group_as_far_as_it_was_computed():
    engine = Outside()
    text = list(range(46))
    assert engine.serve(text) == 0
    assert engine.serve(text) == 44  # the last token is left: its logits are needed
    assert engine.serve([*text, 7, 8, 9]) == 44
    assert engine.serve([*text[:20], *range(100, 130)]) == 0  # the windows were kept where the text had ended
    assert engine.serve([*text[:20], *range(200, 230)]) == 20  # and now also where two have parted
    assert engine.wrong == 0


def test_what_the_device_has_already_is_not_loaded_again():
    engine = Outside()
    text = list(range(40))
    engine.serve(text)
    follower = engine.tier.text(chain(text))
    hit = follower.match(12, 40)
    assert (hit.start, hit.end) == (12, 36)
    assert hit.at[hit.groups == 0].tolist() == list(range(3, 9))
    assert follower.match(6, 40).num_tokens == 0, "not a multiple of hit_tokens"
    assert follower.match(36, 40).num_tokens == 0
    engine.check()
    follower.close()
    engine.check()


def found_in_turn(engine, sessions, turns, message, answer):
    """Shares of what was said before that conversations in turn find, by turn from the second on."""
    talks, shares = [[1000 * s + i for i in range(30)] for s in range(sessions)], []
    for turn in range(turns):
        before = sum(map(len, talks))
        prompts = [[*talk, *(1000 * s + 500 + 20 * turn + i for i in range(message))] for s, talk in enumerate(talks)]
        shares.append(sum(engine.serve(prompt, [turn] * answer) for prompt in prompts) / before)
        talks = [[*prompt, *[turn] * answer] for prompt in prompts]
    return shares[1:]


def test_what_turns_leave_behind_goes_alone_since_slabs_are_fine(monkeypatch):
    """With slabs of eleven blocks each that goes takes some that the next conversation wants."""
    monkeypatch.setattr(layout, "MOST_SLABS", 32)
    assert min(found_in_turn(Outside(host_memory=13_000), 8, 5, message=12, answer=8)) > 0.95


def test_of_a_round_that_does_not_fit_because_of_what_turns_leave_behind_some_are_kept():
    assert min(found_in_turn(Outside(host_memory=10_500), 10, 8, message=8, answer=6)[-2:]) > 0.6


def test_what_is_disowned_is_not_found_again_and_loads_of_it_fail():
    engine = Outside(faults=Faults(max_delay_s=5.0))
    text, other = list(range(40)), list(range(500, 540))
    engine.serve(text)
    engine.serve(other)
    seq = engine.begin(text)
    wrong = engine.tier.text(chain([*text, 7, 8]))
    assert wrong.disown() == {seq.ticket}
    assert wrong.disown() == set()
    while seq.ticket is not None:
        engine.poll([seq])
    assert seq.done == 0, "the load has failed"
    engine.leave(seq)
    assert engine.serve(text) == 0
    assert engine.serve(text) == engine.serve(other) == 36
    engine.tier.reset()
    engine.serve(text)
    assert wrong.disown() == set(), "that was the content of the time before"
    assert engine.serve(text) == 36
    assert engine.tier.text(chain([])).disown() == set()


def test_a_hit_is_held_until_it_is_dropped():
    engine = Outside(host_memory=4_000)
    text = list(range(40))
    engine.serve(text)
    follower = engine.tier.text(chain(text))
    hit = follower.match(0, 40)
    assert hit.end == 36
    for k in range(1, 9):  # others want the room
        engine.serve([1000 * k + i for i in range(40)])
    assert follower.match(0, 40).end == 36
    follower.close()
    for k in range(1, 9):
        engine.serve([9000 * k + i for i in range(40)])
    assert engine.tier.text(chain(text)).match(0, 40).num_tokens == 0


def test_answers_of_which_nothing_is_found_again_go_first(monkeypatch):
    engine, counts = Outside(host_memory=20_000), []
    for paying in (End.ANSWER, End.PASSED, End.PROMPT):
        monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"", paying=paying: end is paying)
        seq = engine.begin([1000 * paying + k for k in range(64)])
        engine.compute(seq, 40)
        blocks = [np.asarray(seq.tables[g], np.int32) for g in range(3)]
        seq.text.computed(blocks, 40, is_end=True)
        engine.compute(seq, 64)
        for _ in range(20):
            engine.poll([])
        engine.leave(seq)
        counts.append(inside.tier_pools(engine.tier).num_superseded(0))
    assert counts == [0, 0, (64 - 40) // 4]


def test_what_a_conversation_moves_on_from_goes_first_unless_others_want_it(monkeypatch):
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is End.ANSWER)
    engine, shared, talk = Outside(host_memory=20_000), list(range(40)), list(range(500, 540))

    def superseded():
        return sum(inside.tier_pools(engine.tier).num_superseded(g) for g in (1, 2))

    counts = []
    for text in (shared, [*shared, *range(100, 120)], [*shared, *range(200, 220)], talk, [*talk, *range(600, 620)]):
        engine.serve(text)
        counts.append(superseded())
    none, once, again, begun, moved_on = counts
    assert none == 0
    assert once > 0, "as it seems, a conversation has moved on"
    assert again == 0, "it is what two begin with: it stays"
    assert begun == 0
    assert moved_on == once


@pytest.mark.parametrize("seed", range(sized(2, 40)))
@pytest.mark.parametrize("faults", [SOUND, UNKIND], ids=["sound", "unkind"])
def test_random_engines_never_read_what_was_not_written(seed, faults):
    rnd = random.Random(seed)
    engine = Outside(seed, faults, host_memory=rnd.choice([3_000, 6_000, 20_000]), deadline_s=8.0)
    texts = [[rnd.randrange(1000) for _ in range(rnd.randrange(6, 40))] for _ in range(4)]
    running = []
    for step in range(sized(150, 1000)):
        lost = step % 50 == 49
        if lost:
            engine.engines[0].end_lost()
        engine.turn(rnd, running, texts)
    assert engine.wrong == 0
    stats = engine.tier.stats().transfers
    assert stats.stored_blocks > 50 and stats.loaded_blocks > 10
    if faults is UNKIND:
        assert stats.failed_loads and stats.failed_stores and stats.expired


def test_writers_are_ordered_after_the_stores_that_read_their_blocks():
    engine = Outside(faults=Faults(max_delay_s=1000.0), deadline_s=5000.0)
    seq = engine.begin(list(range(40)))
    engine.compute(seq, 40)
    engine.tier.poll()
    engine.write(0, seq, 0)
    assert engine.engines[0].missing_edges, "the store was still reading"
    engine.engines[0].missing_edges.clear()
    engine.tier.overwrite(np.zeros(1, np.int32), seq.tables[0][:1])
    engine.write(0, seq, 0)
    engine.check()


def test_groups_may_share_all_of_their_memory():
    """vLLM's hybrid layout: a block id is one group's at a time, and its next writer may be another group's."""
    memory = np.zeros(64 * 40, np.uint8)
    both = (Fragment(0, 64, 32), Fragment(32, 64, 32))
    groups = [
        OutsideGroup("full", FullAttention(), 4, 40, both),
        OutsideGroup("window", SlidingWindow(8), 4, 40, both[::-1]),
    ]
    engines = []
    make = lambda m: engines.append(SimulatedEngine(m, 0, Faults(max_delay_s=50.0))) or engines[-1]  # noqa: E731
    tier = HostTier(groups, memory, "64KiB", deadline_s=1e6, copy_engine=make)
    text = tier.text(chain(list(range(16)), 4))
    text.computed([np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])], 16, is_end=True)
    tier.poll()
    write = lambda: engines[0].compute(set(), {(2, 2)})  # noqa: E731  (the window group's block 1)
    write()
    assert engines[0].missing_edges, "the full group's store still reads it"
    engines[0].missing_edges.clear()
    tier.overwrite(np.array([1]), np.array([1]))
    write()
    assert engines[0].missing_edges == []
    assert tier.audit() == []


def test_layers_with_an_allocation_each_are_served_through_one_view_over_all():
    """From the lowest address to the highest, with whatever lies between: nothing but the fragments is touched."""
    layers = [np.full(n * 64, 9, np.uint8) for n in (40, 4000, 40, 90_000)]  # small ones, and ones that are mapped
    low, high = min(of.ctypes.data for of in layers), max(of.ctypes.data + of.nbytes for of in layers)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    kinds = {"full": FullAttention(), "window": SlidingWindow(8)}
    groups = [
        OutsideGroup(name, kind, 4, 40, tuple(Fragment(of.ctypes.data - low, 64, 64) for of in layers[g::2]))
        for g, (name, kind) in enumerate(kinds.items())
    ]
    with HostTier(groups, memory, "64KiB", copy_engine="threads") as tier:
        text, tables = tier.text(chain(list(range(16)), 4)), [np.arange(4, dtype=np.int32)] * 2
        for k, of in enumerate(layers):
            of[: 4 * 64] = np.random.default_rng(k).integers(0, 256, 4 * 64, np.uint8)
        written = [of.copy() for of in layers]
        text.computed(tables, 16, is_end=True)
        end_of(tier)
        hit = text.match(0, 17)
        ticket = text.load(np.arange(20, 20 + len(hit.at), dtype=np.int32))
        assert ticket in end_of(tier)
        assert (hit.num_tokens, hit.groups.tolist(), hit.at.tolist()) == (16, [0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 2, 3])
        for k, (g, at) in enumerate(zip(hit.groups, hit.at, strict=True)):
            for n in (g, g + 2):
                written[n][(20 + k) * 64 : (21 + k) * 64] = written[n][at * 64 : (at + 1) * 64]
        assert all(np.array_equal(of, expected) for of, expected in zip(layers, written, strict=True))
        text.close()


def test_a_snapshot_of_a_state_is_a_group_with_a_window_of_two_tokens():
    """One every 64 tokens, beside full attention: a hit needs the last of them, and no other."""
    memory = np.zeros(200 * 64, np.uint8)
    groups = [
        OutsideGroup("full", FullAttention(), 16, 100, (Fragment(0, 64, 64),)),
        OutsideGroup("state", SlidingWindow(2), 64, 50, (Fragment(100 * 64, 128, 128),)),
    ]
    with HostTier(groups, memory, "64KiB", copy_engine="threads") as tier:
        text = tier.text(chain(list(range(200)), 16))
        memory[100 * 64 + 7 * 128 :][:128] = 77
        kept = [np.arange(12, dtype=np.int32), np.array([-1, -1, 7], np.int32)]  # the engine has the last snapshot only
        text.computed(kept, 200, is_end=True)
        end_of(tier)
        hit = text.match(0, 200)
        assert hit.num_tokens == 192
        assert hit.at[hit.groups == 0].tolist() == list(range(12))
        assert hit.at[hit.groups == 1].tolist() == [2]
        ticket = text.load(np.array([*range(20, 32), 9], np.int32))
        assert ticket in end_of(tier)
        assert (memory[100 * 64 + 9 * 128 :][:128] == 77).all()
        assert text.match(0, 192).num_tokens == 0, "no snapshot after 128 tokens"
        text.close()


def end_of(tier):
    """The loads that have ended well, once nothing is under way any more."""
    loaded = set()
    while tier.has_work:
        tier.wait(1.0)
        loaded |= set(tier.poll().loaded)
    return loaded


def test_a_reset_reaches_texts_that_are_open():
    engine = Outside()
    engine.serve(list(range(40)))
    matched, computing = engine.tier.text(chain(list(range(40)))), engine.tier.text(chain(list(range(100, 140))))
    hit = matched.match(0, 40)
    engine.tier.reset()
    with pytest.raises(StepError, match="reset since the match"):
        matched.load(np.arange(len(hit.hosts), dtype=np.int32))
    tables = [np.arange(20, dtype=np.int32) for _ in range(3)]
    computing.computed(tables, 40, is_end=True)
    for _ in range(5):
        engine.tier.poll()
    assert engine.tier.text(chain(list(range(100, 140)))).match(0, 40).num_tokens == 0
    assert computing.match(0, 40).num_tokens == 0
    engine.check()


def test_an_end_beyond_the_keys_counts_as_far_as_they_go():
    engine = Outside()
    text = engine.tier.text(chain(list(range(16))))
    text.computed([np.arange(20) for _ in range(3)], 40, is_end=True)
    for _ in range(5):
        engine.tier.poll()
    engine.check()
    assert engine.tier.text(chain(list(range(16)))).match(0, 17).num_tokens == 16


def test_a_text_that_is_closed_is_used_no_more():
    engine = Outside()
    engine.serve(list(range(40)))
    with engine.tier.text(chain(list(range(40)))) as text:
        assert text.match(0, 40).num_tokens == 36
    with pytest.raises(StepError, match="closed"):
        text.match(0, 40)
    with pytest.raises(StepError, match="closed"):
        text.computed([np.arange(20)] * 3, 40)
    engine.check()


def test_what_cannot_be_is_refused_by_name():
    memory = np.zeros(4096, np.uint8)

    def group(name="full", attention=None, tokens=4, blocks=8, *fragments):
        return OutsideGroup(name, attention or FullAttention(), tokens, blocks, fragments or (Fragment(0, 64, 64),))

    for groups, match in (
        ([], "groups with names"),
        ([group(), group()], "names of their own"),
        ([group(tokens=0)], "positive integers"),
        ([group(attention=ChunkedLocal(6))], "straddle"),
        ([group("full", None, 4, 8, Fragment(0, 64, 60))], "multiples of 8"),
        ([group("full", None, 4, 8, Fragment(0, 32, 64))], "overlap"),
        ([group(blocks=65)], "leave the 4,096 bytes"),
        ([group("full", None, 4, 8, Fragment(-8, 64, 64))], "leave"),
    ):
        with pytest.raises(ConfigError, match=match):
            HostTier(groups, memory, "1MiB")
    one, other = Fragment(0, 64, 64), Fragment(32, 64, 64)
    for groups, match in (
        ([group("a", None, 4, 8, one), group("b", None, 4, 8, other)], "overlap; groups may share"),
        ([group("a", None, 4, 8, one, one)], "overlap; groups may share"),
        ([group("a", 5)], "attention must be"),
        ([group("a", None, 4, 8, Fragment(0.5, 64, 64))], "integers"),
        ([5], "OutsideGroups"),
    ):
        with pytest.raises(ConfigError, match=match):
            HostTier(groups, memory, "1MiB")
    for wrong in (memory.view(np.float32), memory.reshape(64, 64), memory[::2], list(memory)):
        with pytest.raises(ConfigError, match="uint8"):
            HostTier([group()], wrong, "1MiB")
    with pytest.raises(MemoryUnavailable, match="raise host_memory"):
        HostTier([group()], memory, 100)
    with pytest.raises(ConfigError, match="verify"):
        HostTier([group()], memory, "1MiB", verify="sometimes")


def test_calls_that_cannot_be_are_refused_by_name():
    tier = HostTier(
        [OutsideGroup("full", FullAttention(), 4, 8, (Fragment(0, 64, 64),))], np.zeros(4096, np.uint8), "1MiB"
    )
    keys = chain(list(range(16)), 4)
    with pytest.raises(InvalidRequest, match="uint64"):
        tier.text(keys.astype(np.int64))
    text = tier.text(keys)
    with pytest.raises(StepError, match="match first"):
        text.load(np.array([1], np.int32))
    text.computed([np.arange(4, dtype=np.int32)], 16, is_end=True)
    while tier.has_work:
        tier.poll()
        tier.wait(0.1)
    hit = text.match(0, 17)
    assert hit.end == 16
    for blocks, match in (
        ([1, 2], "4 blocks"),
        ([1, 2, 3, 8], "num_blocks"),
        ([1, 2, 3, -1], "num_blocks"),
        ([1, 2, 3, 3], "into one device block"),
        ([1, 2, 3, 2**32], "integers below"),
        ([1, 2, 3, 4.5], "integers below"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            text.load(blocks)
    for groups, blocks in ([0], [8]), ([0], [-1]), ([1], [0]), ([0, 0], [1]):
        with pytest.raises(InvalidRequest, match="block"):
            tier.overwrite(groups, blocks)
    tier.overwrite([], [])
    with pytest.raises(InvalidRequest, match="1 groups, and 2 tables"):
        text.computed([[1], [1]], 4)
    for wrong in ("soon", -1, float("nan")):
        with pytest.raises(ConfigError, match="timeout_s"):
            tier.wait(wrong)
    assert tier.audit() == []
    tier.close()
    tier.close()
    assert not tier.has_work
    with pytest.raises(CacheClosed):
        tier.poll()


def test_the_example_runs_and_finds_its_conversations(capsys):
    path = Path(__file__).parents[2] / "examples" / "own_memory.py"
    spec = importlib.util.spec_from_file_location("own_memory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "turn 1: 900 tokens, 800 of them from the host tier"
    assert said[-1].endswith("180 loaded, 180 verified")


SHORT_EXAMPLE = Path(__file__).parents[2] / "examples" / "host_tier.py"
CAME_BACK = "64 tokens came back, in 6 blocks of two groups, each checked\n"


def test_the_short_example_loads_what_it_has_stored(capsys):
    runpy.run_path(str(SHORT_EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == CAME_BACK


def test_its_loops_may_run_as_python():
    """As they do where coverage is measured, or under a debugger."""
    command, environment = [sys.executable, "-W", "ignore::RuntimeWarning", SHORT_EXAMPLE], {"NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert (run.stdout, run.stderr, run.returncode) == (CAME_BACK, "", 0)


def test_a_block_that_found_no_room_is_stored_when_its_text_ends():
    engine = Outside(host_memory=900)
    others = engine.tier.text(chain([1000 + i for i in range(40)]))
    engine.serve([1000 + i for i in range(40)])
    assert others.match(0, 41).num_tokens == 40  # held: there is no room
    seq = engine.begin(list(range(80)))
    engine.compute(seq, 76)
    assert engine.tier.stats().transfers.dropped_blocks
    others.close()
    engine.compute(seq, 80)
    engine.leave(seq)
    for _ in range(20):
        engine.tier.poll()
    engine.check()
    assert engine.tier.text(seq.keys).match(0, 81).num_tokens == 80


class Bringing(EngineFactory):
    """Brings the host memory, and counts what is given back."""

    def __init__(self, problem):
        self.problem, self.given_back = problem, 0

    def host_memory(self, num_bytes, setting, seams):
        return np.zeros(num_bytes, np.uint8)

    def __call__(self, memory):
        raise self.problem

    def give_back(self):
        self.given_back += 1
        return True


def test_a_tier_that_cannot_be_made_gives_its_memory_back():
    groups, memory = [OutsideGroup("full", FullAttention(), 4, 8, (Fragment(0, 64, 64),))], np.zeros(4096, np.uint8)
    make = Bringing(MemoryError("no room for its threads"))
    with pytest.raises(MemoryError, match="its threads"):
        HostTier(groups, memory, "1MiB", copy_engine=make)
    assert make.given_back == 1


def test_a_tier_that_nobody_closed_leaves_no_thread_behind():
    groups, memory = [OutsideGroup("full", FullAttention(), 4, 8, (Fragment(0, 64, 64),))], np.zeros(4096, np.uint8)
    before = set(threading.enumerate())
    tier = HostTier(groups, memory, "1MiB", copy_engine="threads")
    text = tier.text(chain(list(range(16)), 4))
    text.computed([np.arange(4, dtype=np.int32)], 16, is_end=True)
    tier.poll()
    assert set(threading.enumerate()) - before
    del tier, text
    gc.collect()
    assert set(threading.enumerate()) <= before
