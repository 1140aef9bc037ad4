"""Devices that are not there, and GPUs without room: what is said. Only torch's answers are played."""

from __future__ import annotations

import pytest
import torch

from kvtier import ConfigError, DeviceUnavailable, FullAttention, KVCache, MemoryUnavailable
from kvtier.machine.device import (
    check_device_memory,
    forget_last_error,
    install_extra,
    resolve_device,
    short_of_memory,
    why_no_cuda,
)
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 4)})


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "said"),
    [
        (None, 12080, ("built without CUDA", "install a CUDA build")),
        ("12.8", None, ("no NVIDIA driver", "install one")),
        ("13.0", 12080, ("for CUDA 12.8", "too old", "built for CUDA 13.0", "update the driver")),
        ("12.8", 12080, ("finds no GPU", "CUDA_VISIBLE_DEVICES")),
        ("12.8", 13000, ("finds no GPU",)),
    ],
)
def test_why_there_is_no_cuda(torch_cuda, driver, said):
    text = why_no_cuda("cuda:7", torch_cuda, driver)
    assert all(part in text for part in ("'cuda:7' is not there", *said))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run it on a machine without one")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_on_a_machine_without_one_is_refused_before_anything_is_built(device):
    with pytest.raises(DeviceUnavailable, match="is not there"):
        KVCache(SPEC, device=device, device_bytes="1GiB", host_bytes="1GiB")


@pytest.mark.parametrize(("count", "there"), [(1, r"1 CUDA device \('cuda:0'\)"), (4, "'cuda:0' to 'cuda:3'")])
def test_a_gpu_beyond_those_that_there_are(monkeypatch, count, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert resolve_device("cuda") == "cuda:0"
    assert resolve_device(f"cuda:{count - 1}") == f"cuda:{count - 1}"
    with pytest.raises(DeviceUnavailable, match=there):
        resolve_device("cuda:7")


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "cuda:" + "9" * 5000, "tpu:0", 3, "cuda:0:0"]
)
def test_what_is_no_device_name(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if device == "cuda:":
        assert resolve_device(device) == "cuda:0"
        return
    with pytest.raises(ConfigError, match="device must be"):
        resolve_device(device)


@pytest.mark.parametrize(("asked", "fits"), [(30, True), (50, True), (51, False), (1000, False)])
def test_memory_that_others_have_taken_is_named(monkeypatch, asked, fits):
    """100 bytes: 40 free, 25 of torch in this process, of which 10 unused; 35 of others."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 25)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15)
    if fits:
        check_device_memory("cuda:0", asked, "device_bytes")
        return
    with pytest.raises(MemoryUnavailable) as caught:
        check_device_memory("cuda:0", asked, "device_bytes")
    text = str(caught.value)
    asked_for = f"device_bytes asks for {asked:,} bytes on cuda:0, which has 50 of 100 bytes free"
    for part in (asked_for, "15 in this process", "other processes and CUDA itself 35", "lower device_bytes"):
        assert part in text, (part, text)


def test_on_a_cpu_nobody_asks_a_gpu():
    check_device_memory("cpu", 1 << 60, "device_bytes")
    assert "lower device_blocks" in short_of_memory("cuda:1", 10, "device_blocks", 1, 20, 3)


@pytest.mark.parametrize("engine", ["threads", "simulated", "cuda"])
def test_an_engine_of_another_device_is_refused(monkeypatch, engine):
    """Engines for arenas that the CPU can address, on a GPU; the engine for a GPU, on a CPU."""
    blocks = {"full": 4}
    if engine != "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="copy_engine must be one of"):
        KVCache(
            SPEC,
            device="cpu" if engine == "cuda" else "cuda:0",
            device_blocks=blocks,
            host_blocks=blocks,
            copy_engine=engine,
        )


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        ("12.8", "pip install 'kvtier[gpu-cuda12]'"),
        ("13.1", "pip install 'kvtier[gpu-cuda13]'"),
        ("11.8", "pip install 'kvtier[gpu-cuda12]' or 'kvtier[gpu-cuda13]', whichever CUDA torch.version.cuda names"),
        (None, "pip install 'kvtier[gpu-cuda12]' or 'kvtier[gpu-cuda13]', whichever CUDA torch.version.cuda names"),
    ],
)
def test_the_extra_goes_with_torchs_cuda(monkeypatch, cuda, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert install_extra() == said


def test_a_gpu_without_cupy_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: pytest.fail("allocated"))
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    blocks = {"full": 4}
    with pytest.raises(DeviceUnavailable, match=r"kvtier\[gpu-cuda13\]', or use host_bytes=0"):
        KVCache(SPEC, device="cuda:0", device_blocks=blocks, host_blocks=blocks)


def test_an_error_that_was_left_behind_is_met_once(monkeypatch):
    asked = []

    def launch(*_, device):
        asked.append(device)
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", launch)
    for device in (torch.device("cuda:1"), torch.device("cpu")):
        forget_last_error(device)
    assert asked == ["cuda:1"]
