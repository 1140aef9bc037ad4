"""Integer arrays between pinned memory and a GPU."""

from __future__ import annotations

import pytest
import torch

from kvtier.attention.kernels import words

pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
SIZES = [1, 5, 1024, 1025, 5000]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_kernel_copies_every_word_and_no_other(count: int, dtype: torch.dtype) -> None:
    from kvtier.attention.kernels.triton_words import launch

    source = torch.arange(count + 7, dtype=dtype)
    target = torch.full((count + 7,), -1, dtype=dtype)
    launch(target[3 : 3 + count], source[4 : 4 + count])
    assert target[3 : 3 + count].tolist() == source[4 : 4 + count].tolist()
    assert set(target[:3].tolist() + target[3 + count :].tolist()) == {-1}


def test_on_a_cpu_they_are_copied() -> None:
    staged = words.staged(4, torch.int64, torch.device("cpu")).zero_()
    target = torch.ones(4, dtype=torch.int64)
    assert words.send(staged, target) is target
    assert (
        target.tolist() == words.sent(staged, torch.device("cpu")).tolist() == words.fetched(staged).tolist() == [0] * 4
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_on_a_gpu_they_come_whole_while_their_memory_is_used_again(dtype: torch.dtype) -> None:
    """The host writes the next array while the device is behind: torch must not give it the same pinned memory."""
    device, came = torch.device("cuda:0"), []
    assert words.addresses_pinned(device)
    for i in range(300):
        count = SIZES[i % len(SIZES)] * (1 + i % 3)
        if i % 10 == 0:
            torch.cuda._sleep(2_000_000)
        staged = words.staged(count, dtype, device)
        staged.numpy()[:] = i
        came.append(words.sent(staged, device))
        del staged
    for i, one in enumerate(came):
        there = words.fetched(one)
        assert there.device.type == "cpu"
        assert len(there) == SIZES[i % len(SIZES)] * (1 + i % 3)
        assert bool((there == i).all())
