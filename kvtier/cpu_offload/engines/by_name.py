"""Copy engines by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable

from kvtier._integers import shown
from kvtier.cpu_offload.engines import PROTOCOL, CopyEngine
from kvtier.cpu_offload.engines.cuda.link import CudaLink
from kvtier.cpu_offload.engines.null import NullEngine
from kvtier.cpu_offload.engines.simulated import SimulatedEngine
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.errors import ConfigError

EngineFactory = Callable[[TierMemory], CopyEngine]

ENGINES: dict[str, EngineFactory] = {"threads": ThreadsEngine, "simulated": SimulatedEngine, "null": NullEngine}
"""For arenas that the CPU can address; see ``kvtier.cpu_offload.engines``."""
CUDA = "cuda"
"""The engine's name on a GPU."""


def engine_factory(engine: EngineFactory | str | None, device: str, needed: bool) -> EngineFactory:
    """What makes the copy engine of this name, or the one that suits ``device``: "meta" has no bytes to move.

    ``needed``: there is a host tier. Raises ``ConfigError``; ``DeviceUnavailable`` for a GPU's software.
    """
    if callable(engine):
        return engine
    on_cuda = device.startswith("cuda")
    name = ("null" if device == "meta" else CUDA if on_cuda else "threads") if engine is None else engine
    if isinstance(name, str) and name == CUDA and on_cuda:
        return CudaLink(int(device.partition(":")[2])) if needed else NullEngine
    if not isinstance(name, str) or name not in ENGINES or (on_cuda and needed and name != "null"):
        names = (CUDA, "null") if on_cuda else ENGINES
        raise ConfigError(
            f"copy_engine must be one of {', '.join(map(repr, names))} or a factory on {device}, got {shown(engine)}"
        )
    return ENGINES[name]


def build_engine(make_engine: EngineFactory, memory: TierMemory) -> CopyEngine:
    """The engine; raises ``ConfigError`` for something that is none."""
    engine = make_engine(memory)
    missing = [name for name in PROTOCOL if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(f"copy_engine made a {type(engine).__name__}, which has no {', '.join(missing)}")
    return engine
