"""vllm#42085 with its own model on two ranks, which an engine with device memory of its own has: ``HostTier``'s halves.

One half is with the engine's scheduler, one with each rank. Keys without V do not split by heads: each rank has all of
them, and a host memory of its own. A rank says when its copies end; the second one is three steps behind.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from kvtier import CacheSpec, Fragment, HostPlan, HostTierScheduler, HostTierWorker, OutsideGroup
from kvtier.host_tier.orders import End, Report
from kvtier.testing import Faults, SimulatedEngine

FLASH = {"compress_ratios": [0, 0, *[4, 128] * 20, 4], "dtype": "bfloat16"}
SMALL = {
    "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
    "head_dim": 8,
    "index_head_dim": 4,
    "dtype": "bfloat16",
}
TEXTS = 3
"""That the entries' and index keys' blocks are enough for; windows and rows have one step's."""
LAGS = 1, 4
"""Steps after which a rank says that a copy has ended."""


class Played:
    """A rank that only says when copies end."""

    def __init__(self, lag: int) -> None:
        self.lag, self.left = lag, dict[int, int]()

    def step(self, orders: Any) -> Report:
        report = Report()
        self.left |= {copy.ticket: self.lag + 1 for copy in orders.copies}
        self.left = {ticket: left - 1 for ticket, left in self.left.items()}
        for ticket in [ticket for ticket, left in self.left.items() if not left]:
            del self.left[ticket]
            report.add(ticket, End())
        return report


class Rank:
    """One with memory."""

    def __init__(self, plan: HostPlan, lag: int) -> None:
        self.memory = np.zeros(plan.memory_bytes, np.uint8)
        make = lambda memory: SimulatedEngine(memory, lag, Faults(max_delay_s=float(lag)))  # noqa: E731
        self.half = HostTierWorker(plan, self.memory, 1000.0, make)

    def step(self, orders: Any) -> Report:
        self.half.begin(orders)
        self.half.load(orders)
        return self.half.poll().report


class TwoRanks:
    """An engine that serves texts of ``tokens`` tokens one after the other."""

    def __init__(self, config: dict[str, Any], tokens: int, chunk: int, host_bytes: int, has_bytes: bool) -> None:
        spec = CacheSpec.from_config(AutoConfig.for_model("deepseek_v4", **config))
        self.tokens, self.chunk, offset = tokens, chunk, 0
        self.groups = []
        for g in spec.groups:
            span = g.attention.span_tokens
            num_blocks = (chunk + 2 * span) // g.block_tokens + 2 if span else TEXTS * tokens // g.block_tokens
            fragment = Fragment(offset, g.block_bytes, g.block_bytes)
            self.groups.append(OutsideGroup(g.name, g.attention, g.block_tokens, num_blocks, (fragment,)))
            offset += g.block_bytes * num_blocks
        self.memory_bytes = offset
        plan = HostPlan(self.groups, offset, host_bytes)
        self.tier = HostTierScheduler(plan, 1e6, len(LAGS))
        self.ranks: list[Any] = [Rank(plan, lag) if has_bytes else Played(lag) for lag in LAGS]
        self.free = [list(range(group.num_blocks)) for group in self.groups]
        self.stores = dict[int, set[tuple[int, int]]]()  # under way, with the blocks that they read
        self.passed, self.told = set[int](), Counter[int]()
        self.checked = self.ordered = 0

    def step(self, written: set[tuple[int, int]] = frozenset()) -> Any:  # type: ignore[assignment]
        """What both ranks do before they write these blocks; tells which loads have ended."""
        orders = self.tier.take_orders()
        for copy in orders.copies:
            named = set(zip(copy.groups.tolist(), copy.device.tolist(), strict=True))
            assert len(named) == len(copy.groups), "a block was named twice"
            if not copy.is_load:
                self.stores[copy.ticket] = named
        reading = {ticket for ticket, read in self.stores.items() if read & written}
        self.passed |= {*orders.after}  # of all that is written from now on
        assert reading <= self.passed, "a rank may write what a store still reads"
        self.ordered += len(reading)
        whole, sent = Report(), pickle.dumps(orders)
        for rank in self.ranks:
            whole.merge(pickle.loads(pickle.dumps(rank.step(pickle.loads(sent)))))
        self.tier.report(whole)
        for ticket, (ranks, _) in whole.ends.items():
            self.told[ticket] += ranks
            if self.told[ticket] == len(LAGS):
                self.stores.pop(ticket, None)
        return self.tier.poll()

    def serve(self, keys: Any) -> tuple[int, int]:
        """Tokens that were found, and steps that computed."""
        text, tables = self.tier.text(keys), [dict[int, int]() for _ in self.groups]
        hit, steps = text.match(0, self.tokens), 0
        if hit.num_tokens:
            for g, at in zip(hit.groups.tolist(), hit.at.tolist(), strict=True):
                tables[g][at] = self.free[g].pop(0)
            places = [(g, tables[g][at]) for g, at in zip(hit.groups.tolist(), hit.at.tolist(), strict=True)]
            ticket, ended = text.load(np.array([block for _, block in places], np.int32)), self.step({*places})
            while ticket not in ended.loaded:
                assert ticket not in ended.failed
                ended = self.step()
            self.check(hit, tables, keys)
        for start in range(hit.end, self.tokens, self.chunk):
            self.compute(text, tables, keys, start, min(start + self.chunk, self.tokens))
            steps += 1
        text.close()
        for g, table in enumerate(tables):
            self.free[g] += table.values()
        assert self.tier.audit() == []
        return hit.num_tokens, steps

    def compute(self, text: Any, tables: list[dict[int, int]], keys: Any, start: int, end: int) -> None:
        """A step: blocks that leave a window are others' at once."""
        new = []
        for g, group in enumerate(self.groups):
            bt = group.block_tokens
            for at in range(start // bt, -(-end // bt)):
                if at not in tables[g]:
                    tables[g][at] = self.free[g].pop(0)
                    new.append((g, tables[g][at], at))
        groups, blocks, places = np.array(new, np.int64).T
        self.tier.overwrite(groups.astype(np.int32), blocks.astype(np.int32))
        self.step({*zip(groups.tolist(), blocks.tolist(), strict=True)})
        for g, block, at in zip(groups.tolist(), blocks.tolist(), places.tolist(), strict=True):
            for memory, content in self.contents(g, block, at, keys):
                memory[:] = content
        text.computed_by(
            lambda g, at: np.array([tables[g].get(j, -1) for j in at.tolist()], np.int32), end, end == self.tokens
        )
        for g, group in enumerate(self.groups):
            for at in [at for at in tables[g] if (at + 1) * group.block_tokens <= group.attention.first_visible(end)]:
                self.free[g].append(tables[g].pop(at))

    def contents(self, g: int, block: int, at: int, keys: Any) -> Iterator[tuple[Any, Any]]:
        """By rank that has bytes: those of a block, and what is to be there. It is the same in each."""
        offset, stride, num_bytes = self.groups[g].fragments[0]
        last = (at + 1) * self.groups[g].block_tokens // self.tier.hash_tokens - 1
        for rank in self.ranks:
            if isinstance(rank, Rank) and last < len(keys):
                seed = [g, *keys[last].tolist()]
                yield (
                    rank.memory[offset + block * stride :][:num_bytes],
                    np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8),
                )

    def check(self, hit: Any, tables: list[dict[int, int]], keys: Any) -> None:
        """Each rank has what was loaded, byte for byte."""
        for g, at in zip(hit.groups.tolist(), hit.at.tolist(), strict=True):
            for memory, content in self.contents(g, tables[g][at], at, keys):
                assert np.array_equal(memory, content)
                self.checked += 1


def keys_of(engine: TwoRanks, seed: int) -> Any:
    return np.random.default_rng(seed).integers(1, 2**63, (engine.tokens // engine.tier.hash_tokens, 2), np.uint64)


@pytest.mark.parametrize(
    ("config", "tokens", "chunk", "has_bytes"),
    [(FLASH, 90_112, 16_384, False), (SMALL, 2048, 512, True)],
    ids=["full size, books", "small, bytes"],
)
def test_a1_vllm_42085_on_two_ranks(config: Any, tokens: int, chunk: int, has_bytes: bool) -> None:
    engine = TwoRanks(config, tokens, chunk, 16 << 30 if not has_bytes else 4 << 20, has_bytes)
    if not has_bytes:
        assert engine.memory_bytes < 7.13 * 2**30
    first, second = keys_of(engine, 0), keys_of(engine, 1)
    for keys in (first, second):
        assert engine.serve(keys) == (0, -(-tokens // chunk))
    assert engine.ordered > 0, "stores were to be under way while their blocks were written again"
    for _ in range(20):
        engine.step()
    for keys in (first, second):
        assert engine.serve(keys) == (tokens - engine.tier.hit_tokens, 1)
    assert (engine.checked > 0) == has_bytes
    assert all(len(free) == group.num_blocks for free, group in zip(engine.free, engine.groups, strict=True))
