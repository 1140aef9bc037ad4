"""The state of the tiers, as plain frozen values. Counters never fall; gauges are read off the pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PoolStats:
    """One group in one tier. All fields except the last three are numbers of blocks.

    usable = empty + cached + fenced + held + quarantined + lent.
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
    """Copies between the tiers; all are counters except ``live``."""

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
    """Transfers with at least one block that did not arrive whole."""
    failed_store_blocks: int
    failed_load_blocks: int
    corrupt_blocks: int
    """Loaded blocks that failed their checksum (``verify="full"``); their host blocks are quarantined until a reset."""
    expired: int
    dropped_blocks: int
    """Blocks not stored: the host tier had no block to give, or stores hung."""
    verified_blocks: int
    """Loaded blocks whose checksum was right (``verify="full"``; 0 otherwise)."""


LATENCY_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True)
class LatencyStats:
    """Durations of successful transfers, from their submission until the scheduling thread saw their end."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    """Counters. ``counts[i]`` took at most ``bounds_s[i]`` seconds and longer than the bound before; the last entry
    counts transfers longer than any bound."""
    sum_s: float


@dataclass(frozen=True)
class LinkStats:
    """A GPU's link to its host tier. Speeds in GB/s (1e9 bytes), measured when the cache was built."""

    store_gbps: float | None
    """One long copy from device to host; None if it was not measured."""
    load_gbps: float | None
    transfers: int
    """Counter, as are the following."""
    blocks: int
    copies: int
    """Given to the driver: blocks, neighbours merged."""
    submit_s: float
    """CPU seconds spent giving copies to the streams."""
    pinned_bytes: int = 0
    pieces: int = 0
    """Number of registrations of the pinned memory."""
    numa_node: int | None = None
    """The node that the pinned memory was bound to, the GPU's; None if it was not bound."""
    fault_s: float = 0.0
    """Seconds spent on faulting it in, and on pinning it."""
    pin_s: float = 0.0
    notes: tuple[str, ...] = ()
    """Failures that are no errors, and why."""


@dataclass(frozen=True)
class RemoteStats:
    """The remote tier. All are counters except ``live``, ``breaker_open``, ``is_on`` and ``kind``."""

    kind: str
    """"file", "s3", "mooncake", ..."""
    is_on: bool
    """False after a reset: content from before has the same names."""
    breaker_open: bool
    """Whether it is left alone, but for a try a second, since calls failed in a row."""
    live: int
    """Spills and fetches under way."""
    looks: int
    """Questions for requests' prefixes."""
    late_looks: int
    """Questions that a request has waited for in vain. Requests that do not wait, since the remote takes too long, are
    not counted."""
    spilled_objects: int
    spilled_bytes: int
    fetched_objects: int
    fetched_bytes: int
    missed_objects: int
    """Objects that had gone before they were read."""
    refused_objects: int
    """Objects that the remote did not take: it is full, or read-only."""
    failed_spills: int
    failed_fetches: int
    """Objects that went wrong."""
    found_names: int
    absent_names: int
    """Objects that questions named, and that were there, or not."""
    damaged_objects: int
    """Objects that were not what they should be; they are deleted."""
    expired: int
    """Calls given up after ``deadline_s``."""
    superseded_texts: int
    """Texts that were not spilled, or not wholly: their conversations went on, and the longer texts are."""
    dropped_texts: int
    dropped_objects: int
    """What was not spilled: too much waited, the remote failed, or the host tier had not all blocks."""
    not_worth: int
    """Fetches left out, since computing is estimated to be faster."""
    no_room: int
    """Fetches left out, since the host tier had no room."""
    reasons: Mapping[str, int]
    """Failures and refusals by the first word of their reason."""
    damages: Mapping[str, int]
    """Damaged objects by kind: "torn", "checksum", "trailer", "name", "namespace", "format", "digest", "other"."""
    look_latency: LatencyStats
    spill_latency: LatencyStats
    fetch_latency: LatencyStats


@dataclass(frozen=True)
class EndStats:
    """Ends of one class, at which windows and chunks may be kept so that hits can end there. The first two are
    counters of requests, each at its first admission."""

    hits: int
    """Requests whose hit ended at such an end."""
    missed: int
    """Requests that full attention alone had found up to such an end, but whose windows or chunks were not there."""
    pays: bool
    """Whether windows and chunks are kept at such ends now."""


@dataclass(frozen=True)
class CacheStats:
    """A snapshot. ``device`` and ``host`` map group names to pools; ``host`` is empty without a host tier.

    If another thread schedules meanwhile, numbers may be of moments that lie a little apart. But numbers of one mapping
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
    """Counter: prompt tokens of finished requests by source: "device", "host", "computed"; and "remote"."""
    requests: Mapping[str, int]
    """"waiting" and "running" now; "finished" and "preemptions" so far."""
    waiting: Mapping[str, int]
    """Requests that wait now, by the answer at their last look:

    "queue" (not looked at yet), "tokens" (the step had none left), "rows" (``max_running``), "blocks" (a shortage).
    Or what it waits for: "stores" (which read its blocks), "transfer" (which brings its prefix), "twin" (a request that
    computes its prefix).
    """
    waits: Mapping[str, int]
    """Counter: how often a request began to wait, by the same reasons except "queue"."""
    finished: Mapping[str, int]
    """Counter: requests ended, by ``finish_reason``."""
    prefix_tokens: Mapping[str, int]
    """Counter: prompt tokens of requests at their first admission: "queried" in all, found on "device" and on
    "host"."""
    ends: Mapping[str, EndStats]
    """By class of ends, such as "prompt" and "answer". All 0 if every group has full attention: then each block is an
    end."""
    shortages: Mapping[str, Mapping[str, int]]
    """Counter: answers "not now" by group, to an "admission" and to a "running" request. A request that waits for
    blocks is answered in every step. A request that lacks blocks of two groups counts in both."""
    sent_back: Mapping[str, int]
    """Counter: requests that had a row and wait again. Preemptions: "blocks" and "rows" that another request got,
    and "cancel" of their step. While their prefix was loaded: "load_failed", "reset" and "disowned"."""
    preempted_for: Mapping[str, int]
    """Counter: preemptions for "blocks", by the group that lacked the most bytes."""
    step_sizes: tuple[int, ...]
    """Counters: committed steps. Entry i counts steps of more than 2**(i - 1) and at most 2**i tokens, the last
    entry all larger steps."""
    computed_tokens: int
    """Counter: tokens of committed steps."""
    generated_tokens: int
    """Counter: tokens appended to requests' texts."""
    cancelled_steps: int
    """Counter."""
    load_latency: LatencyStats
    store_latency: LatencyStats
    stores_hang: bool
    """Nothing is stored now, since the last stores have not ended in time."""
    link: LinkStats | None
    """The bytes' way between a GPU and its host tier; None elsewhere."""
    remote: RemoteStats | None
    """None without ``remote_uri``."""
    warmup_s: float
    """Seconds spent on compiling the loops when this process built its first cache."""

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return asdict(self)
