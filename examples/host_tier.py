"""The host tier alone, in forty lines: ``python examples/host_tier.py``. ``own_memory.py`` is a whole engine."""

import numpy as np

from kvtier import Fragment, FullAttention, HostTier, OutsideGroup, SlidingWindow

BLOCKS, ROW = 32, 1024  # blocks of the device, bytes of a block in a layer
memory = np.zeros(2 * BLOCKS * ROW, np.uint8)  # two layers, one after the other; both groups use both, as vLLM's do
layers = Fragment(0, ROW, ROW), Fragment(BLOCKS * ROW, ROW, ROW)
groups = [
    OutsideGroup("full", FullAttention(), 16, BLOCKS, layers),
    OutsideGroup("window", SlidingWindow(32), 16, BLOCKS, layers),
]
keys = np.random.default_rng(0).integers(0, 2**63, (4, 2), np.uint64)  # your names of a prompt's four blocks
tables = [np.arange(0, 4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)]  # where its blocks lie, by group


def rest(tier: HostTier) -> None:
    while tier.has_work:
        tier.wait(1.0)
        tier.poll()


with HostTier(groups, memory, "1MiB") as tier:
    memory[: 8 * ROW] = 7  # "attention" has written K and V of 64 tokens
    with tier.text(keys) as text:
        text.computed(tables, 64, is_end=True)  # plans the stores; the blocks are free at once
        tier.poll()
    rest(tier)

    with tier.text(keys) as text:  # later: the same prompt, and the device has nothing of it
        hit = text.match(0, 65)
        targets = np.arange(16, 16 + len(hit.at), dtype=np.int32)  # a block for each of hit.groups, hit.at
        ticket = text.load(targets)  # waits for stores that still read these blocks, and then writes them
        while ticket not in tier.poll().loaded:
            tier.wait(1.0)
    assert (memory[16 * ROW : (16 + len(targets)) * ROW] == 7).all()
    print(f"{hit.num_tokens} tokens came back, in {len(targets)} blocks of two groups, each checked")
