"""Models over FlashInfer, held against their own eager steps."""

from __future__ import annotations

from pathlib import Path

from families import zoo

from kvtier.attention.flashinfer import FlashInfer
from runner.model.hybrid import HybridModel

MIB = 1 << 20


def flash_model(tmp_path: Path, workspace: int = 4 * MIB) -> HybridModel:
    folder = zoo.build("gemma3", tmp_path / "gemma3", head_dim=64)
    return HybridModel.load(folder, dtype="float16", backend=FlashInfer("cpu", workspace_bytes=workspace))
