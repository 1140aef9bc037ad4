"""An engine that owns its device memory, with kvtier's host tier behind it: ``python examples/own_memory.py``.

The engine below has its own memory, block ids, free lists and keys. What it computes follows from the tokens alone, so
that it can check what a load has brought.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvtier import Fragment, FullAttention, HostTier, OutsideGroup, SlidingWindow

BLOCK, BLOCKS, ROW = 16, 96, 256  # tokens of a block, blocks of a group, bytes of a block in one layer
LAYERS = {"full": [0, 3], "sliding": [1, 2, 4]}


class Engine:
    """One sequence at a time; layers lie one after the other, each with the blocks of its group."""

    def __init__(self, host_memory: str = "8MiB", **options: object) -> None:
        self.memory = np.zeros(5 * BLOCKS * ROW, np.uint8)
        kinds = {"full": FullAttention(), "sliding": SlidingWindow(64)}
        groups = [
            OutsideGroup(name, kinds[name], BLOCK, BLOCKS, tuple(Fragment(n * BLOCKS * ROW, ROW, ROW) for n in layers))
            for name, layers in LAYERS.items()
        ]
        self.tier = HostTier(groups, self.memory, host_memory, **options)
        self.free = [list(range(BLOCKS)) for _ in groups]

    def serve(self, tokens: list[int]) -> int:
        """Computes all tokens that the host tier cannot bring; returns how many it has brought."""
        keys = chain(tokens)
        text = self.tier.text(keys)
        tables = [np.array([self.free[g].pop() for _ in keys], np.int32) for g in range(2)]
        hit = text.match(0, len(tokens))
        found = hit.num_tokens if self.load(text, hit, tables) else 0
        for g, layers in enumerate(LAYERS.values()):
            first = found // BLOCK
            self.tier.overwrite(np.full(len(keys) - first, g, np.int32), tables[g][first:])
            for j in range(first, len(keys)):
                for layer in layers:
                    self.row(layer, tables[g][j])[:] = content(keys[j], layer)
        for k, (g, j) in enumerate(zip(hit.groups, hit.at, strict=True) if found else ()):
            for layer in list(LAYERS.values())[g]:
                right = np.array_equal(self.row(layer, tables[g][j]), content(keys[j], layer))
                assert right, f"block {k} of the hit has other content than the tokens say"
        text.computed(tables, len(tokens), is_end=True)
        self.tier.poll()  # submits the stores: the blocks go back to the free lists at once
        text.close()
        for g in range(2):
            self.free[g] += tables[g].tolist()
        return found

    def load(self, text, hit, tables) -> bool:
        """Whether the hit's blocks have their content now."""
        if hit.num_tokens == 0 or hit.is_pending:
            return False
        targets = [tables[g][j] for g, j in zip(hit.groups, hit.at, strict=True)]
        ticket, landed, released = text.load(np.array(targets, np.int32)), False, False
        while not released:
            ended = self.tier.poll()
            landed |= ticket in ended.loaded
            released |= ticket in ended.released
            if not released:
                self.tier.wait(1.0)
        return landed

    def row(self, layer: int, block: int) -> np.ndarray:
        """A block's bytes in one layer."""
        at = (layer * BLOCKS + int(block)) * ROW
        return self.memory[at : at + ROW]


def chain(tokens: list[int]) -> np.ndarray:
    """The engine's keys, uint64 [n, 2]: each full block's name covers all tokens up to its end."""
    name, keys = b"", []
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        name = hashlib.blake2b(name + repr(tokens[first : first + BLOCK]).encode(), digest_size=16).digest()
        keys.append(np.frombuffer(name, np.uint64))
    return np.array(keys, np.uint64).reshape(-1, 2)


def content(key: np.ndarray, layer: int) -> np.ndarray:
    """What "attention" writes for these tokens in one layer."""
    return np.random.default_rng([layer, *map(int, key)]).integers(0, 256, ROW, np.uint8)


def main() -> None:
    engine, rng = Engine(), np.random.default_rng(0)
    document = rng.integers(0, 1000, 800).tolist()
    for turn in range(4):
        found = engine.serve(document)
        while engine.tier.has_work:
            engine.tier.wait(1.0)
            engine.tier.poll()
        print(f"turn {turn}: {len(document)} tokens, {found} of them from the host tier")
        document += rng.integers(0, 1000, 100).tolist()
    assert engine.tier.audit() == []
    stats = engine.tier.stats().transfers
    print(f"{stats.stored_blocks} blocks stored, {stats.loaded_blocks} loaded, {stats.verified_blocks} verified")
    engine.tier.close()


if __name__ == "__main__":
    main()
