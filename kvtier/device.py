"""Names of devices, checked before anything is allocated on them."""

from __future__ import annotations

from kvtier.errors import ConfigError


def resolve_device(device: object) -> str:
    """The device's full name ("cpu", "meta", "cuda:N"); raises ``ConfigError`` if it is unknown or not there."""
    name = str(device)
    if name in ("cpu", "meta"):
        return name
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device must be 'cpu', 'cuda:N' or 'meta', got {device!r}")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(f"device {name!r} is not there: this machine has {count} CUDA devices; use device='cpu'")
    return f"cuda:{int(index or 0)}"
