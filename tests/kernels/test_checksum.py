"""One checksum on host and device, and what it sees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier.attention.kernels import checksum_blocks
from kvtier.attention.kernels.checksum import GOLDEN, MIX, checksum_blocks_numpy
from kvtier.cpu_offload.engines._blocks import checksum_blocks as checksum_blocks_on_host
from kvtier.machine.errors import TransferError

from .memory import DEVICE

BYTES = [16, 48, 8192 - 16, 8192, 8192 + 16, 65536 - 16, 65536, 65536 + 16, 2 * 65536 + 4112]
"""Around a tile and around a program's share of the kernel."""


def by_definition(words: np.ndarray) -> int:
    """ADR 0014, word by word, in Python's integers."""
    full, total = 2**64 - 1, 0
    for i, word in enumerate(words.tolist()):
        x = word ^ (i + 1) * GOLDEN & full
        for _ in range(2):
            x = (x ^ x >> 32) * MIX & full
        total += x ^ x >> 32
    return total & full


def host(words: np.ndarray) -> np.ndarray:
    """The checksum of the CPU's copy engines: uint64 [n] of uint64 [n, words]."""
    words = np.ascontiguousarray(np.atleast_2d(words))
    size, out = words.shape[1] * 8, np.empty(len(words), np.uint64)
    at = np.arange(len(words), dtype=np.int64) * size
    checksum_blocks_on_host(words.reshape(-1), at, np.full(len(words), size, np.int64), out)
    return out


def kernel(addresses: np.ndarray, block_bytes: int) -> np.ndarray:
    pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
    from kvtier.attention.kernels.triton_checksum import launch

    return launch(torch.from_numpy(addresses).to(DEVICE), block_bytes).cpu().numpy().view(np.uint64)


def twin(addresses: np.ndarray, block_bytes: int) -> np.ndarray:
    if DEVICE != "cpu":
        pytest.skip("the twin reads what the CPU can address: run it without a GPU")
    return checksum_blocks_numpy(addresses, block_bytes)


def public(addresses: np.ndarray, block_bytes: int) -> np.ndarray:
    return checksum_blocks(addresses, block_bytes, DEVICE).cpu().numpy().view(np.uint64)


@pytest.mark.parametrize("sums", [kernel, twin, public])
@pytest.mark.parametrize("block_bytes", BYTES)
def test_host_and_device_agree(sums: Callable[..., np.ndarray], block_bytes: int) -> None:
    words = np.random.default_rng(block_bytes).integers(0, 2**64, (5, block_bytes // 8), np.uint64)
    words[1], words[2, -1] = 0, 2**64 - 1
    memory = torch.from_numpy(words.view(np.int64)).to(DEVICE)
    order = np.array([3, 0, 1, 2, 2])
    found = sums(memory.data_ptr() + order * block_bytes, block_bytes)
    assert found.tolist() == host(words)[order].tolist()
    assert int(found[0]) == by_definition(words[3])


def test_no_blocks_have_no_checksums() -> None:
    assert len(kernel(np.empty(0, np.int64), 16)) == 0


def test_addresses_and_sizes_that_are_no_multiples_of_16_are_refused() -> None:
    for address, size in ((8, 16), (16, 8), (16, 0)):
        with pytest.raises(TransferError, match="multiples of 16"):
            checksum_blocks(np.array([address]), size, DEVICE)


# --- what it sees ---------------------------------------------------------------------------------------------------

N = 64
RAMP = np.arange(N, dtype=np.uint64)
CONTENTS = {
    "zeros": np.zeros(N, np.uint64),
    "ones": np.full(N, 2**64 - 1, np.uint64),
    "one value": np.full(N, 0x3C003C003C003C00, np.uint64),
    "two words in turn": np.tile(np.array([0x3F803F803F803F80, 0xBF80BF80BF80BF80], np.uint64), N // 2),
    "top bits": RAMP << np.uint64(63),
    "high halves": RAMP << np.uint64(32),
    "low halves": RAMP,
    "golden ramp": (RAMP + np.uint64(1)) * np.uint64(GOLDEN),  # every word is hidden by its own key
    "random": np.random.default_rng(0).integers(0, 2**64, N, np.uint64),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_every_flipped_bit_changes_it(content: str) -> None:
    words = CONTENTS[content]
    flipped = np.repeat(words[None], 64 * N, 0)
    place = np.arange(64 * N)
    flipped[place, place // 64] ^= np.uint64(1) << (place % 64).astype(np.uint64)
    sums = host(np.concatenate([words[None], flipped]))
    assert not np.any(sums[1:] == sums[0])
    if content != "golden ramp":  # there all words look alike behind their keys
        assert len(np.unique(sums)) == 64 * N + 1


@pytest.mark.parametrize("content", CONTENTS)
def test_every_swap_of_two_words_changes_it(content: str) -> None:
    words = CONTENTS[content]
    changed = []
    for i in range(N):
        for j in range(i):
            if words[i] != words[j]:
                other = words.copy()
                other[[i, j]] = other[[j, i]]
                changed.append(other)
    if not changed:
        assert content in ("zeros", "ones", "one value")
        return
    sums = host(np.concatenate([words[None], np.array(changed)]))
    assert not np.any(sums[1:] == sums[0])


@pytest.mark.parametrize("content", CONTENTS)
def test_every_shift_and_rotation_changes_it(content: str) -> None:
    """By bytes: a copy that starts or ends elsewhere."""
    raw = CONTENTS[content].view(np.uint8)
    moved = [np.roll(raw, n) for n in range(1, len(raw))]
    moved += [np.concatenate([np.zeros(n, np.uint8), raw[:-n]]) for n in range(1, len(raw))]
    moved += [np.concatenate([raw[n:], np.zeros(n, np.uint8)]) for n in range(1, len(raw))]
    different = [m for m in moved if not np.array_equal(m, raw)]
    assert different or content in ("zeros",)
    sums = host(np.array([raw, *different]).view(np.uint64))
    assert not np.any(sums[1:] == sums[0])


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("fill", [0, 0xFF])
def test_every_tail_and_head_that_was_not_written_changes_it(content: str, fill: int) -> None:
    raw = CONTENTS[content].view(np.uint8)
    torn = []
    for n in range(1, len(raw) + 1):
        for part in (slice(-n, None), slice(0, n)):
            other = raw.copy()
            other[part] = fill
            torn.append(other)
    different = [t for t in torn if not np.array_equal(t, raw)]
    sums = host(np.array([raw, *different]).view(np.uint64))
    assert not np.any(sums[1:] == sums[0])


def test_contents_and_lengths_differ() -> None:
    contents = [words for name, words in CONTENTS.items() if name != "golden ramp"]
    sums = [int(host(words[:n])[0]) for words in contents for n in range(1, N + 1)]
    texts = {words[:n].tobytes() for words in contents for n in range(1, N + 1)}
    assert len(set(sums)) == len(texts)


def test_moving_a_block_of_words_within_it_changes_it() -> None:
    """Two rows of 16 words change places, in content that differs only there."""
    for words in CONTENTS.values():
        other = words.reshape(4, 16)[[2, 1, 0, 3]].reshape(-1)
        if not np.array_equal(other, words):
            assert host(other)[0] != host(words)[0]
