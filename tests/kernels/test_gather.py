"""Blocks arrive whole where they should, byte by byte, and nothing else changes: kernel and twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.attention.kernels import BlockRange, copy_blocks, gather, gather_blocks, scatter_blocks
from kvtier.attention.kernels.gather import copy_blocks_numpy
from kvtier.cpu_offload.engines.cuda.host_memory import Registration
from kvtier.errors import ConfigError, TransferError

from .memory import DEVICE, GUARD

BYTES = [16, 48, 16 * 1023, 16 * 1024, 16 * 1025, 16 * 2049]
"""One vector, an odd number of them, and around one and two tiles of the kernel."""


def kernel(dst: np.ndarray, src: np.ndarray, block_bytes: int) -> None:
    pytest.importorskip("triton", reason="make test installs it")
    from kvtier.attention.kernels.triton_gather import launch

    launch(torch.from_numpy(dst).to(DEVICE), torch.from_numpy(src).to(DEVICE), block_bytes)


def twin(dst: np.ndarray, src: np.ndarray, block_bytes: int) -> None:
    if DEVICE != "cpu":
        pytest.skip("the twin copies what the CPU can address")
    copy_blocks_numpy(dst, src, block_bytes)


@pytest.fixture(params=[kernel, twin])
def copy(request: pytest.FixtureRequest) -> Callable[..., None]:
    return request.param


class Memory:
    """``blocks`` blocks of random bytes with guard bytes around; the first lies at a multiple of 16."""

    def __init__(self, blocks: int, block_bytes: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = blocks * block_bytes + 2 * GUARD + 16
        self._all = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).to(DEVICE)
        self.first = GUARD - (self._all.data_ptr() + GUARD) % 16 + 16
        self.base = self._all.data_ptr() + self.first
        self.pool = BlockRange(self.base, blocks, block_bytes)

    def bytes(self) -> np.ndarray:
        return self._all.cpu().numpy().copy()


@pytest.mark.parametrize("block_bytes", BYTES)
def test_blocks_are_copied_and_nothing_beside_them(copy: Callable[..., None], block_bytes: int) -> None:
    rng = np.random.default_rng(block_bytes)
    source, target = Memory(9, block_bytes, 1), Memory(7, block_bytes, 2)
    ids, places = rng.permutation(np.arange(1, 9))[:5], rng.permutation(np.arange(1, 7))[:5]
    from_, expected = source.bytes(), target.bytes()
    for i, j in zip(ids, places, strict=True):
        a, b = source.first + i * block_bytes, target.first + j * block_bytes
        expected[b : b + block_bytes] = from_[a : a + block_bytes]
    copy(target.pool.addresses(places), source.pool.addresses(ids), block_bytes)
    assert np.array_equal(target.bytes(), expected)
    assert np.array_equal(source.bytes(), from_)


def test_no_blocks_are_no_copy(copy: Callable[..., None]) -> None:
    copy(np.empty(0, np.int64), np.empty(0, np.int64), 16)


@pytest.mark.parametrize("block_bytes", [16, 4112])
def test_gathered_blocks_lie_side_by_side_and_scatter_back(block_bytes: int) -> None:
    pool, packed, other = Memory(9, block_bytes, 1), Memory(4, block_bytes, 2), Memory(9, block_bytes, 3)
    ids = [7, 1, 8, 4]
    gather_blocks(pool.pool, ids, packed.base, DEVICE)
    scatter_blocks(other.pool, ids, packed.base, DEVICE)
    expected = Memory(9, block_bytes, 3).bytes()
    for n, i in enumerate(ids):
        block = pool.bytes()[pool.first + i * block_bytes :][:block_bytes]
        assert np.array_equal(packed.bytes()[packed.first + n * block_bytes :][:block_bytes], block)
        expected[other.first + i * block_bytes :][:block_bytes] = block
    assert np.array_equal(other.bytes(), expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="gpu/test_kernels.py runs it there")
@pytest.mark.parametrize("copy_them", [kernel, twin])
@pytest.mark.parametrize("block_bytes", [16, 48, 4096, 16 * 1025])
def test_what_a_gpu_will_be_asked_is_right_itself(
    copy_them: Callable[..., None], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/gpu/test_kernels.py` on this machine's memory, by the kernel in Triton's interpreter and by its twin."""
    from gpu.test_kernels import there_and_back

    copies = list[int]()

    def copy(dst: np.ndarray, src: np.ndarray, size: int, device: str) -> None:
        copies.append(len(dst))
        copy_them(dst, src, size)

    monkeypatch.setattr(gather, "copy_blocks", copy)
    there_and_back(block_bytes, "cpu", Registration(lambda *_: None, lambda _: None), blocks=9)
    assert copies == [4, 4]


@pytest.mark.parametrize("ids", [[0], [9], [-1], [3, 2**40]])
def test_ids_outside_the_pool_are_refused_before_a_byte_moves(ids: list[int]) -> None:
    pool, packed = Memory(9, 32, 1), Memory(4, 32, 2)
    before = pool.bytes(), packed.bytes()
    for verb in (gather_blocks, scatter_blocks):
        with pytest.raises(TransferError, match="outside its pool"):
            verb(pool.pool, ids, packed.base, DEVICE)
    assert all(np.array_equal(a, b.bytes()) for a, b in zip(before, (pool, packed), strict=True))


def test_two_writes_to_one_block_are_refused() -> None:
    pool, packed = Memory(9, 32, 1), Memory(4, 32, 2)
    with pytest.raises(TransferError, match="twice"):
        scatter_blocks(pool.pool, [3, 4, 3], packed.base, DEVICE)


@pytest.mark.parametrize("block_bytes", [0, 8, 24, -16])
def test_sizes_that_are_no_multiples_of_16_are_refused(block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        BlockRange(0, 4, block_bytes)
    with pytest.raises(TransferError, match="multiples of 16"):
        copy_blocks(np.zeros(1, np.int64), np.zeros(1, np.int64), block_bytes, DEVICE)


def test_addresses_that_are_no_multiples_of_16_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        BlockRange(8, 4, 16)
    packed = Memory(2, 16, 1)
    odd, even = np.array([packed.base + 8]), np.array([packed.base])
    for dst, src in ((odd, even), (even, odd)):
        with pytest.raises(TransferError, match="multiples of 16"):
            copy_blocks(dst, src, 16, DEVICE)


def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.attention.kernels import checksum_blocks, choice

    monkeypatch.setattr(choice, "has_triton", lambda: False)
    calls: list[Callable[[], Any]] = [
        lambda: copy_blocks(np.zeros(1, np.int64), np.zeros(1, np.int64), 16, "cuda:0"),
        lambda: checksum_blocks(np.zeros(1, np.int64), 16, "cuda:0"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="pip install triton"):
            call()
