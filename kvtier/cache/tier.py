"""One tier: the memory of its blocks and the books of their pools.

Owns       an arena, its pools, and the name of the setting that gave its size.
Promises   an impossible size is refused before anything is taken. A size that does not fit is refused by the setting's
           name. Keeps I22.
Does not   move blocks between tiers: ``cpu_offload`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtier.geometry.layout import Layout, Seams
from kvtier.geometry.sizing import fixed_blocks, layout_of, parse_bytes, spare_blocks
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import ConfigError, MemoryUnavailable
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools
from kvtier.pools.checked import CheckedPools

MakeMemory = Callable[[int, str, Seams], npt.NDArray[np.uint8] | None]
"""(bytes, setting, places where it may be cut) -> memory, uint8 [bytes], or None for ordinary memory."""


class Tier:
    """A tier with this ``layout``, its arena on ``device``; ``setting`` is the option that gave its size."""

    pools: BlockPools
    """Set once there is memory."""

    def __init__(self, spec: CacheSpec, layout: Layout, device: str, setting: str) -> None:
        self.setting = setting
        self.arena = Arena(spec, layout, device)

    def check(self, reserved_bytes: int = 0) -> None:
        """Raises what ``allocate`` would. ``reserved_bytes`` are promised to other owners, and not touched yet."""
        self.arena.check(self.setting, reserved_bytes)

    def allocate(self, make_memory: MakeMemory | None = None) -> None:
        """Takes the memory, from ``make_memory`` if it returns any. Raises ``MemoryUnavailable``."""
        arena = self.arena
        memory = None if make_memory is None else make_memory(arena.num_bytes, self.setting, arena.layout.seams)
        if memory is None:
            arena.allocate(self.setting)
        else:
            arena.use(memory)

    def open_books(self, checked: bool = False) -> None:
        """Sets the pools up, all of their blocks empty; ``checked``: as ``CheckedPools``. Raises
        ``MemoryUnavailable``."""
        with self.room():
            self.pools = (CheckedPools if checked else BlockPools)(self.arena.layout)

    @contextmanager
    def room(self) -> Iterator[None]:
        """Turns a bare ``MemoryError`` in the set-up of this tier's books into an error that names the fix."""
        try:
            yield
        except MemoryUnavailable:
            raise
        except MemoryError as problem:
            layout, setting = self.arena.layout, self.setting
            raise MemoryUnavailable(
                f"{setting}: {layout.num_bytes:,} bytes are {int(layout.rows.sum()):,} blocks, whose bookkeeping does "
                f"not fit into memory ({problem or 'out of memory'}); lower {setting} or raise block_tokens"
            ) from problem


def device_tier(spec: CacheSpec, device: str, num_bytes: str | int | None, blocks: Mapping[str, int] | None) -> Tier:
    """The tier that the model reads and writes: sized in bytes, or in usable blocks per group."""
    if (num_bytes is None) == (blocks is None):
        raise ConfigError("give either device_bytes or device_blocks")
    if blocks is not None:
        sizes = [group.block_bytes for group in spec.groups]
        layout = Layout.fixed(sizes, fixed_blocks(spec, blocks, "device_blocks"), spare_blocks(spec))
        return Tier(spec, layout, device, "device_blocks")
    assert num_bytes is not None
    layout = layout_of(spec, parse_bytes(num_bytes, "device_bytes"), "device_bytes", spare_blocks(spec))
    return Tier(spec, layout, device, "device_bytes")


def host_tier(
    spec: CacheSpec, device: str, num_bytes: str | int | None, blocks: Mapping[str, int] | None
) -> Tier | None:
    """The tier behind it, likewise; None if it has no size. It has no memory either if ``device`` is "meta"."""
    size = 0 if num_bytes is None else parse_bytes(num_bytes, "host_bytes")
    place = "meta" if device == "meta" else "cpu"
    if blocks is not None:
        if size:
            raise ConfigError("give either host_bytes or host_blocks, not both")
        sizes = [group.block_bytes for group in spec.groups]
        return Tier(spec, Layout.fixed(sizes, fixed_blocks(spec, blocks, "host_blocks")), place, "host_blocks")
    return Tier(spec, layout_of(spec, size, "host_bytes"), place, "host_bytes") if size else None
