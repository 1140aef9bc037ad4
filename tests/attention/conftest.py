"""FlashInfer over stand-in kernels, and requests to serve with it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attention.served_steps import Served
from kvtier import CacheSpec, GroupSpec, Scheduler
from kvtier.attention.flashinfer import FlashInfer

Backend = Callable[..., FlashInfer]
Serve = Callable[..., Served]


def need_flashinfer() -> None:
    """Skips the module that calls it, but where CI runs it: there FlashInfer must be installed."""
    if importlib.util.find_spec("flashinfer") is None:
        if os.environ.get("KVTIER_NEED_FLASHINFER"):
            raise ModuleNotFoundError(
                "CI runs these tests: `make test` installs flashinfer-python without its CUDA wheels"
            )
        pytest.skip(
            "flashinfer-python is not installed; `make test` installs what these tests need", allow_module_level=True
        )


@pytest.fixture(scope="module", autouse=True)
def flashinfers_own_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FlashInfer makes a folder for kernels when it is imported: not in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than these steps do, above all where other work shares the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from attention.flashinfer_standin import on_a_late_stream

    with on_a_late_stream(monkeypatch) as stream:
        yield stream


@pytest.fixture
def backend(gpu: Any) -> Backend:
    def make(**options: Any) -> FlashInfer:
        return FlashInfer("cpu", workspace_bytes=1 << 10, **({"check_indices": True} | options))

    return make


@pytest.fixture
def serve(make_cache: Any) -> Serve:
    """``serve(groups, seed)``: requests of mixed lengths, some with a common prefix, in pools that are too small."""

    def start(
        groups: list[GroupSpec], seed: int = 0, requests: int = 5, blocks: int = 24, most: int = 60, answer: int = 9
    ) -> Served:
        cache = make_cache(CacheSpec(groups), {g.name: blocks for g in groups})
        served = Served(cache, Scheduler(cache, max_batched_tokens=19, max_running=4), seed)
        rng = np.random.default_rng(seed)
        stem = rng.integers(3, 100, 20).tolist()
        for i in range(requests):
            own = rng.integers(3, 100, rng.integers(1, most)).tolist()
            served.add(f"r{i}", stem + own if i % 2 and most > 20 else own, int(rng.integers(1, answer)))
        return served

    return start
