"""The bytes of a host tier: its memory, and the engine that copies between it and the device's memory.

Owns       host memory, and the copy engine.
Promises   memory is given back once no copy can touch it. Keeps I22, I23.
Does not   know keys, content or requests (``HostBooks``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines.by_name import MakesEngine, engine_factory
from kvtier.cpu_offload.memory_guard import MemoryGuard
from kvtier.cpu_offload.shared_memory import SharedMemory
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.host_tier.blocks import HostBlocks
from kvtier.host_tier.fragments import FragmentEngine
from kvtier.host_tier.plan import HostPlan, check_plan
from kvtier.machine.arguments import check_type
from kvtier.machine.errors import ConfigError
from kvtier.pools.arena import Arena

if TYPE_CHECKING:
    import torch


class HostBytes:
    """A tier's bytes as ``plan`` says, for the engine's ``memory``: uint8 [bytes], a NumPy array or a torch tensor.

    ``copy_engine``: as ``KVCache``'s. ``shared``: the memory of all ``plan.sharers``, if there are several. Raises
    ``ConfigError`` and ``MemoryUnavailable``.
    """

    def __init__(
        self,
        plan: HostPlan,
        memory: npt.NDArray[np.uint8] | torch.Tensor,
        copy_engine: MakesEngine | str | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        check_plan(plan)
        _check_shared(plan, shared)
        size = memory_bytes(memory)
        if size < plan.memory_bytes:
            raise ConfigError(f"the plan is of {plan.memory_bytes:,} bytes of device memory, and memory has {size:,}")
        device = "cpu" if isinstance(memory, np.ndarray) else str(memory.device)
        make_engine = engine_factory(copy_engine, device, needed=True, paced=True, shared=shared)
        if device != "cpu":
            plan.fragments.check_aligned(memory)
        arena = Arena(None, plan.layout, "cpu")
        if shared is None:  # else whoever has made it has looked
            arena.check("host_memory")
        self._guard = MemoryGuard(make_engine, [arena])
        try:
            host = make_engine.host_memory(plan.layout.num_bytes, "host_memory", plan.layout.seams)
            if host is not None and make_engine.shared is not shared:
                raise ConfigError("this copy_engine makes host memory of its own, which workers cannot share")
            sums = None
            if shared is not None:
                host = shared.map(0, plan.layout.num_bytes) if host is None else host
                sums = shared.map(plan.first_sum, 8 * plan.num_sums).view(np.uint64)
            if host is None:
                arena.allocate("host_memory")
            else:
                arena.use(host)
            on_device, on_host = plan.fragments.on_device(memory), plan.fragments.on_host(arena.bytes, plan.layout)
            memory_of_both = TierMemory(on_device, on_host, plan.verifies, sums)
            self.blocks = HostBlocks(memory_of_both, arena, plan.fragments)
            """The host blocks, for a remote."""
            engine = self._guard.build_engine(self, memory_of_both)
            self.engine = FragmentEngine(engine, plan.fragments)
            """Copies whole blocks."""
        except BaseException:
            self._guard.give_up()
            raise

    def also(self, close: Callable[[float], bool]) -> None:
        """Notes what else touches the host memory and how it is ended, as ``MemoryGuard.also`` does."""
        self._guard.also(self, close)

    def check_here(self) -> None:
        """Raises ``CacheClosed`` in a forked child."""
        self._guard.check_here()

    def close(self) -> bool:
        """Ends all copies, in 30 s at most, and gives the memory back; False if a copy may still write there.

        Called again, it looks again, for a moment. From any thread.
        """
        return self._guard.close()


def _check_shared(plan: HostPlan, shared: SharedMemory | None) -> None:
    """Raises ``ConfigError`` unless it is the memory that the plan's workers share."""
    if shared is not None:
        check_type(shared, SharedMemory, "shared")
    has = (1, 0) if shared is None else (shared.ranks, shared.name.num_bytes)
    needs = (plan.sharers, plan.shared_bytes if plan.sharers > 1 else 0)
    if has != needs:
        raise ConfigError(
            f"the plan is of {needs[0]} workers that share {needs[1]:,} bytes, and shared is of {has[0]} and {has[1]:,}"
        )


def memory_bytes(memory: npt.NDArray[np.uint8] | torch.Tensor) -> int:
    """Bytes of the engine's memory. Raises ``ConfigError`` for what is none."""
    if isinstance(memory, np.ndarray):
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.carray:
            raise ConfigError("memory must be uint8 [bytes], contiguous and writable")
        return memory.size
    flat = getattr(memory, "dtype", None) is not None and hasattr(memory, "data_ptr")
    if not flat or memory.element_size() != 1 or memory.dim() != 1 or not memory.is_contiguous():
        raise ConfigError("memory must be uint8 [bytes], contiguous and writable")
    return memory.numel()
