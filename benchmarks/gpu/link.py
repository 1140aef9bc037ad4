"""The link itself, and the engine on it: what one long pinned copy reaches, and how near real layouts come.

Every figure is the median of repeats; the raw peaks are the best of theirs, so no engine is flattered by them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.gpu.figures import Budget, Figure
from benchmarks.gpu.rig import GROUPS, TOKENS, Rig, layout
from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.cpu_offload.engines.cuda.driver import CudaApi, copy_each
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration
from kvtier.cpu_offload.engines.cuda.runtime import DeviceSums
from kvtier.cpu_offload.transfer import Direction
from kvtier.geometry.kinds import Kind
from kvtier.geometry.layout import Layout
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.machine.memory_limits import limits
from kvtier.pools.arena import Arena

STORE, LOAD = Direction.STORE, Direction.LOAD
GIB = 1 << 30
LAYOUTS = {"contiguous": 1.0, "half scattered": 0.5, "fully scattered": 0.0}
LARGE_BLOCK = 512 << 10
LOCAL_BYTES = 2 << 30
"""Most that is moved at once of window or chunk blocks: a request has few of them, and only their size is new."""


@dataclass(frozen=True)
class Setup:
    """Where it runs. Tests play the device and shrink everything."""

    api: CudaApi
    device: str
    sums: Callable[[], DeviceSums]
    raw_bytes: int = GIB
    tokens: int = TOKENS
    repeats: int = 5
    pci_bus_id: str = ""
    on_device: Callable[[Arena], None] = lambda arena: None


def on_gpu() -> Setup:
    """The first GPU."""
    from kvtier.cpu_offload.engines.cuda.device_sums import TorchSums, triton_kernel
    from kvtier.cpu_offload.engines.cuda.driver import CuPyApi, cupy_runtime

    bus = str(cupy_runtime().deviceGetPCIBusId(0))
    return Setup(CuPyApi(0), "cuda:0", lambda: TorchSums(triton_kernel()), pci_bus_id=bus)


def run(budget: Budget, setup: Setup | None = None) -> Iterator[Figure]:
    """Raw peaks, then the engine at real block sizes, then what verification costs."""
    setup = setup or on_gpu()
    groups = {name: g for name, g in GROUPS.items() if g.attention.kind is Kind.FULL}
    local = {name: g for name, g in GROUPS.items() if name not in groups}
    most = max(_count(g, setup) * g.block_bytes + g.block_bytes for g in groups.values())
    room = int(min([limit.num_bytes for limit in limits() if not limit.for_pinning], default=most) * 0.6)
    size = max(min(most, room), 2 * setup.raw_bytes)
    pins = Registration(setup.api.host_register, setup.api.host_unregister)
    for huge in (True, False):
        tried = HostMemory(2 * setup.raw_bytes, pins, pci_bus_id=setup.pci_bus_id, huge_pages=huge)
        tried.release()
        took = tried.report.fault_s, tried.report.pin_s
        name = f"{2 * setup.raw_bytes >> 20} MiB, {'huge' if huge else 'small'} pages, to fault in and pin"
        yield Figure("link", name, sum(took), "s", note=f"{took[0]:.2f} + {took[1]:.2f}")
        del tried
    pinned = HostMemory(size, pins, pci_bus_id=setup.pci_bus_id)
    try:
        rate = size / max(pinned.report.fault_s + pinned.report.pin_s, 1e-9) / 1e9
        notes = "; ".join(pinned.report.notes)
        yield Figure("link", f"fault in and pin {size / GIB:.1f} GiB", rate, "GB/s", note=notes)
        peaks, duplex = raw(setup, pinned)
        for direction, peak in peaks.items():
            yield Figure("link", f"raw {direction.value}, {setup.raw_bytes >> 20} MiB pinned", peak, "GB/s")
        yield Figure("link", "raw duplex, sum", duplex, "GB/s")
        for name, group in groups.items():
            if budget.left_s < 15.0:
                yield Figure("engine", f"{name}: not run, no time is left", 0.0, "GB/s", at_least=1.0)
                continue
            yield from engine(setup, pinned, name, group, peaks, duplex)
        for name, group in local.items():
            if budget.left_s < 15.0:
                yield Figure("engine", f"{name}: not run, no time is left", 0.0, "GB/s", at_least=1.0)
                continue
            yield from local_blocks(setup, pinned, name, group, peaks)
    finally:
        pinned.release()


def _count(group: GroupSpec, setup: Setup) -> int:
    return setup.tokens // group.block_tokens


def raw(setup: Setup, pinned: HostMemory) -> tuple[dict[Direction, float], float]:
    """Best GB/s of one long copy each way, and of both ways at once."""
    api, n = setup.api, setup.raw_bytes
    spec = CacheSpec([GroupSpec("raw", GROUPS["gpt-oss-20b"].attention, 1, 1, n // 64)])
    arena = Arena(spec, Layout.fixed([spec.groups[0].block_bytes], [1]), setup.device)
    arena.allocate("raw")
    setup.on_device(arena)
    streams = {d: api.new_stream(d is LOAD) for d in Direction}

    def copy(*directions: Direction) -> float:
        begun = time.perf_counter()
        for d in directions:
            host = pinned.address + (n if len(directions) > 1 and d is LOAD else 0)
            device = arena.address + (n if len(directions) > 1 and d is LOAD else 0)
            dst, src = (host, device) if d is STORE else (device, host)
            at = np.arange(0, n, _step(n, pinned), dtype=np.uint64)
            sizes = np.minimum(at + np.uint64(_step(n, pinned)), np.uint64(n)) - at
            copy_each(api.copy_function(), Copies(at + np.uint64(dst), at + np.uint64(src), sizes), streams[d])
        for d in directions:
            api.synchronize(streams[d])
        return len(directions) * n / (time.perf_counter() - begun) / 1e9

    peaks = {d: max(copy(d) for _ in range(setup.repeats + 1)) for d in Direction}
    both = max(copy(STORE, LOAD) for _ in range(setup.repeats + 1))
    for stream in streams.values():
        api.drop_stream(stream)
    arena.free()
    return peaks, both


def load_peak(setup: Setup) -> float:
    """Best GB/s of one long copy from pinned host memory to the device."""
    pins = Registration(setup.api.host_register, setup.api.host_unregister)
    pinned = HostMemory(2 * setup.raw_bytes, pins, pci_bus_id=setup.pci_bus_id)
    try:
        return raw(setup, pinned)[0][LOAD]
    finally:
        pinned.release()


def _step(n: int, pinned: HostMemory) -> int:
    """No copy across registrations; with pieces of gigabytes that is one copy."""
    return n if len(pinned.starts) == 1 else min(n, int(pinned.starts[1] - pinned.starts[0]))


def engine(
    setup: Setup, pinned: HostMemory, name: str, group: GroupSpec, peaks: dict[Direction, float], duplex: float
) -> Iterator[Figure]:
    """One model's full-attention blocks: layouts, both ways at once, submission, verification."""
    count = min(_count(group, setup), pinned.num_bytes // group.block_bytes - 1)
    rig = Rig(group, count, pinned, setup.api, setup.device)
    setup.on_device(rig.device)
    try:
        yield from _layouts(rig, name, count, peaks, setup.repeats)
        device, host = layout(count, 1.0 - 1500 / count)
        rig.seconds(rig.transfer(LOAD, device, host))
        cpu, copies = rig.runtime.submit_s, rig.runtime.counts["copies"]
        rig.seconds(rig.transfer(LOAD, device, host))
        cpu, copies = rig.runtime.submit_s - cpu, rig.runtime.counts["copies"] - copies
        yield Figure("submit", f"{name}, whole, {copies:,} copies", 1e3 * cpu, "ms", at_most=1.0)
        yield from _duplex(rig, name, group, count, duplex, setup.repeats)
        plain = _median(rig, layout(count, 0.5), setup.repeats)
    finally:
        rig.close()
    yield from _verified(setup, pinned, name, group, count, plain)


def local_blocks(
    setup: Setup, pinned: HostMemory, name: str, group: GroupSpec, peaks: dict[Direction, float]
) -> Iterator[Figure]:
    """One model's window or chunk blocks, whose size is their own: layouts."""
    count = min(_count(group, setup), min(pinned.num_bytes, LOCAL_BYTES) // group.block_bytes - 1)
    rig = Rig(group, count, pinned, setup.api, setup.device)
    setup.on_device(rig.device)
    try:
        yield from _layouts(rig, name, count, peaks, setup.repeats)
    finally:
        rig.close()


def _layouts(rig: Rig, name: str, count: int, peaks: dict[Direction, float], repeats: int) -> Iterator[Figure]:
    """Blocks of which more or fewer follow each other, one way at a time, and what the CPU does for a copy."""
    size, kib = count * rig.block_bytes, rig.block_bytes >> 10
    for words, share in LAYOUTS.items():
        device, host = layout(count, share)
        must = 97.0 if share > 0.0 else 93.0 if rig.block_bytes >= LARGE_BLOCK else 91.0
        for d in Direction:
            rates, copies, cpu = [], 0, 0.0
            for _ in range(repeats):
                copies, cpu = rig.runtime.counts["copies"], rig.runtime.submit_s
                rates.append(size / rig.seconds(rig.transfer(d, device, host)) / 1e9)
                copies, cpu = rig.runtime.counts["copies"] - copies, rig.runtime.submit_s - cpu
            rate = statistics.median(rates)
            note = f"{rate:.1f} GB/s, {copies:,} copies, blocks of {kib:,} KiB"
            yield Figure("engine", f"{name} {d.value}, {words}", 100 * rate / peaks[d], "% of raw", must, note=note)
            if d is LOAD and share < 1.0:
                yield Figure(
                    "submit", f"{name}, {copies:,} copies", 1e6 * cpu / copies, "us each", at_most=0.6,
                    note=f"{1e3 * cpu:.2f} ms",
                )  # fmt: skip


def _median(rig: Rig, ids: tuple[np.ndarray, np.ndarray], repeats: int) -> dict[Direction, float]:
    return {d: statistics.median(rig.seconds(rig.transfer(d, *ids)) for _ in range(repeats)) for d in Direction}


def _duplex(rig: Rig, name: str, group: GroupSpec, count: int, raw: float, repeats: int) -> Iterator[Figure]:
    """A store and a load of half of the blocks each, at once."""
    half = count // 2
    device, host = layout(half, 0.5)
    pair = (STORE, device, host), (LOAD, device + np.int32(half), host + np.int32(half))
    seconds = statistics.median(rig.seconds(*(rig.transfer(*p) for p in pair)) for _ in range(repeats))
    rate = 2 * half * group.block_bytes / seconds / 1e9
    yield Figure("engine", f"{name} duplex", 100 * rate / raw, "% of raw duplex", 95.0, note=f"{rate:.1f} GB/s")


def _verified(
    setup: Setup, pinned: HostMemory, name: str, group: GroupSpec, count: int, plain: dict[Direction, float]
) -> Iterator[Figure]:
    """What verify="full" adds to a transfer."""
    rig = Rig(group, count, pinned, setup.api, setup.device, setup.sums())
    setup.on_device(rig.device)
    try:
        ids = layout(count, 0.5)
        rig.seconds(rig.transfer(STORE, *ids))  # compiles the kernel, and notes the sums that the loads compare
        verified = _median(rig, ids, setup.repeats)
        for d in Direction:
            cost = 100 * (verified[d] / plain[d] - 1)
            yield replace(Figure("verify", f"{name} {d.value}", cost, "% longer"), at_most=2.0)
    finally:
        rig.close()
