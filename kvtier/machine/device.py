"""Names of devices, checked before anything is allocated on them, and the free memory of a GPU."""

from __future__ import annotations

import re
from contextlib import suppress

from kvtier.machine.errors import ConfigError, DeviceUnavailable, MemoryUnavailable
from kvtier.machine.integers import shown

_EXTRAS = {"12": "kvtier[gpu-cuda12]", "13": "kvtier[gpu-cuda13]"}
"""By the major version of CUDA."""


def device_name(device: object) -> str:
    """The name of a ``torch.device`` as text; other objects are shown."""
    return str(device) if isinstance(device, str) or type(device).__module__ == "torch" else shown(device)


def resolve_device(device: object) -> str:
    """The device's full name ("cpu", "meta", "cuda:N").

    Raises ``ConfigError`` for an unknown kind of device, and ``DeviceUnavailable`` with the reason if it is not there.
    """
    name = device_name(device)
    found = re.fullmatch(r"(cpu|meta)(?::0)?|cuda(?::([0-9]{0,9}))?", name)
    if found is None:
        raise ConfigError(f"device must be 'cpu', 'cuda:N' ('cuda:0' is the first GPU) or 'meta', got {shown(device)}")
    if found[1]:
        return found[1]
    index = int(found[2] or 0)
    import torch

    if not torch.cuda.is_available():
        raise DeviceUnavailable(why_no_cuda(name, torch.version.cuda, driver_version()))
    count = torch.cuda.device_count()
    if index >= count:
        there = "'cuda:0'" if count == 1 else f"'cuda:0' to 'cuda:{count - 1}'"
        raise DeviceUnavailable(
            f"device {name!r} is not there: this machine has {count} CUDA device{'s' * (count != 1)} ({there}), as far "
            "as CUDA_VISIBLE_DEVICES lets it be seen"
        )
    return f"cuda:{index}"


def why_no_cuda(name: str, torch_cuda: str | None, driver: int | None) -> str:
    """Why torch sees no GPU, and the fix. ``driver``: the CUDA version of the driver (12080 is 12.8), None without
    one."""
    start = f"device {name!r} is not there: "
    if torch_cuda is None:
        return start + "this torch was built without CUDA; install a CUDA build of torch, or use device='cpu'"
    if driver is None:
        return start + "there is no NVIDIA driver (libcuda.so.1 cannot be loaded); install one, or use device='cpu'"
    major, minor = driver // 1000, driver % 1000 // 10
    if driver and major < int(torch_cuda.split(".")[0]):
        return start + (
            f"the NVIDIA driver is for CUDA {major}.{minor}, too old for this torch, which was built for CUDA "
            f"{torch_cuda}; update the driver, or install a torch for CUDA {major}"
        )
    return start + (
        "the NVIDIA driver is installed, but finds no GPU that it can use; `nvidia-smi` and CUDA_VISIBLE_DEVICES may "
        "tell why; or use device='cpu'"
    )


def driver_version() -> int | None:
    """The CUDA version of the NVIDIA driver; None without a driver, 0 if it does not say."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def check_device_memory(device: str, num_bytes: int, setting: str, fix: str = "") -> None:
    """Raises ``MemoryUnavailable`` if a GPU has fewer than ``num_bytes`` bytes free, and says what holds the rest.

    ``setting``: the option that asks for them. ``fix``: the remedy, if it is not to lower the setting.
    """
    if not device.startswith("cuda"):
        return
    import torch

    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    unused = mine - torch.cuda.memory_allocated(device)  # torch gives that back when it needs it
    if num_bytes > free + unused:
        raise MemoryUnavailable(short_of_memory(device, num_bytes, setting, free + unused, total, mine - unused, fix))


def short_of_memory(device: str, num_bytes: int, setting: str, free: int, total: int, mine: int, fix: str = "") -> str:
    """The message: asked bytes, free bytes, and the shares of this process and of others in the GPU's ``total``
    bytes."""
    return (
        f"{setting} asks for {num_bytes:,} bytes on {device}, which has {free:,} of {total:,} bytes free: torch holds "
        f"{mine:,} in this process, other processes and CUDA itself {max(0, total - free - mine):,} (`nvidia-smi` "
        f"lists them); {fix or f'lower {setting}'}, or free memory there"
    )


def forget_last_error(device: object) -> None:
    """Lets a useless torch kernel meet the error that another library's failed launch has left behind.

    CUDA's runtime keeps the error until the next query, and torch queries after each launch of its own.
    """
    import torch

    if str(device).startswith("cuda"):
        with suppress(torch.AcceleratorError, torch.OutOfMemoryError):
            torch.ones(1, device=str(device))


def install_extra() -> str:
    """The command that installs a GPU's further packages, for the CUDA that this torch was built for."""
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    if major in _EXTRAS:
        return f"pip install '{_EXTRAS[major]}'"
    every = " or ".join(f"'{extra}'" for extra in _EXTRAS.values())
    return f"pip install {every}, whichever CUDA torch.version.cuda names"
