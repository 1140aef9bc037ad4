"""One thread (tiny models lose by more), no progress bars, and every family built and loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging

from runner.model.checkpoint import auto_class
from runner.model.hybrid import HybridModel

from . import zoo

PLAN = (
    {0: 33, 1: 17},
    {0: 17, 1: 23, 2: 9},
    {0: 25, 1: 1, 2: 1},
    {0: 1, 1: 1, 2: 1},
    {2: 8, 0: 1, 1: 1},
    {0: 1, 1: 1, 2: 1},
)
"""Tokens per sequence and step: chunked prompts across windows (16 to 24) and chunks (32), mixed with decodes."""


@dataclass(frozen=True)
class Family:
    """A zoo model as we run it, and what transformers' own eager attention gives for three sequences alone."""

    name: str
    folder: Path
    model: HybridModel

    @cached_property
    def sequences(self) -> list[np.ndarray]:
        rng = np.random.default_rng(1)
        return [rng.integers(3, 140, sum(counts.get(r, 0) for counts in PLAN)) for r in range(3)]

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        """Per sequence, float32 [tokens, vocab]."""
        auto = auto_class(self.model.config)
        eager = auto.from_pretrained(self.folder, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            return [eager(torch.tensor(ids)[None], use_cache=False).logits[0] for ids in self.sequences]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @cache
    def get(name: str) -> Family:
        folder = zoo.build(name, tmp_path_factory.mktemp(name.replace("-", "_")))
        return Family(name, folder, HybridModel.load(folder))

    return get


@pytest.fixture(autouse=True, scope="session")
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    torch.set_num_threads(threads)
