"""The options of the publisher, under vLLM's names, and what can be published at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown

TRANSPORTS = ("tcp://", "ipc://")
_COUNTS = ("buffer_steps", "hwm", "max_queue_size")


@dataclass(frozen=True)
class KVEventsConfig:
    """Options of ``KVEventPublisher``; the fields are those of vLLM's ``KVEventsConfig``.

    ``enable_kv_cache_events``  whether anything is published.
    ``publisher``         "zmq" or "null"; None is "zmq" if events are enabled.
    ``endpoint``          where it listens; ``tcp://*:PORT`` is every address of the machine. It always binds.
    ``replay_endpoint``   where a listener asks for batches that it has missed; None: nowhere.
    ``buffer_steps``      batches kept for that, at most.
    ``hwm``               batches that wait for a slow listener, at most; it misses the others.
    ``max_queue_size``    texts and changes that wait for the publisher's thread, at most.
    ``topic``             of all batches. vllm-router hears "" only.

    Nobody is asked who he is: whoever connects sees the token ids of all prompts without a salt. Raises
    ``ConfigError``.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 1_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError(f"enable_kv_cache_events must be true or false, got {shown(self.enable_kv_cache_events)}")
        if self.publisher not in (None, "zmq", "null"):
            raise ConfigError(f'publisher must be "zmq" or "null", got {shown(self.publisher)}')
        if self.publisher == "zmq" and not self.enable_kv_cache_events:
            raise ConfigError('publisher "zmq" publishes nothing unless enable_kv_cache_events is true')
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is None and name == "replay_endpoint":
                continue
            if not isinstance(value, str) or not value.startswith(TRANSPORTS):
                raise ConfigError(f"{name} must begin with {' or '.join(TRANSPORTS)}, got {shown(value)}")
        for name in _COUNTS:
            count = integer(getattr(self, name))
            if count is None or count < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {shown(getattr(self, name))}")
        if not isinstance(self.topic, str):
            raise ConfigError(f"topic must be text, got {shown(self.topic)}")

    @property
    def is_on(self) -> bool:
        """Whether there is something to publish to."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def check(self, spec: CacheSpec) -> None:
        """Raises ``ConfigError`` if a package is missing, or if routers cannot be told of these groups."""
        try:
            import msgspec  # noqa: F401
            import zmq  # noqa: F401
        except ImportError as problem:
            raise ConfigError(f"KV events need {problem.name}; pip install 'kvtier[events]'") from problem
        if not any(group.attention.kind is Kind.FULL for group in spec.groups):
            raise ConfigError(
                f"KV events tell routers of full attention, and none of the groups {', '.join(spec.names)} has it"
            )
        sizes = {group.name: group.block_tokens for group in spec.groups}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name} has {n}" for name, n in sizes.items())
            raise ConfigError(f"KV events have one block size, and these groups have several: {told}")

    @classmethod
    def read(cls, given: Any) -> Self:
        """Reads one of these, a mapping of its fields, or such a mapping as JSON text."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as problem:
                raise ConfigError(f"kv_events_config is no JSON: {problem}") from None
        if not isinstance(given, Mapping):
            raise ConfigError(f"kv_events_config must be a mapping of {', '.join(_names(cls))}, got {shown(given)}")
        unknown = [shown(name) for name in given if name not in _names(cls)]
        if unknown:
            raise ConfigError(f"kv_events_config has no {', '.join(unknown)}; it has {', '.join(_names(cls))}")
        return cls(**given)


def _names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]
