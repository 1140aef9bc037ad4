"""A model that remembers the logits of every sample, so that they can be compared with transformers' own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runner.model.hybrid import HybridModel


class Recorder:
    """Wraps a HybridModel; ``before`` may look at, or damage, the pools before each forward."""

    def __init__(self, model: HybridModel, before: Callable[[Any, Any], None] | None = None) -> None:
        self._model = model
        self._before = before
        self.logits: dict[str, dict[int, Tensor]] = defaultdict(dict)
        """request id -> number of tokens that the sample saw -> logits [vocab]."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, step: Any, cache: Any) -> Tensor:
        if self._before is not None:
            self._before(step, cache)
        logits = self._model.forward(step, cache)
        for row, r in zip(logits, step.sample_rows, strict=True):
            self.logits[step.request_ids[r]][int(step.seq_lens[r])] = row
        return logits

    def worst(self, request_id: str, expected: Tensor) -> float:
        """Largest difference of any recorded logit from ``expected``, float32 [tokens, vocab]."""
        seen = self.logits[request_id]
        return max(float((row - expected[n - 1]).abs().max()) for n, row in seen.items())


@torch.no_grad()
def eager_logits(model: Any, tokens: list[int]) -> Tensor:
    """transformers' own forward over the whole text, float32 [tokens, vocab]."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits
