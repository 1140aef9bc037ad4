"""The path of small fragments across the link: the driver's copy engines, or a kernel that reads host memory.

Promises   the choice is a pure function of the transfer and of a short calibration on this very machine. Without a
           measurement the copy engines do it. The kernel takes compute from the forward passes, so it has to be clearly
           faster.
Does not   copy: the caller of the calibration passes a function that copies and returns seconds.

A batched copy from host to device runs at 5 to 7 GB/s for fragments of 4 to 24 KiB (vLLM PR 42212, H100). From 28 KiB
on it runs at link speed. A kernel does not have that cliff. Blocks here hold all layers of a group, so most never come
near it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvtier.cpu_offload.transfer import Direction


class CopyPath(Enum):
    """How bytes cross the link."""

    BATCH = "one cuMemcpyBatchAsync a transfer"
    LOOP = "one cudaMemcpyAsync a copy"
    KERNEL = "a kernel that addresses host memory"


MANY = 64
"""Fewer fragments than this are not worth a kernel's launch, whatever their size."""
CLEARLY = 1.2
FRAGMENT_BYTES = (4 << 10, 8 << 10, 16 << 10, 28 << 10)
"""The measured sizes; longer fragments always go to the copy engines."""
WHOLE_BYTES = 64 << 20
"""Bytes moved at once to measure the link itself."""

Speeds = Mapping[tuple[CopyPath, Direction, int], float]
Measure = Callable[[CopyPath, Direction, int, int], float]
"""(path, direction, bytes of a fragment, number of fragments) -> seconds."""


@dataclass(frozen=True)
class Calibration:
    """The measurements made when the engine was built, in GB/s (1e9 bytes)."""

    engine: CopyPath = CopyPath.BATCH
    """How the copy engines are driven: BATCH, or LOOP if the driver has no batched copy."""
    link_gbps: Mapping[Direction, float] = field(default_factory=dict)
    """One long copy each way."""
    fragment_gbps: Speeds = field(default_factory=dict)
    """By path, direction and bytes of a fragment."""


def calibrate(measure: Measure, engine: CopyPath, room_bytes: int, with_kernel: bool) -> Calibration:
    """Measures the link and, if there is a kernel, small fragments by either path. ``room_bytes`` may be moved.

    Each load brings back the bytes of the store before it: an engine's own memory keeps its content.
    """
    whole = min(WHOLE_BYTES, room_bytes)
    link = (
        {d: whole / max(measure(engine, d, whole, 1), 1e-9) / 1e9 for d in (Direction.STORE, Direction.LOAD)}
        if whole
        else {}
    )
    fragments: dict[tuple[CopyPath, Direction, int], float] = {}
    for size in FRAGMENT_BYTES if with_kernel else ():
        count = min(2048, room_bytes // (2 * size))
        if count < MANY:
            continue
        for path in (engine, CopyPath.KERNEL):
            for d in Direction:  # the store first
                fragments[path, d, size] = size * count / max(measure(path, d, size, count), 1e-9) / 1e9
    return Calibration(engine, link, fragments)


def choose_path(calibration: Calibration, direction: Direction, count: int, num_bytes: int) -> CopyPath:
    """The path of a transfer of ``count`` copies and ``num_bytes`` bytes in all.

    A transfer is judged by the smallest measured fragment size that is not below its mean fragment size.
    """
    engine = calibration.engine
    if count < MANY:
        return engine
    sizes = sorted(size for path, d, size in calibration.fragment_gbps if path is CopyPath.KERNEL and d is direction)
    size = next((size for size in sizes if size * count >= num_bytes), None)
    if size is None:
        return engine
    kernel = calibration.fragment_gbps[CopyPath.KERNEL, direction, size]
    return CopyPath.KERNEL if kernel > CLEARLY * calibration.fragment_gbps[engine, direction, size] else engine
