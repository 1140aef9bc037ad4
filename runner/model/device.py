"""Devices that a model can run on."""

from __future__ import annotations

import os
import re

from kvtier.machine.device import device_name, resolve_device
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown

_DEVICE = re.compile(r"cpu(:0)?|cuda(:\d+)?", re.ASCII)


def model_device(device: object) -> str:
    """The device's full name ("cpu", "cuda:N").

    Raises ``ConfigError`` for a device that does not compute, ``DeviceUnavailable`` if it is not there.
    """
    return resolve_device(check_device_name(device))


def check_device_name(device: object) -> str:
    """The device's name, whether or not it is there; ``ConfigError`` for a device that does not compute."""
    name = device_name(device)
    if name.partition(":")[0] == "meta":
        raise ConfigError(f"no model runs on device {shown(name)}: it is for bookkeeping only; use 'cpu' or 'cuda:N'")
    if not _DEVICE.fullmatch(name):
        raise ConfigError(f"device must be 'cpu' or 'cuda:N' ('cuda:0' is the first GPU), got {shown(device)}")
    return name


def ask_for_large_pages(device: str) -> None:
    """On a CPU, lets torch ask the system for pages of 2 MiB; what the environment says already stands.

    A step reads all weights, and pages of 4 KiB are looked up 512 times as often. torch reads the variable once, at the
    process's first tensor: after it this changes nothing. Processes that are started later inherit it.
    """
    if device == "cpu":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
