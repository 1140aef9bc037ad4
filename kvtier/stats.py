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
    capacity_tokens: int
    """Tokens whose K and V of this group the usable blocks hold."""


@dataclass(frozen=True)
class TransferStats:
    """Copies between the tiers; counters but for ``live``."""

    live: int
    stores: int
    loads: int
    """Transfers that ended, well or not."""
    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    failed_stores: int
    failed_loads: int
    """Transfers of which at least one block did not arrive whole."""
    failed_store_blocks: int
    failed_load_blocks: int
    corrupt_blocks: int
    """Loaded blocks that failed their checksum (``verify="full"``); their host blocks are quarantined until a reset."""
    expired: int
    dropped_blocks: int
    """Blocks not stored: the host tier had none to give, or stores hung."""
    verified_blocks: int
    """Loaded blocks whose checksum was right (``verify="full"``; 0 otherwise)."""


LATENCY_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True)
class LatencyStats:
    """How long transfers took that went well, from their submission until the scheduling thread saw their end."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    """Counters: ``counts[i]`` took at most ``bounds_s[i]`` seconds and longer than the bound before; the last one
    counts all that took longer than any bound."""
    sum_s: float


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
    """A snapshot. ``device`` and ``host`` map group names to pools; ``host`` is empty without a host tier.

    Taken while another thread schedules, numbers may be of moments that lie a little apart; but those of one mapping
    that add up do so in every snapshot.
    """

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
    waiting: Mapping[str, int]
    """Requests that wait now, by the answer that they got when they were last looked at: "queue" (not looked at yet),
    "tokens" (the step had none left), "rows" (``max_running``), "blocks" (a shortage), "stores" (of blocks that it
    would get), "transfer" (one brings its prefix), "twin" (another request computes its prefix)."""
    waits: Mapping[str, int]
    """Counter: how often a request began to wait, by the same reasons but "queue"."""
    finished: Mapping[str, int]
    """Counter: requests ended, by ``finish_reason``."""
    prefix_tokens: Mapping[str, int]
    """Counter: "queried" prompt tokens of requests at their first admission, and those found on "device" and "host"."""
    shortages: Mapping[str, Mapping[str, int]]
    """Counter: answers "not now" by group, to an "admission" and to a "running" request. Who waits for blocks is
    answered in every step; who lacks blocks of two groups counts in both."""
    sent_back: Mapping[str, int]
    """Counter: requests that had a row and wait again: for "blocks" and "rows" that another one got, "cancel" of their
    step (these three are the preemptions); "load_failed", "reset" and "disowned" while their prefix was loaded."""
    preempted_for: Mapping[str, int]
    """Counter: those for "blocks", by the group that lacked the most bytes."""
    step_sizes: tuple[int, ...]
    """Counters: committed steps; entry i counts those of more than 2**(i - 1) and at most 2**i tokens, the last one all
    that are larger."""
    computed_tokens: int
    """Counter: tokens of committed steps."""
    generated_tokens: int
    """Counter: tokens appended to requests' texts."""
    cancelled_steps: int
    """Counter."""
    load_latency: LatencyStats
    store_latency: LatencyStats
    stores_hang: bool
    """Nothing is stored now but a block from time to time, since the last stores have not ended in time."""
    link: LinkStats | None
    """How bytes cross between a GPU and its host tier; None elsewhere."""
    warmup_s: float
    """Seconds that compiling the loops took when this process built its first cache."""

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return asdict(self)
