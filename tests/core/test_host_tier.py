"""``HostTier``: a host tier for an engine that owns its device memory, its block ids and its keys."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import random
import runpy
import threading
from pathlib import Path

import inside
import numpy as np
import pytest
from breadth import sized

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
from kvtier.cpu_offload.engines import CopyEngine, EngineFactory, Outcome
from kvtier.cpu_offload.transfer import TransferState
from kvtier.pools.block_pool import Place
from kvtier.testing import Faults, SimulatedEngine

SOUND = Faults(max_delay_s=2.0)
UNKIND = Faults(fail=0.05, tear=0.05, corrupt=0.05, lose=0.03, max_delay_s=6.0)

GROUPS = {
    "full": (FullAttention(), 4, (0, 5)),
    "window": (SlidingWindow(10), 2, (1, 3)),
    "chunk": (ChunkedLocal(8), 4, (2, 4)),
}
BLOCKS, ROW = 80, 16


def chain(tokens, unit=2):
    """Keys, uint64 [n, 2]."""
    name, keys = b"", []
    for i in range(len(tokens) // unit):
        name = hashlib.blake2b(name + repr(tokens[i * unit : (i + 1) * unit]).encode(), digest_size=16).digest()
        keys.append(np.frombuffer(name, np.uint64))
    return np.array(keys, np.uint64).reshape(-1, 2)


def content(key, layer):
    return np.frombuffer(hashlib.blake2b(key.tobytes() + bytes([layer]), digest_size=ROW).digest(), np.uint8)


class Sequence:
    def __init__(self, tokens):
        self.tokens, self.keys = tokens, chain(tokens)
        self.tables = {}
        self.done = 0
        self.ticket = self.hit = None


class Outside:
    """An engine with memory of its own: several sequences at once, blocks used again as soon as it likes."""

    def __init__(self, seed=0, faults=SOUND, host_memory=12_000, verify="full", deadline_s=40.0, **options):
        self.memory = np.zeros(6 * BLOCKS * ROW, np.uint8)
        self.groups = [
            OutsideGroup(name, attention, tokens, BLOCKS, tuple(Fragment(n * BLOCKS * ROW, ROW, ROW) for n in layers))
            for name, (attention, tokens, layers) in GROUPS.items()
        ]
        self.engines = []

        def make(memory):
            self.engines.append(SimulatedEngine(memory, seed, faults))
            return self.engines[-1]

        self.tier = HostTier(self.groups, self.memory, host_memory, verify, deadline_s, make, **options)
        inside.at_end_of_loads(self.tier, lambda load, good: self.check_wiped(load, ~good, self.memory))
        self.free = [list(range(BLOCKS)) for _ in self.groups]
        self.lent = {}  # ticket: blocks that a load may still write though its sequence has gone
        self.late = set()  # stores that were given up
        self.found = self.wrong = 0

    def begin(self, tokens, running=()):
        """A sequence with blocks for all its tokens; its load, if there is a hit, is under way."""
        seq = Sequence(tokens)
        for g, group in enumerate(self.groups):
            seq.tables[g] = np.array([self.free[g].pop() for _ in range(len(tokens) // group.block_tokens)], np.int32)
        seq.text = self.tier.text(seq.keys)
        while (hit := seq.text.match(0, len(tokens), ask_remote=True)).is_sought:
            self.poll(running)
        if hit.num_tokens and not hit.is_pending:
            seq.hit = hit
            targets = [seq.tables[g][j] for g, j in zip(hit.groups, hit.at, strict=True)]
            seq.ticket = seq.text.load(np.array(targets, np.int32))
        return seq

    def compute(self, seq, end):
        """Writes what the tokens up to ``end`` fill, as a forward does, and checks what a load has brought."""
        for g, group in enumerate(self.groups):
            first, last = seq.done // group.block_tokens, end // group.block_tokens
            blocks = seq.tables[g][first:last]
            self.tier.overwrite(np.full(len(blocks), g, np.int32), blocks)
            for j in range(first, last):
                self.write(g, seq, j)
        seq.done = end
        seq.text.computed([seq.tables[g] for g in range(3)], end, is_end=end == len(seq.tokens))

    def write(self, g, seq, j):
        touched = {(int(f) + self.first(g), int(seq.tables[g][j]) + 1) for f in range(2)}
        self.engines[0].compute(set(), touched)
        for layer in GROUPS[self.groups[g].name][2]:
            self.row(layer, seq.tables[g][j])[:] = content(self.name(g, seq, j), layer)

    def first(self, g):
        return 2 * g

    def name(self, g, seq, j):
        return seq.keys[(j + 1) * self.groups[g].block_tokens // 2 - 1]

    def row(self, layer, block, memory=None):
        at = (layer * BLOCKS + int(block)) * ROW
        return (self.memory if memory is None else memory)[at : at + ROW]

    def check_wiped(self, load, bad, memory):
        """The ``bad`` blocks of a load are zeros in ``memory``."""
        for g, block in zip(load.groups[bad].tolist(), load.device[bad].tolist(), strict=True):
            for layer in GROUPS[self.groups[g].name][2]:
                assert not self.row(layer, block, memory).any(), "a refused load has left something"

    def poll(self, running):
        """Loads that have landed are checked, byte for byte; those that failed are computed."""
        ended = self.tier.poll()
        for seq in running:
            if seq.ticket in ended.loaded:
                seq.done, seq.ticket = seq.hit.end, None
                self.found += seq.hit.num_tokens
                for g, j in zip(seq.hit.groups, seq.hit.at, strict=True):
                    for layer in GROUPS[self.groups[g].name][2]:
                        right = content(self.name(g, seq, j), layer)
                        self.wrong += not np.array_equal(self.row(layer, seq.tables[g][j]), right)
            elif seq.ticket in ended.failed:
                if seq.ticket not in ended.released:  # given up: it may still write there
                    self.lent[seq.ticket] = [(g, seq.tables[g].tolist()) for g in range(3)]
                    for g, group in enumerate(self.groups):
                        seq.tables[g] = np.array(
                            [self.free[g].pop() for _ in range(len(seq.tokens) // group.block_tokens)], np.int32
                        )
                seq.ticket = None
        for ticket in ended.released:
            for g, blocks in self.lent.pop(ticket, ()):
                self.free[g] += blocks

    def leave(self, seq):
        seq.text.close()
        for g in range(3):
            self.free[g] += seq.tables[g].tolist()

    def check(self):
        """A write over a store that was given up spoils a quarantined host block: no edge is missing."""
        assert self.tier.audit() == []
        live = inside.tier_connector(self.tier).ledger.live()
        self.late |= {f"store {t.ticket} " for t in live if t.state is TransferState.EXPIRED}
        missing = self.engines[0].missing_edges
        assert [edge for edge in missing if not any(late in edge for late in self.late)] == []

    def serve(self, tokens):
        """One sequence from its beginning to its end; returns the tokens found."""
        seq = self.begin(tokens)
        while seq.ticket is not None:
            self.poll([seq])
        found = seq.done
        self.compute(seq, len(tokens))
        self.leave(seq)
        for _ in range(20):
            self.poll([])
        self.check()
        return found


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


def test_what_a_conversation_moves_on_from_goes_first_unless_others_want_it():
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


@pytest.mark.parametrize("seed", range(sized(4, 40)))
@pytest.mark.parametrize("faults", [SOUND, UNKIND], ids=["sound", "unkind"])
def test_random_engines_never_read_what_was_not_written(seed, faults):
    rnd = random.Random(seed)
    engine = Outside(seed, faults, host_memory=rnd.choice([3_000, 6_000, 20_000]), deadline_s=8.0)
    texts = [[rnd.randrange(1000) for _ in range(rnd.randrange(6, 40))] for _ in range(4)]
    running = []
    for step in range(sized(250, 1000)):
        lost = step % 50 == 49
        if lost:
            engine.engines[0].end_lost()
        if len(running) < 3 and min(map(len, engine.free)) > 60:
            text = rnd.choice(texts)
            tokens = [*text[: rnd.randrange(4, len(text) + 1)], *(rnd.randrange(1000) for _ in range(rnd.randrange(6)))]
            running.append(engine.begin(tokens))
            if rnd.random() < 0.3 and len(tokens) < 40:
                texts[rnd.randrange(4)] = tokens
        engine.poll(running)
        for seq in [s for s in running if s.ticket is None]:
            engine.compute(seq, min(len(seq.tokens), seq.done + rnd.randrange(1, 12)))
            if seq.done == len(seq.tokens):
                running.remove(seq)
                engine.leave(seq)
        if rnd.random() < 0.01:
            engine.tier.reset()
        engine.check()
    assert engine.wrong == 0
    stats = engine.tier.stats().transfers
    assert stats.stored_blocks > 50 and stats.loaded_blocks > 10
    if faults is UNKIND:
        assert stats.failed_loads and stats.failed_stores and stats.expired


def test_without_verification_a_flipped_bit_is_not_seen_which_shows_that_the_check_can_fail():
    wrong = 0
    for verify in ("off", "full"):
        engine = Outside(3, Faults(corrupt=1.0), verify=verify)
        engine.serve(list(range(40)))
        engine.serve(list(range(40)))
        wrong += engine.wrong
        assert (engine.wrong > 0) == (verify == "off")
    assert wrong


@pytest.mark.parametrize("fragment", [0, 1])
def test_a_damaged_fragment_takes_its_block_out_and_no_other(fragment):
    engine = Outside()
    engine.serve(list(range(40)))
    keys = np.ascontiguousarray(chain(list(range(40)))[1::2])  # of the full group's blocks
    of = np.zeros(len(keys), np.int32)
    hosts = inside.tier_pools(engine.tier).find(of, keys)
    assert (hosts > 0).all()
    layout = inside.tier_arena(engine.tier).layout
    inside.tier_arena(engine.tier).bytes[layout.origins[0] + hosts[4] * layout.strides[0] + fragment * ROW + 5] ^= 1
    assert engine.serve(list(range(40))) == 0, "the load has failed, and all was computed"
    assert engine.wrong == 0
    assert engine.tier.stats().transfers.corrupt_blocks == 1
    found = inside.tier_pools(engine.tier).find(of, keys)
    assert (found == hosts).tolist() == [k != 4 for k in range(len(keys))]
    assert found[4] > 0, "it was stored again, in another block"


def test_all_fragments_of_a_refused_block_are_wiped_and_no_other_block():
    engine, text = Outside(), list(range(40))
    engine.serve(text)
    hosts = inside.tier_pools(engine.tier).find(np.zeros(5, np.int32), np.ascontiguousarray(chain(text)[1:11:2]))
    layout = inside.tier_arena(engine.tier).layout
    at = int(layout.origins[0] + hosts[4] * layout.strides[0])  # its first fragment of two
    inside.blow_up(inside.tier_arena(engine.tier).bytes[at : at + ROW])
    engine.memory[:] = 0x55
    seq = engine.begin(text)
    blocks = dict(seq.tables)
    while seq.ticket is not None:
        engine.poll([seq])
    wiped = [(layer, b) for layer in range(6) for b in range(BLOCKS) if not engine.row(layer, b).any()]
    assert wiped == [(0, blocks[0][4]), (5, blocks[0][4])]
    engine.leave(seq)
    engine.check()


def test_what_a_load_has_left_that_was_given_up_is_wiped_before_its_blocks_are_free():
    engine, text = Outside(deadline_s=8.0), list(range(40))
    engine.serve(text)
    engine.memory[:] = 0x55
    inside.use_faults(engine.engines[0], Faults(lose=1.0))
    seq = engine.begin(text)
    while seq.ticket is not None:
        engine.poll([seq])
    [held] = engine.lent.values()
    mine = {(layer, b) for g, blocks in held for b in blocks for layer in GROUPS[engine.groups[g].name][2]}
    assert all(engine.row(*place).any() for place in mine)
    engine.engines[0].end_lost()
    engine.poll([])
    assert engine.lent == {}
    assert sum(not engine.row(*place).any() for place in mine) > 20, "every fragment of the hit"
    engine.leave(seq)
    engine.check()


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


def test_the_short_example_loads_what_it_has_stored(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "host_tier.py"), run_name="__main__")
    assert capsys.readouterr().out == "64 tokens came back, in 6 blocks of two groups, each checked\n"


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
    before = threading.active_count()
    tier = HostTier(groups, memory, "1MiB", copy_engine="threads")
    text = tier.text(chain(list(range(16)), 4))
    text.computed([np.arange(4, dtype=np.int32)], 16, is_end=True)
    tier.poll()
    assert threading.active_count() > before
    del tier, text
    gc.collect()
    assert threading.active_count() == before


class ByHand(CopyEngine):
    """Copies end when the test says so, on the test's clock."""

    def __init__(self, memory):
        super().__init__(memory)
        self.ended, self.time_s = [], 0.0

    def submit(self, transfer):
        self.memory.copy(transfer)

    def poll(self):
        ended, self.ended = self.ended, []
        return ended

    def order_after(self, tickets, timeout_s):
        return True

    def wait(self, timeout_s):
        return bool(self.ended)

    def wake(self): ...

    def now(self):
        return self.time_s

    def close(self, timeout_s):
        return True


@pytest.mark.parametrize("resets", [False, True])
def test_a_block_that_two_overdue_loads_read_is_in_use_again_when_both_have_ended(resets):
    groups, engines = [OutsideGroup("full", FullAttention(), 4, 16, (Fragment(0, 64, 64),))], []
    make = lambda memory: engines.append(ByHand(memory)) or engines[0]  # noqa: E731
    tier = HostTier(groups, np.zeros(1024, np.uint8), "4KiB", deadline_s=5.0, copy_engine=make)
    keys = chain(list(range(16)), 4)
    writer = tier.text(keys)
    writer.computed([np.arange(4, dtype=np.int32)], 16, is_end=True)
    tier.poll()
    engines[0].ended = [Outcome(1)]
    tier.poll()
    texts = [tier.text(keys) for _ in range(2)]
    for k, text in enumerate(texts):
        hosts = text.match(0, 17).hosts
        text.load(np.arange(4 + 4 * k, 8 + 4 * k, dtype=np.int32))
    engines[0].time_s = 6.0
    assert set(tier.poll().failed) == {2, 3}
    pools = inside.tier_pools(tier)
    out = []
    for outcome in (Outcome(2, "a checksum is wrong", np.array([0]), corrupt=True), Outcome(3, "too late")):
        if resets:
            tier.reset()
        engines[0].ended = [outcome]
        tier.poll()
        assert tier.audit() == []
        places = pools.arrays.place[pools.entries(np.zeros(4, np.int32), hosts)]
        out.append((places == Place.QUARANTINED).tolist())
    assert out[0] == [True] * 4, "the other load may still read them"
    assert out[1] == [not resets, False, False, False], "the first one's bytes have changed, until a reset"
    tier.reset()
    assert tier.audit() == []
    assert tier.stats().host["full"].quarantined == 0
