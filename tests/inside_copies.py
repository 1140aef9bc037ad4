"""The second half of ``inside``: remote tiers, copy engines, CUDA, the canary and the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import KVCache

if TYPE_CHECKING:
    import pytest

    from kvtier import HostTier
    from kvtier.cpu_offload.engines.cuda.driver import CudaApi
    from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory
    from kvtier.cpu_offload.engines.cuda.link import CudaLink
    from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime
    from kvtier.cpu_offload.engines.streams import StreamsEngine
    from kvtier.cpu_offload.engines.submission import Submission
    from kvtier.cpu_offload.tier_memory import TierMemory
    from kvtier.cpu_offload.transfer import Direction, Transfer
    from kvtier.pools.arena import Arena
    from kvtier.pools.block_pool import Ids
    from kvtier.remote.known import Changes, Known
    from kvtier.remote.tier import RemoteTier
    from kvtier.testing import CanaryEngine, Faults, SimulatedDevice, SimulatedEngine


# --- a remote tier -----------------------------------------------------------------


def known_objects(remote: RemoteTier) -> set[tuple[str, bytes]]:
    """Names that the tier takes for stored."""
    return set(remote._known._names)


def unsure_objects(remote: RemoteTier) -> tuple[set[tuple[str, bytes]], set[tuple[str, bytes]], set[tuple[str, bytes]]]:
    """Names that are said to be there, that were believed to be, and that are being deleted."""
    known = remote._known
    return {name for name, is_told in known._names.items() if is_told}, set(known._lost), remote._spills._held


def told_objects(known: Known) -> set[tuple[str, bytes]]:
    """Names that listeners should believe to be stored."""
    return {name for name, is_told in known._names.items() if is_told}


def untold(changes: Changes) -> int:
    """Names that wait for a listener."""
    return len(changes._news)


def open_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of stores open names as where the system has no openat2."""
    monkeypatch.setattr("kvtier.remote.backends.folder._has_openat2", lambda: False)


def texts_to_spill(remote: RemoteTier) -> list[Any]:
    """Those that are due: their keys and ends, the parts that are left of them, and the next one."""
    return list(remote._spills._texts)


def spills_have_seen(remote: RemoteTier, settled: int) -> bool:
    """Whether nothing has ended since spills were last looked for."""
    return remote._spills._settled_seen == settled


def breaker_failures(remote: RemoteTier) -> list[int]:
    """In a row, of questions and of moves."""
    return list(remote.breaker._failures.values())


def questions(remote: RemoteTier) -> dict[int, float]:
    """Tickets, and when they are given up."""
    return {ticket: until_s for ticket, (_, until_s) in remote._questions.items()}


# --- copy engines ---------------------------------------------------------------------------------


def submission(engine: StreamsEngine) -> Submission:
    """What gives copies to streams."""
    return engine._submission


def streams(engine: StreamsEngine) -> dict[Direction, Any]:
    """The stream of each direction."""
    return engine._streams


def first_copy(engine: StreamsEngine, direction: Direction) -> Any:
    """The oldest copy of a direction that has not been seen to end."""
    return engine._lanes[direction].copies[0]


def copy_of(engine: StreamsEngine, transfer: Transfer) -> Any:
    """The copy of a transfer under way."""
    return engine._under_way[transfer.ticket]


def waits_until_given(engine: StreamsEngine, copy: Any) -> bool:
    """Whether the stream of ``copy`` gets it within a minute."""
    return engine._is_given(copy, 60.0)


def is_busy(engine: Any) -> bool:
    """Whether a ``ThreadsEngine`` has copies that have not ended."""
    return bool(engine._unfinished)


def stored_sums(memory: TierMemory, groups: np.ndarray, hosts: np.ndarray) -> np.ndarray:
    """The checksums that were noted for host blocks."""
    return memory._sums[memory._first_sum[groups] + hosts]


def spans(of_arena: Arena, groups: Ids, blocks: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Where blocks begin in an arena, and their bytes."""
    from kvtier.cpu_offload.tier_memory import TierMemory

    return TierMemory._spans(of_arena, groups, blocks)


# --- CUDA -----------------------------------------------------------------------------------------


def api(owner: CudaRuntime | CudaLink) -> CudaApi:
    """The calls of the driver."""
    return owner._api


def driver_version(runtime: CudaRuntime) -> int:
    """The version of the driver, 12080 for 12.8."""
    return int(runtime._api._runtime.driverGetVersion())


def sums(runtime: CudaRuntime) -> Any:
    """What takes checksums on the device."""
    return runtime._sums


def use_sums(link: CudaLink, made: Any) -> None:
    """``made`` takes checksums on the device from now on."""
    link._sums = made


def use_starts(runtime: CudaRuntime, starts: Any) -> None:
    """The runtime takes these for the registrations of the host memory."""
    runtime._starts = starts


def held(runtime: CudaRuntime) -> dict[int, Any]:
    """What is kept until an event has happened."""
    return runtime._held


def beside(runtime: CudaRuntime, stream: int) -> int:
    """The stream that takes the checksums of a copy stream."""
    return runtime._beside[stream]


def pinned_memory(cache: KVCache) -> HostMemory:
    """The host memory of a cache on a GPU."""
    return cache.copy_engine.runtime._on_close.__self__


def mapping(memory: HostMemory) -> Any:
    """What the operating system has mapped for it."""
    return memory._map


# --- canary and simulated device ------------------------------------------------------------------


def views(canary: CanaryEngine) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """K and V of every layer, by group, as words."""
    return canary._views


def stop_poisoning(canary: CanaryEngine) -> None:
    """The canary leaves blocks that nobody holds as they are."""
    canary._poison = False


def set_faults(device: SimulatedDevice, faults: Faults) -> None:
    """The device has these faults from now on."""
    device._faults = faults


def set_forward_s(device: SimulatedDevice, forward_s: float) -> None:
    """Forward passes take so long from now on."""
    device._forward_s = forward_s


def touch(device: SimulatedDevice, stream: Any, groups: Ids, blocks: Ids, writes: bool) -> None:
    """A stream reads or writes blocks of the device."""
    device._begin_op(stream)
    device._touch(stream, "device", groups, blocks, writes=writes)


def put_late(device: SimulatedDevice, direction: Direction, job: Callable[[], None]) -> None:
    """The stream of a direction gets ``job`` with its lag."""
    device._late.put(direction, job)


def pass_time(engines: list[SimulatedEngine], ticks: float) -> None:
    """On the clocks of copies."""
    for engine in engines:
        engine._now += ticks


def copy_engine(tier: HostTier) -> Any:
    """The copy engine of fragments."""
    return tier._bytes.engine.engine


def host_bytes(tier: HostTier) -> np.ndarray:
    """The host memory, uint8 [bytes]."""
    return tier._bytes.engine.memory.arenas[1].bytes
