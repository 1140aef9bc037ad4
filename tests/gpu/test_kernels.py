"""Blocks that a kernel gathers into pinned host memory and scatters back, by the addresses that the driver gave."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier.attention.kernels import BlockRange, gather_blocks, scatter_blocks
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration
from kvtier.cpu_offload.engines.cuda.link import CudaLink

BYTES = [16, 48, 4096, 16 * 1025, 393_216]
GUARD, UNTOUCHED = 64, 0xA5


def there_and_back(block_bytes: int, device: str, registration: Registration, blocks: int = 40) -> None:
    """Byte for byte, and nothing else touched: on the host, beside it, or in the other pool."""
    torch.manual_seed(block_bytes)
    source = torch.randint(0, 256, (blocks, block_bytes), dtype=torch.uint8, device=device)
    target = torch.full_like(source, UNTOUCHED)
    out, back = (np.random.default_rng(seed).permutation(np.arange(1, blocks))[: blocks // 2] for seed in (1, 2))
    host = HostMemory(len(out) * block_bytes + 2 * GUARD, registration)
    try:
        host.array[:] = UNTOUCHED
        pools = [BlockRange(pool.data_ptr(), blocks, block_bytes) for pool in (source, target)]
        gather_blocks(pools[0], out, host.address + GUARD, device)
        if device != "cpu":
            torch.cuda.synchronize()
        packed = source.cpu()[out].numpy()
        assert np.array_equal(host.array[GUARD:-GUARD], packed.reshape(-1))
        assert set(host.array[:GUARD].tolist()) | set(host.array[-GUARD:].tolist()) == {UNTOUCHED}
        scatter_blocks(pools[1], back, host.address + GUARD, device)
        expected = np.full((blocks, block_bytes), UNTOUCHED, np.uint8)
        expected[back] = packed
        assert np.array_equal(target.cpu().numpy(), expected)
    finally:
        host.release()


@pytest.mark.parametrize("block_bytes", BYTES)
def test_blocks_reach_pinned_memory_and_come_back(block_bytes):
    api = CudaLink(0)._api
    api.bind_thread()
    there_and_back(block_bytes, "cuda:0", Registration(api.host_register, api.host_unregister))


def test_copies_come_after_what_the_current_stream_was_given_before():
    """A stream of its own that is busy before the source is written."""
    pool, packed = torch.zeros(8, 4096, dtype=torch.uint8, device="cuda"), torch.zeros(4, 4096, dtype=torch.uint8)
    packed = packed.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        pool.copy_(torch.arange(8, dtype=torch.uint8, device="cuda")[:, None].expand(8, 4096))
        gather_blocks(BlockRange(pool.data_ptr(), 8, 4096), [7, 1, 4, 2], packed.data_ptr(), "cuda:0")
    torch.cuda.synchronize()
    assert packed.cpu()[:, 0].tolist() == [7, 1, 4, 2]
    assert (packed == packed[:, :1]).all()
