"""``LLM``'s arguments, checked before weights are read.

Promises   faults that show in a model's config are reported before its weights are read. These are names and values of
           options, sizes too small for a block, missing software. The rules are ``KVCache``'s own.
Does not   know the free memory once the weights are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from kvtier import CacheSpec, ConfigError
from kvtier.attention.flashinfer import Held
from kvtier.cache.settings import Options
from kvtier.cpu_offload.engines.cuda.link import check_software
from kvtier.geometry.sizing import parse_bytes
from kvtier.machine.integers import shown
from runner.engine import memory
from runner.engine.foreign import FOREIGN
from runner.engine.memory import Memory
from runner.model.device import model_device

CACHE_OPTIONS = [
    field.name for field in fields(Options) if field.name != "device" and not field.name.endswith(("_bytes", "_blocks"))
]
"""Options of ``KVCache`` that ``LLM`` takes by the same name."""


def cache_options(given: Mapping[str, Any], mine: list[str]) -> dict[str, Any]:
    """``KVCache``'s options among ``given``, without harmless ones; ``mine``: ``LLM``'s further options.

    Raises ``ConfigError`` for all others, with a substitute.
    """
    unknown = []
    for name, value in given.items():
        other = FOREIGN.get(name)
        if other is None and name not in CACHE_OPTIONS:
            unknown.append(name)
        elif other is not None and not other.allows(value):
            unknown.append(f"{name} ({other.said})")
    if unknown:
        raise ConfigError(f"LLM has no option {', '.join(unknown)}; it has {', '.join([*mine, *CACHE_OPTIONS])}")
    return {name: value for name, value in given.items() if name in CACHE_OPTIONS}


def check_flags(**given: object) -> None:
    """Raises ``ConfigError`` for a value other than True and False: text such as "no" would count as True."""
    for name, value in given.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{name} must be True or False, got {shown(value)}")


def check_seconds(**given: object) -> None:
    """Raises ``ConfigError`` for what is no number of seconds above 0."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be a number of seconds above 0, got {shown(value)}")


def check_cache(
    spec: CacheSpec,
    device: str,
    device_memory: Memory | None,
    host_memory: Memory | None,
    options: Mapping[str, Any],
) -> None:
    """Raises ``KVCache``'s errors for these groups, as far as they do not depend on the memory that is free later.

    None stands for as much as there will be: a block of each group, in the host tier if something needs one.
    """
    one_each = dict.fromkeys(spec.names, 1)
    if host_memory is None:
        host_memory = 0 if options.get("remote_uri") is None else one_each
    sizes = memory.pool_sizes(one_each if device_memory is None else device_memory, host_memory, Held(0, 0))
    with memory.named_as_given():
        Options(device, **sizes, **options).read(spec).check_room()


def needs_tier(host_memory: Memory | None, has_remote: bool) -> bool:
    """Whether there must be a host tier; raises ``ConfigError`` for text that is no size."""
    if host_memory is None:
        return has_remote
    return bool(host_memory if isinstance(host_memory, Mapping) else parse_bytes(host_memory, "host_memory"))


def check_host_link(device: str, options: Mapping[str, Any]) -> None:
    """Raises ``DeviceUnavailable`` if a GPU is to have a host tier and the software here cannot serve one."""
    device = model_device(device)
    if device.startswith("cuda") and options.get("copy_engine") in (None, "cuda"):
        with memory.named_as_given():
            check_software(int(device.partition(":")[2]))
