"""kvtier: the KV cache for hybrid-attention language models, in device and host memory."""

from kvtier.audit import Violation
from kvtier.cache import KVCache
from kvtier.coordinator.request import FinishedRequest, Request, Shortage
from kvtier.coordinator.scheduler import Scheduler
from kvtier.coordinator.step import GroupView, Step
from kvtier.errors import (
    AttentionUnavailable,
    CacheClosed,
    ConfigError,
    DeviceUnavailable,
    DuplicateRequest,
    InvalidRequest,
    InvariantBroken,
    KVTierError,
    MemoryUnavailable,
    RequestTooLarge,
    StepError,
    TransferError,
    UnsupportedModel,
)
from kvtier.events import EventKind, KVEvent, KVEvents
from kvtier.kv_scales import KVScales
from kvtier.spec import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.stats import CacheStats
from kvtier.warmup import WarmUp, warm_up

__version__ = "0.1.0"

__all__ = [
    "AttentionUnavailable",
    "CacheClosed",
    "CacheSpec",
    "CacheStats",
    "ChunkedLocal",
    "ConfigError",
    "DeviceUnavailable",
    "DuplicateRequest",
    "EventKind",
    "FinishedRequest",
    "FullAttention",
    "GroupSpec",
    "GroupView",
    "InvalidRequest",
    "InvariantBroken",
    "KVCache",
    "KVEvent",
    "KVEvents",
    "KVScales",
    "KVTierError",
    "MemoryUnavailable",
    "Request",
    "RequestTooLarge",
    "Scheduler",
    "Shortage",
    "SlidingWindow",
    "Step",
    "StepError",
    "TransferError",
    "UnsupportedModel",
    "Violation",
    "WarmUp",
    "warm_up",
]
