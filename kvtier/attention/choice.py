"""Which attention backend a model runs on, and why.

Promises   "auto" picks FlashInfer if it can run the model, else the torch reference, and says why. If "flashinfer"
           cannot run, it raises ``AttentionUnavailable`` with the fix. Both happen before anything is allocated. Some
           failures show only in a trial (kernels that cannot be compiled). They are left to the caller: see
           ``Choice.required``.
Does not   know models: it is given groups, a dtype and a device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.attention import exact, reference
from kvtier.attention._flashinfer_latents import cannot_run_latents
from kvtier.attention._flashinfer_version import installed_version, too_old
from kvtier.attention.flashinfer import FlashInfer, cannot_run
from kvtier.attention.names import check_name
from kvtier.geometry.spec import GroupSpec
from kvtier.machine.device import install_extra
from kvtier.machine.errors import AttentionUnavailable, NotExact

_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Choice:
    """A backend's name, and why it is this one."""

    name: str
    reason: str
    required: bool = False
    """Asked for by name: no other backend replaces it if it turns out not to work."""


@dataclass(frozen=True)
class Machine:
    """The machine to run on. ``flashinfer``: its version, None if it is not installed."""

    flashinfer: str | None
    capability: tuple[int, int] | None
    """CUDA compute capability of the device; None without one."""

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        """This process's. Asks, and allocates nothing."""
        cuda = device.type == "cuda" and torch.cuda.is_available()
        return cls(installed_version(), torch.cuda.get_device_capability(device) if cuda else None)


def choose(
    attention: str,
    device: torch.device | str,
    groups: Sequence[GroupSpec],
    dtype: torch.dtype | None = None,
    machine: Machine | None = None,
    *,
    latents: Collection[str] = (),
    heads: int = 1,
    batch_invariant: bool = False,
    only_torch: str | None = None,
) -> Choice:
    """The backend for a model that attends to ``groups`` on ``device``; ``dtype`` of the weights, None: the groups'.

    ``latents``: names of the groups that keep latents (MLA), to which ``heads`` query heads attend, and whether that
    must be ``batch_invariant``. ``only_torch``: what they are, if only the torch reference attends to such.
    Raises ``ConfigError`` for an unknown name, and ``AttentionUnavailable`` for "flashinfer" if it cannot run.
    """
    check_name(attention)
    if attention == "reference":
        return Choice("reference", "asked for", required=True)
    device = torch.device(device)
    machine = Machine.here(device) if machine is None else machine
    problem = obstacle(device, groups, dtype, machine, latents, heads, batch_invariant)
    if only_torch and (problem is None or device.type == "cuda"):
        problem = f"of kvtier's backends only the torch reference attends to {only_torch}"
    if problem is None:
        required = attention == "flashinfer"
        return Choice("flashinfer", "asked for" if required else f"FlashInfer {machine.flashinfer}", required)
    if attention == "flashinfer":
        raise AttentionUnavailable(f"attention='flashinfer' cannot be had: {problem}; or use attention='auto'")
    return Choice("reference", problem)


def exactly(attention: str, device: torch.device | str, dtype: torch.dtype | None) -> Choice:
    """The backend of ``exact=True`` for weights of ``dtype``, None if it is not known yet.

    Raises ``ConfigError`` for an unknown name, and ``NotExact`` where there is none.
    """
    check_name(attention)
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16):
        known = str(dtype).removeprefix("torch.")
        raise NotExact(f"exact=True cannot be kept in {known}: use dtype='float32' or 'bfloat16', or leave exact out")
    if torch.device(device).type != "cpu":
        raise NotExact(f"exact=True cannot be kept on {device}, only on a CPU: use device='cpu', or leave exact out")
    if attention == "flashinfer":
        raise NotExact("exact=True has an attention of its own: use attention='auto', or leave exact out")
    return Choice("exact", "exact=True", required=True)


def obstacle(
    device: torch.device,
    groups: Sequence[GroupSpec],
    dtype: torch.dtype | None,
    machine: Machine,
    latents: Collection[str] = (),
    heads: int = 1,
    batch_invariant: bool = False,
) -> str | None:
    """The reason why FlashInfer cannot run, and the fix; None if it can."""
    if device.type != "cuda":
        return f"FlashInfer runs on CUDA and the device is {device}; use device='cuda:0' where there is a GPU"
    if machine.capability is None:
        return "FlashInfer runs on CUDA, and this machine has no CUDA device"
    if machine.capability < _CAPABILITY:
        return "FlashInfer's kernels need compute capability {}.{}, this GPU has {}.{}".format(
            *_CAPABILITY, *machine.capability
        )
    if machine.flashinfer is None:
        return f"FlashInfer is not installed; {install_extra()}"
    if problem := too_old(machine.flashinfer):
        return problem
    for group in groups:
        kv: torch.dtype = getattr(torch, group.dtype)
        narrow = kv.itemsize == 1  # else K and V may come in the weights' dtype, whatever the config says
        computed = dtype or (torch.bfloat16 if narrow else kv)
        if group.name in latents:
            how: Any = {"heads": heads, "batch_invariant": batch_invariant}
            problem = cannot_run_latents(group, computed, kv if narrow else computed, machine.capability, **how)
        else:
            problem = cannot_run(*group.head_dims, computed, kv if narrow else None)
        if problem is not None:
            return f"FlashInfer cannot run group {group.name!r}: {problem}"
    return None


def runs_fa3(machine: Machine) -> bool:
    """Whether FlashInfer has Hopper's own kernels here, which CUDA has compiled since 12.3."""
    built = torch.version.cuda
    return machine.capability is not None and machine.capability[0] == 9 and _numbers(built) >= (12, 3)


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (version or "").split(".")[:2] if number.isdigit())


def make(choice: Choice, device: torch.device | str, **options: Any) -> Any:
    """The backend itself; ``options`` are ``FlashInfer``'s. Allocates FlashInfer's workspace.

    On Hopper, FlashInfer tries FA3 for prompts, unless ``options`` say otherwise.
    """
    torch_s: dict[str, Any] = {"reference": reference, "exact": exact}
    if choice.name in torch_s:
        return torch_s[choice.name]
    return FlashInfer(device, **{"fa3": runs_fa3(Machine.here(torch.device(device)))} | options)
