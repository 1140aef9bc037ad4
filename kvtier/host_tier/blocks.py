"""Whole blocks of a host tier that is copied in fragments, for a remote tier."""

from __future__ import annotations

from kvtier.cpu_offload.tier_memory import ByteArena, TierMemory
from kvtier.host_tier.fragments import Fragments
from kvtier.pools.block_pool import Ids


class HostBlocks:
    """The host blocks of ``host``, which ``memory`` copies by ``fragments``."""

    def __init__(self, memory: TierMemory, host: ByteArena, fragments: Fragments) -> None:
        self._memory = memory
        self._fragments = fragments
        self.arenas = (memory.arenas[0], host)

    def changed_in_host(self, groups: Ids, hosts: Ids) -> int:
        """Fragments that have changed; 0 unless blocks are verified."""
        return self._memory.changed_in_host(*self._fragments.of_blocks(groups, hosts))

    def note_host(self, groups: Ids, hosts: Ids) -> None:
        """Keeps the checksums that all fragments have now."""
        self._memory.note_host(*self._fragments.of_blocks(groups, hosts))
