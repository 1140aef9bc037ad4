"""Where Triton is installed and cannot compile, the twins do the work, and it is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtier.attention.kernels import choice

from .memory import DEVICE

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "has_triton", lambda: True)
    choice.compiles.cache_clear()
    yield
    choice.compiles.cache_clear()


def test_a_kernel_runs_where_one_has_been_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[torch.device]()
    monkeypatch.setattr(choice, "try_kernel", tried.append)
    assert choice.runs_kernel(GPU) and choice.runs_kernel(GPU)
    assert tried == [GPU], "each device is tried once"


def test_without_a_compiler_the_twin_runs_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def no_compiler(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(choice, "try_kernel", no_compiler)
    with pytest.warns(UserWarning, match=r"Triton cannot compile for cuda:0 \(RuntimeError: Failed to find C compiler"):
        assert not choice.runs_kernel(GPU)
    assert not choice.runs_kernel(GPU)
    assert not recwarn.list


def test_on_a_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "try_kernel", lambda _: pytest.fail("tried"))
    assert not choice.runs_kernel(torch.device("cpu"))


def test_the_kernel_that_is_tried_runs() -> None:
    """On a GPU if there is one, else in Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
    choice.try_kernel(torch.device(DEVICE))
