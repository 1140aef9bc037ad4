"""A cache's options, as users give them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import number, shown


@dataclass(frozen=True)
class StoreMode:
    """When blocks are stored in the host tier, and what follows from it. A mode without any moment only reads."""

    when_full: bool = False
    """A block is stored as soon as it is full."""
    before_eviction: bool = False
    """A block is stored shortly before it is evicted."""

    @property
    def only_reads(self) -> bool:
        """Whether nothing is stored."""
        return self == StoreMode()

    @property
    def keeps_copies(self) -> bool:
        """Whether the host has copies of what the device has. Hits on the device then count as use of the copies."""
        return self.when_full

    @property
    def feeds_remote(self) -> bool:
        """Whether a whole text comes to the host soon enough to be spilled."""
        return self.when_full


STORE_MODES = {
    "eager": StoreMode(when_full=True),
    "lazy": StoreMode(before_eviction=True),
    "off": StoreMode(),
}
CHOICES = {
    "store": tuple(STORE_MODES),
    "verify": ("off", "full"),
    "on_load_error": ("recompute", "fail"),
}
MOST_SECONDS = 2**62


FORMER_NAMES = {"store_uri": "remote_uri"}
"""Options of the days before there was one word a tier, and their names now."""


def refuse(call: str, unknown: Collection[str]) -> None:
    """Raises what a call with ``unknown`` options raises: ``ConfigError`` if one has another name now, else
    ``TypeError``, as Python does."""
    for name in unknown:
        if name in FORMER_NAMES:
            raise ConfigError(f"{name} is called {FORMER_NAMES[name]}")
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")


def check_spec(spec: object) -> None:
    """Raises ``ConfigError`` unless it is a ``CacheSpec``."""
    if not isinstance(spec, CacheSpec):
        raise ConfigError(f"spec must be a CacheSpec, got {type(spec).__name__}")


def check_choices(**given: object) -> None:
    """Raises ``ConfigError`` for a value that its option does not allow."""
    for name, value in given.items():
        if not isinstance(value, str) or value not in CHOICES[name]:
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, CHOICES[name]))}, got {shown(value)}")


def seconds(value: object, name: str) -> float:
    """A positive number of seconds, infinity too; raises ``ConfigError``."""
    given = number(value)
    if given is None or not given > 0:
        raise ConfigError(f"{name} must be a positive number of seconds, got {shown(value)}")
    if isinstance(given, int) and given > MOST_SECONDS:
        raise ConfigError(f"{name} is more than {MOST_SECONDS} seconds; float('inf') means no deadline")
    return given


def wait_seconds(value: object) -> float:
    """``timeout_s`` of a wait: a number of seconds, not negative; raises ``ConfigError``."""
    given = number(value)
    if given is None or not given >= 0:
        raise ConfigError(f"timeout_s must be a number of seconds, not negative, got {shown(value)}")
    return given


def check_identity(model_id: object, key_secret: object) -> None:
    """Raises ``ConfigError`` for values that cannot be part of every key."""
    if not isinstance(model_id, str):
        raise ConfigError(f"model_id must be a string, got {shown(model_id)}")
    if key_secret is not None and (not isinstance(key_secret, bytes) or not key_secret):
        raise ConfigError("key_secret must be bytes, one at least (16 random ones are best), or None")
