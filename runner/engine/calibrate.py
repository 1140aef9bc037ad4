"""Scales of float8 K and V from prompts.

Owns       the watching of what a model writes to its pools.
Promises   nothing that occurred in the prompts saturates. What is larger elsewhere does, at +-448 times its scale.
Does not   keep anything: the prompts are served on pools of their own, in the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtier import ConfigError, KVCache, Request, Scheduler
from runner.engine.loop import Engine
from runner.model.hybrid import HybridModel
from runner.model.kv_scales import LayerScales
from runner.sampling.params import SamplingParams


def calibrate(
    model: HybridModel, prompts: Sequence[Sequence[int]], block_tokens: int = 16, max_batched_tokens: int = 2048
) -> LayerScales:
    """Scales with which nothing in ``prompts`` (token ids) saturates: the largest magnitude of each head over 448.

    The prompts are served once, with K and V in the model's own dtype. A head that is zero throughout gets 1. Raises
    ``ConfigError`` without prompts or if K or V is no number, ``InvalidRequest`` for a prompt that cannot run.
    """
    if not prompts:
        raise ConfigError("calibration needs a prompt: token ids of typical text")
    spec = model.spec(block_tokens, dtype=model.dtype)
    longest = max(map(len, prompts))
    blocks = {g.name: -(-(longest + 1) // g.block_tokens) + 1 for g in spec.groups}
    with KVCache(spec, device=str(model.device), device_blocks=blocks) as cache:
        engine = Engine(model, cache, Scheduler(cache, max_batched_tokens, max_running=1))
        with _watched(model, cache) as largest:
            for i, prompt in enumerate(prompts):
                engine.add(
                    Request(f"calibrate-{i}", list(prompt), max_new_tokens=1),
                    SamplingParams(max_tokens=1, temperature=0),
                )
                while engine.has_requests():
                    engine.step().check()
    most = torch.finfo(torch.float8_e4m3fn).max
    scales: LayerScales = {}
    for layer, place in enumerate(spec.places("kv")):
        if place is None:
            continue
        pair = {which: largest[place][which].double() / most for which in ("k", "v")}
        if not all(bool(x.isfinite().all()) for x in pair.values()):
            raise ConfigError(f"layer {layer}: K or V is not finite on these prompts, so no scale can hold it")
        scales[layer] = {which: torch.where(x > 0, x, 1.0).tolist() for which, x in pair.items()}
    return scales


def calibrate_on_text(model: HybridModel, file: Path, tokens: int) -> tuple[LayerScales, int]:
    """Scales from the first ``tokens`` tokens of a text file, or as many as the model takes; and their number.

    Raises ``ConfigError`` for a file without text and for a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer; give token ids to runner.engine.calibrate.calibrate")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file} cannot be read as text: {problem}") from None
    most = tokens if model.max_tokens is None else min(tokens, model.max_tokens - 1)
    ids = model.tokenizer(text)["input_ids"][:most]
    if not ids:
        raise ConfigError(f"{file} has no text")
    return calibrate(model, [ids]), len(ids)


@contextmanager
def _watched(model: HybridModel, cache: KVCache) -> Iterator[dict[tuple[str, int], dict[str, Tensor]]]:
    """While it is open, the largest magnitude per KV head of all K and V that ``model`` writes to ``cache``."""
    own = model.backend
    watching = _Watching(own, cache)
    model.backend = watching
    try:
        yield watching.largest
    finally:
        model.backend = own


class _Watching:
    """A backend that looks at K and V on their way into the pools."""

    def __init__(self, backend: Any, cache: KVCache) -> None:
        self.PagedBatch = backend.PagedBatch
        self.attend = backend.attend
        self.attend_latent, self.attend_picked = (getattr(backend, f"attend_{x}", None) for x in ("latent", "picked"))
        self.largest: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._write = backend.write_kv
        self._places = {cache.kv(*place)[0].data_ptr(): place for place in cache.spec.places("kv") if place is not None}

    def write_kv(
        self, k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> None:
        seen = self.largest.setdefault(self._places[k_cache.data_ptr()], {})
        for which, new in (("k", key), ("v", value)):
            most = new.detach().abs().amax((0, 2)).float().cpu()  # NaN wins
            seen[which] = torch.maximum(seen[which], most) if which in seen else most
        self._write(k_cache, v_cache, key, value, *rest, **options)
