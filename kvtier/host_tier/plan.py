"""The plan of a host tier: what follows from its options alone, in each process the same.

Owns       the layout of the host memory, and the places of fragments in both memories.
Promises   options that cannot work raise a typed error here; nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cpu_offload.shared_memory import PAGE
from kvtier.geometry.layout import Layout
from kvtier.geometry.options import check_choices
from kvtier.geometry.outside import OutsideGroup, OutsideSpec
from kvtier.geometry.sizing import parse_bytes
from kvtier.host_tier.fragments import Fragments
from kvtier.machine.errors import ConfigError, MemoryUnavailable
from kvtier.machine.integers import integer, shown

MOST_WORKERS = 2**16
FINER = 8
"""A host tier's slabs are so many times as fine as a device's. It moves no block, so a slab changes hands as it is,
with whatever in it is still wanted: what a turn leaves superseded must fill whole slabs to go alone."""


class HostPlan:
    """A tier of ``groups`` in ``memory_bytes`` bytes of device memory; ``host_memory``, ``verify`` as for ``HostTier``.

    ``sharers``: workers that have the same bytes in their blocks, as latents (MLA) have on all ranks. They keep one
    copy in one host memory. Raises ``ConfigError`` and ``MemoryUnavailable``.
    """

    def __init__(
        self,
        groups: Sequence[OutsideGroup],
        memory_bytes: int,
        host_memory: str | int,
        verify: str = "full",
        sharers: int = 1,
    ) -> None:
        check_choices(verify=verify)
        number = integer(sharers)
        if number is None or not 1 <= number <= MOST_WORKERS:
            raise ConfigError(f"sharers must be an integer in 1..{MOST_WORKERS:,}, got {shown(sharers)}")
        self.sharers = number
        self.verifies = verify == "full"
        self.spec = OutsideSpec(groups)
        self.memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
        """Bytes of device memory."""
        num_blocks = [group.num_blocks for group in self.spec.groups]
        self.fragments = Fragments([group.fragments for group in self.spec.groups], num_blocks, self.memory_bytes)
        self.layout = _layout(self.fragments.block_bytes.tolist(), parse_bytes(host_memory, "host_memory"))

    @property
    def first_sum(self) -> int:
        """Where checksums begin in shared memory: behind the blocks, at a page."""
        return -(-self.layout.num_bytes // PAGE) * PAGE

    @property
    def num_sums(self) -> int:
        """Checksums of the host tier: one of each block's fragment."""
        return int(self.layout.rows[self.fragments.group].sum())

    @property
    def shared_bytes(self) -> int:
        """Bytes of the memory that ``sharers`` workers share."""
        return self.first_sum + 8 * self.num_sums


def check_plan(plan: object) -> None:
    """Raises ``ConfigError`` unless it is a ``HostPlan``."""
    if not isinstance(plan, HostPlan):
        raise ConfigError(f"plan must be a kvtier.HostPlan, got {shown(plan)}")


def _layout(sizes: list[int], num_bytes: int) -> Layout:
    """Pools that share slabs. Separate pools if there is one group, or too little memory for slabs."""
    layout = Layout.of_slabs(sizes, num_bytes, finer=FINER) if len(sizes) > 1 else None
    if layout is None:
        blocks = num_bytes // sum(sizes) - 1
        if blocks < 1:
            raise MemoryUnavailable(
                f"host_memory is {num_bytes:,} bytes, but one block and the null block of every group take "
                f"{2 * sum(sizes):,}; raise host_memory"
            )
        layout = Layout.fixed(sizes, [blocks] * len(sizes))
    return layout
