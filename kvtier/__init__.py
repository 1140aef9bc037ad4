"""kvtier: the KV cache for hybrid-attention language models, in device and host memory.

A name is imported when it is first asked for: ``import kvtier`` alone imports neither NumPy nor numba. ``LLM``,
``AsyncLLM`` and what belongs to them are the reference engine's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.audit.run import Violation
    from kvtier.cache.events import EventKind, KVEvent, KVEvents
    from kvtier.cache.explanation import Explanation, explain
    from kvtier.cache.facade import KVCache
    from kvtier.cache.warmup import WarmUp, warm_up
    from kvtier.coordinator.manager import CacheManager
    from kvtier.coordinator.request import FinishedRequest, Request, Shortage
    from kvtier.coordinator.scheduler import Scheduler
    from kvtier.coordinator.step import GroupView, Step
    from kvtier.geometry.kinds import ChunkedLocal, FullAttention, Part, RecurrentState, SlidingWindow
    from kvtier.geometry.kv_scales import KVScales
    from kvtier.geometry.outside import Fragment, OutsideGroup
    from kvtier.geometry.spec import CacheSpec, GroupSpec
    from kvtier.host_tier.parts import HostHit
    from kvtier.host_tier.plan import HostPlan
    from kvtier.host_tier.scheduler import HostTierScheduler
    from kvtier.host_tier.text import HostText
    from kvtier.host_tier.tier import HostTier
    from kvtier.host_tier.worker import HostTierWorker
    from kvtier.machine.errors import (
        AttentionUnavailable,
        CacheClosed,
        ConfigError,
        DeviceUnavailable,
        DuplicateRequest,
        InvalidRequest,
        InvariantBroken,
        KVTierError,
        MemoryUnavailable,
        NotExact,
        RequestTooLarge,
        StepError,
        TransferError,
        UnsupportedModel,
    )
    from kvtier.machine.journal import Event, Journal
    from kvtier.machine.stats import CacheStats
    from runner import (
        LLM as LLM,
        AsyncLLM as AsyncLLM,
        CompletionOutput as CompletionOutput,
        EngineDead as EngineDead,
        ForwardFailed as ForwardFailed,
        ModelLoadError as ModelLoadError,
        NonFiniteLogits as NonFiniteLogits,
        NonFiniteState as NonFiniteState,
        Overloaded as Overloaded,
        RequestOutput as RequestOutput,
        RequestOutputKind as RequestOutputKind,
        RunnerError as RunnerError,
        SamplingParams as SamplingParams,
        StructuredOutputs as StructuredOutputs,
        UnknownRequest as UnknownRequest,
        needle as needle,
    )

__version__ = "0.1.0"

__all__ = [
    "AttentionUnavailable",
    "CacheClosed",
    "CacheManager",
    "CacheSpec",
    "CacheStats",
    "ChunkedLocal",
    "ConfigError",
    "DeviceUnavailable",
    "DuplicateRequest",
    "Event",
    "EventKind",
    "Explanation",
    "FinishedRequest",
    "Fragment",
    "FullAttention",
    "GroupSpec",
    "GroupView",
    "HostHit",
    "HostPlan",
    "HostText",
    "HostTier",
    "HostTierScheduler",
    "HostTierWorker",
    "InvalidRequest",
    "InvariantBroken",
    "Journal",
    "KVCache",
    "KVEvent",
    "KVEvents",
    "KVScales",
    "KVTierError",
    "MemoryUnavailable",
    "NotExact",
    "OutsideGroup",
    "Part",
    "RecurrentState",
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
    "explain",
    "warm_up",
]

_HOMES = {
    "kvtier.audit.run": "Violation",
    "kvtier.cache.facade": "KVCache",
    "kvtier.coordinator.manager": "CacheManager",
    "kvtier.coordinator.request": "FinishedRequest Request Shortage",
    "kvtier.coordinator.scheduler": "Scheduler",
    "kvtier.coordinator.step": "GroupView Step",
    "kvtier.machine.errors": (
        "AttentionUnavailable CacheClosed ConfigError DeviceUnavailable DuplicateRequest InvalidRequest "
        "InvariantBroken KVTierError MemoryUnavailable NotExact RequestTooLarge StepError TransferError "
        "UnsupportedModel"
    ),
    "kvtier.cache.events": "EventKind KVEvent KVEvents",
    "kvtier.cache.explanation": "Explanation explain",
    "kvtier.geometry.outside": "Fragment OutsideGroup",
    "kvtier.host_tier.parts": "HostHit",
    "kvtier.host_tier.plan": "HostPlan",
    "kvtier.host_tier.text": "HostText",
    "kvtier.host_tier.tier": "HostTier",
    "kvtier.host_tier.worker": "HostTierWorker",
    "kvtier.machine.journal": "Event Journal",
    "kvtier.geometry.kv_scales": "KVScales",
    "kvtier.host_tier.scheduler": "HostTierScheduler",
    "kvtier.geometry.kinds": "ChunkedLocal FullAttention Part RecurrentState SlidingWindow",
    "kvtier.geometry.spec": "CacheSpec GroupSpec",
    "kvtier.machine.stats": "CacheStats",
    "kvtier.cache.warmup": "WarmUp warm_up",
}
"""Each module, and the names that it gives to the package."""
_OF_THE_ENGINE = (
    "AsyncLLM CompletionOutput EngineDead ForwardFailed LLM ModelLoadError NonFiniteLogits NonFiniteState Overloaded "
    "RequestOutput RequestOutputKind RunnerError SamplingParams StructuredOutputs UnknownRequest needle"
)
"""Names of the reference engine. ``__all__`` lacks them: ``import *`` would import torch and transformers."""
_FORMER = {"RelayedBooks": "HostTierScheduler", "HostWorker": "HostTierWorker"}
"""Names that programs may still use."""


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
    for module, names in _HOMES.items():
        if name in names.split():
            found = globals()[name] = getattr(import_module(module), name)
            return found
    if name in _OF_THE_ENGINE.split():
        from kvtier.machine.reference_engine import load

        found = globals()[name] = getattr(load(), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_THE_ENGINE.split()})
