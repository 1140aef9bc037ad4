"""Sampling parameters, as vLLM users know them, and the choice of the next token.

Promises   a request's tokens depend on its own logits, parameters and seed only, never on who shares its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from kvtier.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them would only overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """How to generate.

    ``max_tokens``   at least 1.
    ``temperature``  0 is greedy.
    ``top_p``        keeps the likeliest tokens that together have this probability, in (0, 1].
    ``top_k``        keeps this many; 0 or -1 keeps all.
    ``seed``         same seed, same logits: same tokens. None draws a fresh one.
    ``stop``         strings that end the text; they are not part of it.
    ``ignore_eos``   go on after the model's end-of-sequence token.

    Raises ``InvalidRequest``.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens!r}"
        )
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            f"temperature must be >= 0, got {self.temperature!r}",
        )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p!r}")
        _require(_is_int(self.top_k) and self.top_k >= -1, f"top_k must be -1, 0 or more, got {self.top_k!r}")
        _require(self.seed is None or _is_int(self.seed), f"seed must be an integer or None, got {self.seed!r}")
        _require(self.stop is None or isinstance(self.stop, Iterable), f"stop must be strings, got {self.stop!r}")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        _require(all(isinstance(s, str) and s for s in stops), f"stop must be non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", stops)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())


def choose(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> Tensor:
    """The next token of each row: logits float32 [n, vocab] -> int64 [n]; ``generators`` are None for greedy rows."""
    chosen = logits.argmax(dim=-1)
    for row, generator in enumerate(generators):
        if generator is not None:
            chosen[row] = _draw(logits[row], params[row], generator)
    return chosen


def generator_for(params: SamplingParams, device: torch.device) -> torch.Generator | None:
    """A request's own source of randomness; None if it is greedy."""
    if params.temperature < GREEDY_BELOW:
        return None
    generator = torch.Generator(device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed % 2**63)
    return generator


def _draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    """One token from logits float32 [vocab]."""
    scaled, ids = torch.sort(logits / params.temperature, descending=True, stable=True)
    if params.top_k > 0:
        scaled = scaled[: params.top_k]
    probabilities = scaled.softmax(dim=-1)
    if params.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities
        left_out = before >= params.top_p
        left_out[0] = False  # float32 has no number as small as a top_p may be
        probabilities = probabilities.masked_fill(left_out, 0.0)
    return ids[torch.multinomial(probabilities, 1, generator=generator)[0]]


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)
