"""``HostTier`` over memory that another engine has laid out on a GPU: its groups share it, one fragment a layer."""

from __future__ import annotations

from collections.abc import Iterator

import inside
import numpy as np
import pytest
import torch

from kvtier import ConfigError, Fragment, FullAttention, HostTier, OutsideGroup, SlidingWindow
from kvtier.cpu_offload.engines.streams import StreamsEngine

BLOCK, BLOCKS, LAYERS, ROW = 16, 160, 3, 8 << 10
"""Tokens of a block, blocks of all groups together, layers of a group, bytes of a block in one layer."""
KINDS = {"full": FullAttention(), "window": SlidingWindow(64)}
SPIN = 2_000_000
"""Cycles, about 1 ms: longer than the host takes between a store and the next writer of its block."""


class Engine:
    """One sequence at a time; the host never waits for what it has enqueued, except for loads."""

    def __init__(self, spin: int = SPIN, device: str = "cuda:0", **options) -> None:
        self.memory = torch.randint(0, 256, (LAYERS * BLOCKS * ROW,), dtype=torch.uint8, device=device)
        self.words = self.memory.view(torch.int64).view(LAYERS, BLOCKS, ROW // 8)
        before = self.memory.clone()
        fragments = tuple(Fragment(layer * BLOCKS * ROW, ROW, ROW) for layer in range(LAYERS))
        groups = [OutsideGroup(name, kind, BLOCK, BLOCKS, fragments) for name, kind in KINDS.items()]
        self.tier = HostTier(groups, self.memory, "10MiB", **options)
        assert torch.equal(self.memory, before), "the engine's memory has lost its content"
        self.free = list(range(1, BLOCKS))
        self.mismatches = torch.zeros((), dtype=torch.int64, device=device)
        self.spin, self.loaded_tokens, self.failed = spin, 0, list[str]()

    def serve(self, tokens: list[int]) -> None:
        """Computes the tokens that the host tier does not bring, and compares what it brings, on the device."""
        keys = chain(tokens)
        text = self.tier.text(keys)
        tables = [np.array([self.free.pop(0) for _ in keys], np.int32) for _ in KINDS]
        hit = text.match(0, len(tokens))
        found = hit.num_tokens if self._load(text, hit, tables) else 0
        self.loaded_tokens += found
        if found:
            for g, j in zip(hit.groups.tolist(), hit.at.tolist(), strict=True):
                self.mismatches += (self.words[:, tables[g][j]] != self._content(keys[j], g)).sum()
        first = found // BLOCK
        groups = np.repeat(np.arange(len(KINDS), dtype=np.int32), len(keys) - first)
        self.tier.overwrite(groups, np.concatenate([table[first:] for table in tables]))
        if self.spin:
            torch.cuda._sleep(self.spin)
        for g, table in enumerate(tables):
            for j in range(first, len(keys)):
                self.words[:, table[j]] = self._content(keys[j], g)
        text.computed(tables, len(tokens), is_end=True)
        self.tier.poll()
        text.close()
        self.free += np.concatenate(tables).tolist()

    def _load(self, text, hit, tables) -> bool:
        if hit.num_tokens == 0 or hit.is_pending:
            return False
        ticket = text.load(np.array([tables[g][j] for g, j in zip(hit.groups, hit.at, strict=True)], np.int32))
        landed = released = False
        while not released:
            ended = self.tier.poll()
            landed |= ticket in ended.loaded
            released |= ticket in ended.released
            self.failed += list(ended.failed.values())
            if not released:
                self.tier.wait(1.0)
        return landed

    def settle(self) -> None:
        while self.tier.has_work:
            self.tier.wait(1.0)
            self.tier.poll()

    def _content(self, key: np.ndarray, group: int) -> torch.Tensor:
        first, count = int(key[0]) >> 2, LAYERS * ROW // 8
        words = torch.arange(first, first + count, device=self.memory.device)
        return words.view(LAYERS, -1) * (2 * group + 3)


def chain(tokens: list[int]) -> np.ndarray:
    """Keys, uint64 [n, 2]."""
    name, keys = 1, []
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        name = hash((name, *tokens[first : first + BLOCK])) & (2**63 - 1)
        keys.append((name, name ^ 0x5555))
    return np.array(keys, np.uint64).reshape(-1, 2)


@pytest.fixture
def make_engine() -> Iterator:
    made: list[Engine] = []

    def make(**options) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.settle()
        assert engine.tier.audit() == []
        engine.tier.close()
    made.clear()
    torch.cuda.empty_cache()


def talk(engine: Engine, turns: int = 60) -> None:
    """Four documents that grow in turns, over a device that holds one of them and a host tier that holds some."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, 200).tolist() for _ in range(4)]
    for turn in range(turns):
        document = documents[turn % 4]
        engine.serve(document)
        if turn % 3 == 0:
            engine.settle()
        document += rng.integers(0, 1000, 100).tolist()
        if len(document) > 1200:
            documents[turn % 4] = rng.integers(0, 1000, 200).tolist()


@pytest.mark.parametrize("verify", ["full", "off"])
def test_what_comes_back_is_what_was_computed(make_engine, verify):
    engine = make_engine(verify=verify)
    talk(engine)
    assert int(engine.mismatches) == 0
    assert engine.failed == []
    assert engine.loaded_tokens > 4000
    assert engine.tier.stats().transfers.failed_stores == 0


def test_a_block_that_is_overwritten_under_its_store_would_be_noticed(make_engine, monkeypatch):
    """The control of the test above: nobody waits for stores, and their stream is behind.

    Texts are computed only, until all of them are stored: a load waits for stores in an order of its own.
    """
    from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime

    copy = CudaRuntime.copy

    def late(self, stream, memory, transfer):
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, torch.device("cuda:0"))):
            torch.cuda._sleep(20 * SPIN)
        return copy(self, stream, memory, transfer)

    monkeypatch.setattr(CudaRuntime, "copy", late)
    monkeypatch.setattr(StreamsEngine, "order_after", lambda *_: True)
    engine = make_engine(verify="off", spin=0)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, 640).tolist() for _ in range(4)]  # two fill the device
    for document in documents:
        engine.serve(document)
    engine.settle()
    for document in documents:
        engine.serve(document)
    assert engine.loaded_tokens > 0
    assert int(engine.mismatches) > 0


def test_a_changed_bit_is_a_failed_load_and_the_text_is_computed(make_engine):
    engine = make_engine()
    document = np.random.default_rng(1).integers(0, 1000, 640).tolist()
    engine.serve(document)
    engine.settle()
    host = inside.host_bytes(engine.tier)
    host[:] ^= 1
    engine.serve(document)
    assert engine.loaded_tokens == 0
    assert engine.failed == ["checksum mismatch in 43 of 43 blocks"]
    engine.settle()
    engine.serve(document)
    assert engine.loaded_tokens > 0, "computed again, stored again"
    assert int(engine.mismatches) == 0


def test_fragments_that_no_kernel_can_read_are_refused():
    memory = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda:0")
    group = OutsideGroup("full", FullAttention(), BLOCK, 8, (Fragment(8, 1024, 1024),))
    with pytest.raises(ConfigError, match="multiples of 16 bytes"):
        HostTier([group], memory, "1MiB")
