"""Copy engines by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.cpu_offload.engines import CopyEngine, EngineFactory
from kvtier.cpu_offload.engines.cuda.link import CudaLink
from kvtier.cpu_offload.engines.null import NullEngine
from kvtier.cpu_offload.engines.simulated import SimulatedEngine
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.shared_memory import SharedMemory
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown

MakesEngine = Callable[[TierMemory], CopyEngine]
"""A user's copy engine: an ``EngineFactory``, or any function that makes a ``CopyEngine``."""

ENGINES: dict[str, MakesEngine] = {"threads": ThreadsEngine, "simulated": SimulatedEngine, "null": NullEngine}
"""The engines for arenas that the CPU can address; see ``kvtier.cpu_offload.engines``."""
CUDA = "cuda"
"""The engine's name on a GPU."""


def engine_factory(
    engine: MakesEngine | str | None,
    device: str,
    needed: bool,
    paced: bool = False,
    shared: SharedMemory | None = None,
) -> EngineFactory:
    """The factory of the copy engine of this name, or of the engine that suits ``device``: "meta" has no bytes to move.

    ``needed``: there is a host tier. ``paced``, ``shared``: see ``CudaLink``. Raises ``ConfigError``;
    ``DeviceUnavailable`` for a GPU's software.
    """
    if callable(engine):
        return as_factory(engine)
    on_cuda = device.startswith("cuda")
    name = ("null" if device == "meta" else CUDA if on_cuda else "threads") if engine is None else engine
    if isinstance(name, str) and name == CUDA and on_cuda:
        return CudaLink(int(device.partition(":")[2]), paced=paced, shared=shared) if needed else as_factory(NullEngine)
    if not isinstance(name, str) or name not in ENGINES or (on_cuda and needed and name != "null"):
        names = (CUDA, "null") if on_cuda else ENGINES
        raise ConfigError(
            f"copy_engine must be one of {', '.join(map(repr, names))} or a factory on {device}, got {shown(engine)}"
        )
    return as_factory(ENGINES[name])


def as_factory(make: MakesEngine) -> EngineFactory:
    """``make`` itself, or a factory around a function. Raises ``ConfigError`` for a factory that does not inherit."""
    if isinstance(make, EngineFactory):
        return make
    if hasattr(make, "host_memory"):
        raise ConfigError(f"{shown(make)}, with host_memory, has to inherit from EngineFactory (cpu_offload.engines)")
    return _Function(make)


def build_engine(make: EngineFactory, memory: TierMemory) -> CopyEngine:
    """The engine; raises ``ConfigError`` for an object that is none."""
    engine: object = make(memory)
    if not isinstance(engine, CopyEngine):
        raise ConfigError(
            f"copy_engine made a {type(engine).__name__}, which does not inherit from CopyEngine (cpu_offload.engines)"
        )
    return engine


class _Function(EngineFactory):
    def __init__(self, make: MakesEngine) -> None:
        self._make = make

    def __call__(self, memory: TierMemory) -> CopyEngine:
        return self._make(memory)
