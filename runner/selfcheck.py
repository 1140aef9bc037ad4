"""A trial at load time: do packed, chunked steps through the pools give what the family's own attention gives?

Owns       the trial's steps and their scratch pools.
Promises   a family that bypasses the attention function, numbers positions itself or keeps state elsewhere raises
           ``UnsupportedModel`` here, before any text is served.
Does not   reach past windows and chunks (real ones are long): that the attention function gets the config's window
           is checked call by call in attention.py, that it is honoured by tests/families.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.attention.paged import Paged, paged_from_table
from kvtier.errors import KVTierError, UnsupportedModel
from kvtier.spec import CacheSpec, GroupSpec
from runner.attention import NAME

_PROMPTS = (13, 7)
"""Tokens of the two requests."""
_STEPS = (((0, 9), (0, 6)), ((9, 13), (6, 7)))
"""Token range of each request in each step: two prompts at once, then a chunk of prompt beside a decode."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.5
"""Relative RMS of the logits' difference: what a wrong position or mask costs is about 1; half types round, and may
send a token to another expert."""


def self_check(model: Any) -> None:
    """Raises ``UnsupportedModel`` unless ``model`` (a HybridModel) computes packed what it computes alone."""
    prompts = _prompts(model.vocab_size)
    try:
        ours, expected = _packed(model, prompts, model.spec(block_tokens=1)), _alone(model, prompts)
    except (KVTierError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):  # none is the family's fault
        raise
    except Exception as error:  # whatever modeling code trips over, when it is called as we call it
        if isinstance(error, RuntimeError) and _from_flashinfer(error):  # what it says of the device
            raise
        raise UnsupportedModel(
            f"{model.config.model_type}: its forward fails on two packed requests without a transformers cache "
            f"({type(error).__name__}: {error})"
        ) from error
    found = float((ours - expected).square().mean().sqrt() / expected.std().clamp_min(1e-12))
    limit = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    if not found <= limit:
        raise UnsupportedModel(
            f"{model.config.model_type}: two requests packed in one forward give other logits than each alone "
            f"(relative error {found:.2g}, allowed {limit:.2g}); the family keeps state, masks or positions outside "
            "the attention function, and would be served wrong text"
        )


def _from_flashinfer(error: RuntimeError) -> bool:
    """Whether a call of FlashInfer raised it."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.partition(".")[0] == "flashinfer" for module in modules)


def try_forward(model: Any, spec: CacheSpec) -> None:
    """Two small steps over scratch pools of ``spec``'s groups; raises what an attention raises that cannot run them."""
    _packed(model, _prompts(model.vocab_size), spec)


def _prompts(vocab_size: int) -> list[np.ndarray]:
    """Fixed ordinary tokens: low ids, where no family keeps its image and audio placeholders."""
    rng = np.random.default_rng(0)
    return [rng.integers(min(3, vocab_size - 1), min(vocab_size, 256), n) for n in _PROMPTS]


@dataclass(frozen=True)
class _View:
    group: GroupSpec
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray

    def paged(self) -> Paged:
        attention, starts, ends = self.group.attention, self.query_start.tolist(), self.seq_lens.tolist()
        return paged_from_table(attention, self.group.block_tokens, starts, ends, self.block_table)


@dataclass(frozen=True)
class _Step:
    """A step over scratch pools with one token a block; tables and slots are the same for all groups."""

    spec: CacheSpec

    token_ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def sample_rows(self) -> np.ndarray:
        return np.arange(len(self.seq_lens))

    def group(self, name: str) -> _View:
        return _View(self.spec.group(name), self.query_start, self.seq_lens, self.block_table, self.slot_mapping)


def _step(spec: CacheSpec, prompts: Sequence[np.ndarray], ranges: Sequence[tuple[int, int]]) -> _Step:
    table = np.zeros((len(prompts), max(_PROMPTS)), np.int32)
    first = 1
    for row, n in enumerate(_PROMPTS):
        table[row, :n] = np.arange(first, first + n)
        first += n
    return _Step(
        spec=spec,
        token_ids=np.concatenate([p[a:b] for p, (a, b) in zip(prompts, ranges, strict=True)]),
        positions=np.concatenate([np.arange(a, b) for a, b in ranges]),
        query_start=np.cumsum([0, *(b - a for a, b in ranges)]).astype(np.int32),
        seq_lens=np.array([b for _, b in ranges], np.int32),
        block_table=table,
        slot_mapping=np.concatenate([table[r, a:b] for r, (a, b) in enumerate(ranges)]).astype(np.int64),
    )


class _ScratchCache:
    """Zeroed pools [1 + all tokens, 1, H, D], one per layer; K and V have equal strides, as in real pools."""

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        self.spec = spec
        self._kv = {
            (g.name, i): torch.zeros(
                1 + sum(_PROMPTS), 1, g.num_kv_heads, sum(g.head_dims), dtype=getattr(torch, g.dtype), device=device
            ).split(g.head_dims, -1)
            for g in spec.groups
            for i in range(g.num_layers)
        }

    def kv(self, group: str, layer: int) -> tuple[Tensor, ...]:
        return self._kv[group, layer]


def scratch_cache(spec: CacheSpec, device: torch.device) -> Any:
    """Stands in for a ``KVCache`` of ``spec`` in a forward: a few blocks of one token in every group."""
    return _ScratchCache(CacheSpec([replace(g, block_tokens=1) for g in spec.groups], layers=spec.layers), device)


def _packed(model: Any, prompts: Sequence[np.ndarray], spec: CacheSpec) -> Tensor:
    """Our logits [steps * requests, vocab] of the last token of each range."""
    cache = scratch_cache(spec, model.device)
    return torch.cat([model.forward(_step(cache.spec, prompts, ranges), cache) for ranges in _STEPS])


@torch.no_grad()
def _alone(model: Any, prompts: Sequence[np.ndarray]) -> Tensor:
    """The family's own logits of the same tokens, one request at a time."""
    with _own_attention(model):
        logits = [model.model(torch.as_tensor(p)[None].to(model.device), use_cache=False).logits[0] for p in prompts]
    return torch.stack([logits[r][end - 1] for ranges in _STEPS for r, (_, end) in enumerate(ranges)]).float()


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """The model as transformers made it: eager attention, and the query scales that we took over given back."""
    tempered = [
        m
        for m in model.model.modules()
        if hasattr(m, "attn_temperature_tuning") and getattr(m, "layer_idx", None) in model.temperatures
    ]
    model.model.set_attn_implementation("eager")
    for module in tempered:
        module.attn_temperature_tuning = True
    try:
        yield
    finally:
        model.model.set_attn_implementation(NAME)
        for module in tempered:
            module.attn_temperature_tuning = False
