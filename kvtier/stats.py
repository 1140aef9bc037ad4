"""What the tiers are doing, as plain frozen values. Counters never fall; gauges are read off the pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PoolStats:
    """One group in one tier. All but the last three are numbers of blocks; usable = empty + cached + fenced + held +
    quarantined + lent.
    """

    usable: int
    empty: int
    cached: int
    """Free, and findable until handed out."""
    fenced: int
    """Free, but a store still reads them."""
    held: int
    """By requests or transfers."""
    quarantined: int
    """An overdue copy may still touch them."""
    lent: int
    """Other groups use their memory now."""
    peak_held: int
    evicted: int
    """Counter: cached blocks handed out."""
    block_bytes: int
    block_tokens: int


@dataclass(frozen=True)
class TransferStats:
    """Copies between the tiers; counters but for ``live``."""

    live: int
    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    failed_stores: int
    failed_loads: int
    corrupt_blocks: int
    """Loaded blocks that failed their checksum (``verify="full"``); their host blocks are quarantined until a reset."""
    expired: int
    dropped_blocks: int
    """Blocks not stored: the host tier had none to give, or stores hung."""


@dataclass(frozen=True)
class LinkStats:
    """A GPU's link to its host tier. Speeds in GB/s (1e9 bytes), measured when the cache was built."""

    path: str
    """How the copy engines are driven: "batch" (one driver call a transfer) or "loop" (one a copy)."""
    batch_abi: int | None
    """CUDA version whose batched copy is called; None without one."""
    store_gbps: float | None
    """One long copy from device to host; None if it was not measured."""
    load_gbps: float | None
    kernel_fragment_bytes: Mapping[str, list[int]]
    """By direction, the measured fragment sizes that go through a kernel because it was clearly faster."""
    transfers: int
    """Counter, as are the following."""
    blocks: int
    copies: int
    """Descriptors that the driver was given: blocks, neighbours merged."""
    submit_s: float
    """Seconds of CPU that giving the streams their copies took."""
    pinned_bytes: int = 0
    pieces: int = 0
    """Registrations that the pinned memory consists of."""
    numa_node: int | None = None
    """The node that the pinned memory was bound to, the GPU's; None if it was not."""
    fault_s: float = 0.0
    """Seconds that faulting it in took, and pinning it."""
    pin_s: float = 0.0
    notes: tuple[str, ...] = ()
    """What could not be done for it, and why."""


@dataclass(frozen=True)
class CacheStats:
    """A snapshot. ``device`` and ``host`` map group names to pools; ``host`` is empty without a host tier."""

    device: Mapping[str, PoolStats]
    host: Mapping[str, PoolStats]
    transfers: TransferStats
    device_bytes: int
    """Bytes allocated on the device, null blocks included."""
    host_bytes: int
    device_capacity_tokens: int
    """Tokens of one full-attention context that fit the device (of a local group's, if there is no full group)."""
    host_capacity_tokens: int
    prompt_tokens: Mapping[str, int]
    """Counter: prompt tokens of finished requests by source: "device", "host", "computed"."""
    requests: Mapping[str, int]
    """"waiting" and "running" now; "finished" and "preemptions" so far."""
    link: LinkStats | None
    """How bytes cross between a GPU and its host tier; None elsewhere."""
    warmup_s: float
    """Seconds that compiling the bookkeeping loops took when this process built its first cache."""

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return asdict(self)
