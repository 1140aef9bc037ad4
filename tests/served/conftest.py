"""Models over the torch attention, and over FlashInfer with stand-in kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import zoo
from families.conftest import family, quiet
from patience import PATIENCE_S, be_patient_with_backends

from kvtier import KVCache, Scheduler
from kvtier.attention.flashinfer import FlashInfer
from runner import LLM
from runner.model.hybrid import HybridModel
from runner.needle import weights_path

__all__ = ["family", "quiet"]

MAX_RUNNING = 5
SMALL = {"full": 200, "sliding": 120, "chunked": 160}
"""Blocks of the needle model."""
Serving = tuple[HybridModel, KVCache, Scheduler]
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
SHAPES = {
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128},
    "gemma4": {"head_dim": 64, "global_head_dim": 128},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT | {"num_attention_heads": 5},
    "kimi_linear": LATENT,
    "deepseek_v32": LATENT | {"index_n_heads": 32, "index_topk": 9, "index_head_dim": 64},
    "glm_moe_dsa": LATENT | {"index_n_heads": 32, "index_topk": 9, "index_head_dim": 64},
}
"""Head sizes that FlashInfer computes, where 64 for all will not do."""


@pytest.fixture(autouse=True)
def stores_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here is about stores that are slow."""
    be_patient_with_backends(monkeypatch)
    monkeypatch.setattr("runner.engine.service.STORE_S", PATIENCE_S)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """FlashInfer's own Python over stand-in kernels, which run at once."""
    if importlib.util.find_spec("flashinfer") is None:
        if os.environ.get("KVTIER_NEED_FLASHINFER"):
            raise ModuleNotFoundError("CI runs these tests: `make test` installs flashinfer-python")
        pytest.skip("flashinfer-python is not installed; `make test` installs what these tests need")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    from attention.flashinfer_standin import on_a_late_stream

    with on_a_late_stream(monkeypatch) as gpu:
        gpu.late = False
        yield gpu


@pytest.fixture
def serve(flashinfer: Any, make_cache: Any, tmp_path: Path) -> Callable[..., Serving]:
    """A tiny model of a family in float16 over FlashInfer, and a small cache for it; ``kv``: its K and V."""

    def start(name: str, blocks: int = 60, **kv: Any) -> Serving:
        folder = zoo.build(name, tmp_path / name, **SHAPES.get(name, {"head_dim": 64}))
        backend = FlashInfer("cpu", workspace_bytes=1 << 10, check_indices=True)
        model = HybridModel.load(folder, dtype="float16", backend=backend)
        if "kv_scales" in kv:
            kv["kv_scales"] = kv["kv_scales"](model)
        cache = make_cache(model.spec(block_tokens=8, **kv), blocks)
        return model, cache, Scheduler(cache, max_batched_tokens=40, max_running=MAX_RUNNING)

    return start


@pytest.fixture(scope="module")
def model() -> HybridModel:
    """The needle model."""
    return HybridModel.load(weights_path())


@pytest.fixture
def llm(model: HybridModel) -> Iterator[LLM]:
    """It, served; audited at the end."""
    with LLM(model, "cpu", SMALL, dict.fromkeys(SMALL, 400), max_batched_tokens=512, max_running=4) as served:
        yield served
        assert served.audit() == []
