"""Which backend runs a model, and what is said about it."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from kvtier import ConfigError, FullAttention, GroupSpec, KVTierError
from kvtier.attention import choice, reference
from kvtier.attention.choice import Choice, Machine, choose
from kvtier.attention.flashinfer import FlashInfer
from kvtier.machine.errors import AttentionUnavailable

HOPPER = Machine("0.7.2.post1", (9, 0))


def group(head_dim: int = 128, dtype: str = "bfloat16", head_dim_v: int | None = None) -> GroupSpec:
    return GroupSpec("full", FullAttention(), 1, 2, head_dim, dtype, head_dim_v=head_dim_v)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("asked", ["auto", "flashinfer"])
def test_flashinfer_where_it_can_run(head_dim: int, dtype: str, asked: str) -> None:
    found = choose(asked, "cuda:0", [group(head_dim, dtype), group(192, dtype, 128)], machine=HOPPER)
    by_name = asked == "flashinfer"
    assert found == Choice("flashinfer", "asked for" if by_name else "FlashInfer 0.7.2.post1", required=by_name)


OBSTACLES = {
    "no CUDA": ("cpu", [group()], Machine("0.7.2", None), "device is cpu.*device='cuda:0'"),
    "no GPU": ("cuda:0", [group()], Machine("0.7.2", None), "no CUDA device"),
    "old GPU": ("cuda:0", [group()], Machine("0.7.2", (7, 5)), "8.0, this GPU has 7.5"),
    "not installed": ("cuda:0", [group()], Machine(None, (9, 0)), "FlashInfer is not installed; pip install"),
    "too old": ("cuda:0", [group()], Machine("0.6.18.post1", (9, 0)), "0.6.18.post1 is too old; pip install .*0.7.2"),
    "just too old": ("cuda:0", [group()], Machine("0.7.1", (9, 0)), "0.7.1 is too old"),
    "unknown": ("cuda:0", [group()], Machine("0", (9, 0)), "too old"),
    "head size": ("cuda:0", [group(), group(80)], HOPPER, "64, 128, 256, 192 with 128, not 80"),
    "wide V": ("cuda:0", [group(192)], HOPPER, "192 with 128, not 192"),
    "small heads": ("cuda:0", [group(32)], HOPPER, "not 32"),
    "unequal heads": ("cuda:0", [group(128, head_dim_v=64)], HOPPER, "not 128 with 64"),
    "float32": ("cuda:0", [group(128, "float32")], HOPPER, "not float32; load the model with dtype='bfloat16'"),
    "wide heads in fp8": ("cuda:0", [group(192, "fp8")], HOPPER, "64, 128, 256 over K and V in 8 bits, not 192"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_auto_falls_back_and_says_why_and_flashinfer_raises_the_same(name: str) -> None:
    device, groups, machine, why = OBSTACLES[name]
    found = choose("auto", device, groups, machine=machine)
    assert found.name == "reference"
    with pytest.raises(AttentionUnavailable, match=why) as caught:
        choose("flashinfer", device, groups, machine=machine)
    assert found.reason in str(caught.value) and isinstance(caught.value, ConfigError)
    assert choose("reference", device, groups, machine=machine) == Choice("reference", "asked for", True)


def test_latents_have_kernels_of_their_own() -> None:
    """By a group's name: 192 with 128 are sizes of heads that FlashInfer computes, and of latents that it does not."""
    latents: Any = {"machine": HOPPER, "latents": {"full"}, "heads": 128}
    for asked in ("auto", "flashinfer"):
        found = choose(asked, "cuda:0", [group(512, head_dim_v=64)], torch.bfloat16, **latents)
        assert found.name == "flashinfer"
    for groups in ([group(192, head_dim_v=128)], [group(64)], [group(256, head_dim_v=32)]):
        found = choose("auto", "cuda:0", groups, **latents)
        assert found.name == "reference" and "it computes latents of 512 with rotated keys of 64, not" in found.reason
    with pytest.raises(AttentionUnavailable, match=r"leave batch_invariant out; or use attention='auto'"):
        choose("flashinfer", "cuda:0", [group(512, head_dim_v=64)], batch_invariant=True, **latents)
    in_8_bits = [group(512, "fp8", head_dim_v=64)]
    assert choose("auto", "cuda:0", in_8_bits, **latents).name == "flashinfer"
    blackwell = latents | {"machine": Machine("0.7.2", (10, 0))}
    assert "on Hopper" in choose("auto", "cuda:0", in_8_bits, **blackwell).reason
    assert "device is cpu" in choose("auto", "cpu", [group(512, head_dim_v=64)], **latents).reason


def test_what_only_the_reference_attends_to_is_told() -> None:
    for groups in ([group(512, head_dim_v=64)], [group(64)]):
        found = choose("auto", "cuda:0", groups, machine=HOPPER, only_torch="what an index picks")
        assert (found.name, found.required) == ("reference", False)
        assert "only the torch reference attends to what an index picks" in found.reason
        with pytest.raises(AttentionUnavailable, match=r"an index picks; or use attention='auto'"):
            choose("flashinfer", "cuda:0", groups, machine=HOPPER, only_torch="what an index picks")


def test_the_weights_dtype_counts_where_it_is_given() -> None:
    assert choose("auto", "cuda:0", [group()], torch.float32, HOPPER).name == "reference"
    assert choose("auto", "cuda:0", [group(dtype="float32")], torch.bfloat16, HOPPER).name == "flashinfer"


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_k_and_v_in_8_bits(dtype: str) -> None:
    groups = [group(head_dim, dtype) for head_dim in (64, 128, 256)]
    assert choose("auto", "cuda:0", groups, torch.float16, HOPPER).name == "flashinfer"
    assert choose("auto", "cuda:0", groups, None, HOPPER).name == "flashinfer"
    assert choose("auto", "cuda:0", groups, torch.float32, HOPPER).name == "reference"


@pytest.mark.parametrize("version", ["0.7.2", "0.7.2.post1", "0.8.0rc1", "1.0", "0.10.0+cu128"])
def test_versions_that_are_new_enough(version: str) -> None:
    assert choose("auto", "cuda:0", [group()], machine=Machine(version, (9, 0))).name == "flashinfer"


def test_this_machine_is_asked_without_importing_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    assert choose("auto", "cpu", [group()]).name == "reference"
    assert Machine.here(torch.device("cpu")).capability is None


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choice.installed_version() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"flashinfer-python": "0.6.18"}[name])
    assert choice.installed_version() == "0.6.18"
    with pytest.raises(AttentionUnavailable, match=r"0.6.18 is too old; pip install .*0.7.2', or use"):
        FlashInfer("cpu", batch_invariant=True)  # whose captured steps would read indices that nobody wrote

    def unknown(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert choice.installed_version() == "0"


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "kvtier[gpu-cuda12]"), ("13.0", "kvtier[gpu-cuda13]")])
def test_the_extra_that_goes_with_torch_is_named(monkeypatch: pytest.MonkeyPatch, cuda: str, extra: str) -> None:
    """Another one would install the CuPy of another CUDA."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(AttentionUnavailable, match=re.escape(f"pip install '{extra}'; or")):
        choose("flashinfer", "cuda:0", [group()], machine=Machine(None, (9, 0)))
    monkeypatch.setattr(importlib, "import_module", lambda _: 1 / 0)
    with pytest.raises(AttentionUnavailable, match=re.escape(f"pip install '{extra}', or")):
        choice.make(Choice("flashinfer", ""), "cpu")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KVTierError, match="auto, flashinfer, reference, got"):
        choose("flash", "cpu", [group()])


def test_the_reference_is_made_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "FlashInfer", lambda *_, **__: pytest.fail("made"))
    assert choice.make(Choice("reference", ""), "cpu") is reference


def test_a_flashinfer_that_cannot_be_imported_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(AttentionUnavailable, match=r"libcudart.*attention='reference'"):
        choice.make(Choice("flashinfer", ""), "cpu")
