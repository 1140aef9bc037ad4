"""Copy engines by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines import PROTOCOL, CopyEngine, EngineFactory
from kvtier.cpu_offload.engines.around import EngineAround
from kvtier.cpu_offload.engines.cuda.link import CudaLink
from kvtier.cpu_offload.engines.null import NullEngine
from kvtier.cpu_offload.engines.simulated import SimulatedEngine
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.geometry.layout import Seams
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown

MakesEngine = Callable[[TierMemory], object]
"""A user's copy engine: an ``EngineFactory``, or any function that makes an object with the protocol's seven
methods."""

ENGINES: dict[str, MakesEngine] = {"threads": ThreadsEngine, "simulated": SimulatedEngine, "null": NullEngine}
"""For arenas that the CPU can address; see ``kvtier.cpu_offload.engines``."""
CUDA = "cuda"
"""The engine's name on a GPU."""


def engine_factory(engine: MakesEngine | str | None, device: str, needed: bool, paced: bool = False) -> EngineFactory:
    """The factory of the copy engine of this name, or of the engine that suits ``device``: "meta" has no bytes to move.

    ``needed``: there is a host tier. ``paced``: see ``CudaLink``. Raises ``ConfigError``; ``DeviceUnavailable`` for a
    GPU's software.
    """
    if callable(engine):
        return as_factory(engine)
    on_cuda = device.startswith("cuda")
    name = ("null" if device == "meta" else CUDA if on_cuda else "threads") if engine is None else engine
    if isinstance(name, str) and name == CUDA and on_cuda:
        return CudaLink(int(device.partition(":")[2]), paced=paced) if needed else as_factory(NullEngine)
    if not isinstance(name, str) or name not in ENGINES or (on_cuda and needed and name != "null"):
        names = (CUDA, "null") if on_cuda else ENGINES
        raise ConfigError(
            f"copy_engine must be one of {', '.join(map(repr, names))} or a factory on {device}, got {shown(engine)}"
        )
    return as_factory(ENGINES[name])


def as_factory(make: MakesEngine) -> EngineFactory:
    """``make`` itself, or a factory around it."""
    return make if isinstance(make, EngineFactory) else _Function(make)


def build_engine(make: EngineFactory, memory: TierMemory) -> CopyEngine:
    """The engine; raises ``ConfigError`` for an object that is none."""
    engine: object = make(memory)
    if isinstance(engine, CopyEngine):
        return engine
    missing = [name for name in PROTOCOL if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(f"copy_engine made a {type(engine).__name__}, which has no {', '.join(missing)}")
    return _Guest(engine, memory)


def as_made(engine: CopyEngine | None) -> Any:
    """The object that a factory has made for ``engine``."""
    return engine.engine if isinstance(engine, _Guest) else engine


class _Guest(EngineAround):
    """Around an object that has the protocol's methods and does not inherit from ``CopyEngine``."""


class _Function(EngineFactory):
    """A factory around something callable, which may have its own ``host_memory`` and ``give_back``."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, memory: TierMemory) -> CopyEngine:
        engine: CopyEngine = self._make(memory)
        return engine

    def host_memory(self, num_bytes: int, setting: str, seams: Seams) -> npt.NDArray[np.uint8] | None:
        own = getattr(self._make, "host_memory", None) or super().host_memory
        memory: npt.NDArray[np.uint8] | None = own(num_bytes, setting, seams)
        return memory

    def give_back(self) -> bool:
        own = getattr(self._make, "give_back", None) or super().give_back
        return bool(own())
