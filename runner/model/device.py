"""Devices that a model can run on."""

from __future__ import annotations

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
