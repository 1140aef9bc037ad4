"""An engine that owns its device memory, its block ids and its keys, over a ``HostTier``."""

from __future__ import annotations

import hashlib

import inside
import numpy as np

from kvtier import (
    ChunkedLocal,
    Fragment,
    FullAttention,
    HostTier,
    OutsideGroup,
    SlidingWindow,
)
from kvtier.cpu_offload.transfer import TransferState
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

    def turn(self, rnd, running, texts, reset=0.01):
        """By chance a text begins or goes on, every running one computes, and the tier is reset."""
        if len(running) < 3 and min(map(len, self.free)) > 60:
            text = rnd.choice(texts)
            tokens = [*text[: rnd.randrange(4, len(text) + 1)], *(rnd.randrange(1000) for _ in range(rnd.randrange(6)))]
            running.append(self.begin(tokens, running))
            if rnd.random() < 0.3 and len(tokens) < 40:
                texts[rnd.randrange(4)] = tokens
        self.poll(running)
        for seq in [s for s in running if s.ticket is None]:
            self.compute(seq, min(len(seq.tokens), seq.done + rnd.randrange(1, 12)))
            if seq.done == len(seq.tokens):
                running.remove(seq)
                self.leave(seq)
        if rnd.random() < reset:
            self.tier.reset()
        self.check()

    def extend(self, seq, answer):
        """More tokens at its end, with blocks for them."""
        seq.tokens = [*seq.tokens, *answer]
        known, seq.keys = len(seq.keys), chain(seq.tokens)
        seq.text.extend(seq.keys[known:])
        for g, group in enumerate(self.groups):
            lacking = len(seq.tokens) // group.block_tokens - len(seq.tables[g])
            seq.tables[g] = np.append(seq.tables[g], [self.free[g].pop() for _ in range(lacking)]).astype(np.int32)

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

    def serve(self, tokens, answer=()):
        """One sequence from its beginning to its end; returns the tokens found. Of an answer, all is computed."""
        seq = self.begin(tokens)
        while seq.ticket is not None:
            self.poll([seq])
        found = seq.done
        self.compute(seq, len(tokens))
        if len(answer):
            self.extend(seq, answer)
            self.compute(seq, len(seq.tokens))
        self.leave(seq)
        for _ in range(20):
            self.poll([])
        self.check()
        return found
