"""The names that an attention backend is asked for by; a command line checks them before torch is there."""

from __future__ import annotations

from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown

NAMES = ("auto", "flashinfer", "reference")


def check_name(attention: object) -> None:
    """Raises ``ConfigError`` unless there is a choice of this name."""
    if not isinstance(attention, str) or attention not in NAMES:
        raise ConfigError(f"attention must be one of {', '.join(NAMES)}, got {shown(attention)}")
