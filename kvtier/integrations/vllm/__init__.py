"""kvtier's host tier inside vLLM, as a KV connector.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"host_memory": "64GiB"}}'

Imports vLLM, and of kvtier only what needs neither numba nor torch: vLLM reads this module in processes that fail once
numba is there (docs/VLLM.md).
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    """vLLM asks for the connector by name; without vLLM the rest of the package can still be imported."""
    if name != "KvtierConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.integrations.vllm.connector import KvtierConnector

    return KvtierConnector
