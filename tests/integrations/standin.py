"""vLLM, where it is installed; elsewhere the few classes that the connector inherits from, by their documentation.

``check_call``: every call of the fake engine is bound to the signature of vLLM's own base class, if it is there.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import pickle
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

HAS_VLLM = importlib.util.find_spec("vllm") is not None
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
EVENTS = "vllm.distributed.kv_events"
UTILS = "vllm.v1.core.kv_cache_utils"
HASHING = "vllm.utils.hashing"
DISTRIBUTED = "vllm.distributed"
STATES = "vllm.model_executor.layers.mamba.mamba_utils"
SOURCES = "vllm.v1.metrics.cache_hit_source"


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class CacheHitSource(enum.StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


@dataclass
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class Connector:
    """What of ``KVConnectorBase_V1`` is not abstract."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._connector_metadata = None
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}


@dataclass
class Stats:
    data: dict[str, Any] = field(default_factory=dict)


class PromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        self._counter_cls, self._gauge_cls = metric_types["counter"], metric_types["gauge"]


class Event:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class BlockStored(Event): ...


class BlockRemoved(Event): ...


def install() -> None:
    """Puts the stand-ins where vLLM's modules would be."""
    if HAS_VLLM or "vllm" in sys.modules:
        return
    contents: dict[str, dict[str, Any]] = {
        BASE: {
            "KVConnectorBase_V1": Connector,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": TransferResults,
            "SupportsHMA": type("SupportsHMA", (), {}),
            "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
            "KVConnectorWorkerMetadata": type("KVConnectorWorkerMetadata", (), {}),
        },
        METRICS: {"KVConnectorStats": Stats, "KVConnectorPromMetrics": PromMetrics},
        EVENTS: {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "MEDIUM_CPU": "CPU"},
        UTILS: {
            "maybe_convert_block_hash": lambda block_hash: block_hash,
            "resolve_none_hash_seed": lambda function: "a seed",
        },
        HASHING: {"get_hash_fn_by_name": lambda name: name},
        SOURCES: {"CacheHitSource": CacheHitSource},
        STATES: {"get_conv_state_layout": lambda: "SD"},
        DISTRIBUTED: {"get_tensor_model_parallel_rank": lambda: 0, "get_tp_group": lambda: None},
        "vllm": {"__version__": "0.32.0"},
    }
    for name, content in contents.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:n]), ModuleType(".".join(parts[:n])))
            module.__path__ = []  # type: ignore[attr-defined]
        vars(sys.modules[name]).update(content)


class Group:
    """Ranks that say what they have to say in their order, rank 0 first."""

    def __init__(self) -> None:
        self.rank = 0
        self.said = b""

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        if self.rank == src:
            self.said = pickle.dumps(obj)
        return pickle.loads(self.said)


GROUP = Group()


def be_rank(rank: int) -> None:
    """What this process says of itself from now on."""
    module = importlib.import_module(DISTRIBUTED)
    module.get_tensor_model_parallel_rank, module.get_tp_group = lambda: rank, lambda: GROUP
    GROUP.rank = rank


def check_call(name: str, *args: Any, **options: Any) -> None:
    """Raises ``TypeError`` for a call that vLLM's base class would refuse."""
    if not HAS_VLLM:
        return
    base = sys.modules[BASE]
    owner = base.SupportsHMA if name == "request_finished_all_groups" else base.KVConnectorBase_V1
    inspect.signature(getattr(owner, name)).bind(None, *args, **options)
