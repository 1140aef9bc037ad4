"""A trial at load time: do packed, chunked steps through the pools match the family's own attention?

Owns       the trial's steps and their scratch pools.
Promises   a family that bypasses the attention function or numbers positions itself raises ``UnsupportedModel`` here,
           before any text is served. So does a family that masks otherwise than its config says, or keeps state
           elsewhere. So does a model whose logits are not finite in its dtype.
Does not   run past long windows and chunks (``_lengths``). For them it compares the rule of the family's own mask
           (masks.py), and the window that the attention function gets in each call (attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.attention.paged import Paged, paged_from_table
from kvtier.coordinator.step import Entries
from kvtier.geometry.kinds import RecurrentState
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.gpu_pool.exports import States
from kvtier.machine.errors import KVTierError, UnsupportedModel
from runner.errors import ModelLoadError
from runner.model import masks
from runner.model.attention import NAME
from runner.model.checkpoint import bos_token_id

_REQUESTS = 3
"""The most prompts of a trial."""
_SHORT = 13, 7
"""Tokens of the two requests if no window or chunk is passed."""
_LAST = 4
"""Tokens of the first request that its second step computes."""
_LONGEST = 520
"""Tokens that the first request may have to pass a window or chunk."""
_CPU_WORK = 20e9
"""Weights times tokens that a CPU may compute for it: a second or two."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.5
"""Relative RMS of the logits' difference. A wrong position or mask costs about 1. Half types round, and may send a
token to another expert."""


def self_check(model: Any) -> None:
    """Raises ``UnsupportedModel`` unless ``model`` (a HybridModel) computes the same packed and alone.

    Raises ``ModelLoadError`` if its weights give no finite logits in float32 or bfloat16.
    """
    spec = model.spec(block_tokens=1)
    trial = _Trial.of(model, _lengths(model, spec))
    try:
        rules = _own_rules(model, trial)
        otherwise = masks.differences(spec, rules, model.device)
        model.proven = frozenset(rules.keys() - otherwise.keys())
        ours, expected = _packed(model, trial, spec), _alone(model, trial)
    except (KVTierError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):  # none is the family's fault
        raise
    except Exception as error:  # whatever modeling code trips over, when it is called as we call it
        raise UnsupportedModel(
            f"{model.config.model_type}: its forward fails on two packed requests without a transformers cache "
            f"({type(error).__name__}: {error})"
        ) from error
    for layer, difference in otherwise.items():
        raise UnsupportedModel(
            f"{model.config.model_type}: in the family's own code {difference} (layer {layer}); the config does not "
            "say what the model does, which would be served wrong text"
        )
    _check_finite(model, expected)
    found = float((ours - expected).square().mean().sqrt() / expected.std().clamp_min(1e-12))
    limit = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    if not found <= limit:
        raise UnsupportedModel(
            f"{model.config.model_type}: two requests packed in one forward give other logits than each alone "
            f"(relative error {found:.2g}, allowed {limit:.2g}); the family keeps state, masks or positions outside "
            "the attention function, and would be served wrong text"
        )


def _check_finite(model: Any, logits: Tensor) -> None:
    if logits.isfinite().all():
        return
    name = str(model.dtype).removeprefix("torch.")
    if model.dtype is torch.float16:
        raise UnsupportedModel(
            f"{model.config.model_type}: the model's own logits are not finite in {name}, whose largest number is "
            '65,504; load it with dtype="bfloat16" or "float32"'
        )
    raise ModelLoadError(
        f"{model.config.model_type}: the model's own logits are not finite in {name}, so its weights are damaged; "
        "fetch them again"
    )


def try_forward(model: Any, spec: CacheSpec) -> None:
    """Two small steps over scratch pools of ``spec``'s groups; raises the error of an attention that cannot run
    them."""
    _packed(model, _Trial.of(model, _SHORT), spec)


def _lengths(model: Any, spec: CacheSpec) -> tuple[int, int]:
    """Tokens of the two requests.

    The first passes every window and chunk that is not too long for a trial. It goes on so far that both of its steps
    end beyond it.
    """
    most = _LONGEST
    if model.device.type == "cpu":
        most = min(most, int(_CPU_WORK / sum(weight.numel() for weight in model.model.parameters())))
    if model.max_tokens:
        most = min(most, model.max_tokens)
    wanted = [group.attention.span_tokens + 2 + _LAST for group in spec.groups]
    return max(_SHORT[0], *(n for n in wanted if n <= most), 0), _SHORT[1]


@dataclass(frozen=True)
class _Trial:
    """Two prompts in two steps: both at once, then the end of the first beside a decode of the second."""

    prompts: tuple[np.ndarray, np.ndarray]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    """Token range of each request in each step."""

    @classmethod
    def of(cls, model: Any, lengths: tuple[int, int]) -> _Trial:
        """Fixed ordinary tokens: low ids, below the placeholders of images and audio in all families.

        The first prompt begins with the BOS token, if there is one: some models have their largest activations there.
        """
        rng, vocab_size = np.random.default_rng(0), model.vocab_size
        first, second = (rng.integers(min(3, vocab_size - 1), min(vocab_size, 256), n) for n in lengths)
        if (bos := bos_token_id(model)) is not None:
            first[0] = bos
        a, b = lengths
        return cls((first, second), (((0, a - _LAST), (0, b - 1)), ((a - _LAST, a), (b - 1, b))))


@dataclass(frozen=True)
class _View:
    group: GroupSpec
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray

    def states(self) -> States:
        """A step of several tokens of a request is cut once, after the first half.

        Each request has three blocks of states: for the cut, and in turn for the ends of steps.
        """
        counts, ends = np.diff(self.query_start).tolist(), self.seq_lens.tolist()
        found = [
            (r, n)
            for r, (count, end) in enumerate(zip(counts, ends, strict=True))
            for n in sorted({end - count // 2, end})
        ]
        before = [n - count for count, n in zip(counts, ends, strict=True)]
        return States(
            np.array([_state_after(r, n) if n else 0 for r, n in enumerate(before)], np.int32),
            np.array([r for r, _ in found], np.int32),
            np.array([n for _, n in found], np.int64),
            np.array([_state_after(r, n) if n == ends[r] else 3 * r + 1 for r, n in found], np.int32),
        )

    def entries(self) -> Entries:
        """Blocks of one entry, with the ids of its first token's block in other groups."""
        m, positions = self.group.entry_tokens, _positions(self.query_start, self.seq_lens)
        token = np.flatnonzero((positions + 1) % m == 0)
        rows = np.repeat(np.arange(len(self.seq_lens)), np.diff(self.query_start))
        return Entries(token, self.block_table[rows[token], positions[token] // m].astype(np.int64))

    def paged(self) -> Paged:
        attention, starts, ends = self.group.attention, self.query_start.tolist(), self.seq_lens.tolist()
        return paged_from_table(attention, self.group.block_tokens, starts, ends, self.block_table)


def _positions(query_start: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    counts = np.diff(query_start)
    return np.concatenate([np.arange(end - count, end) for count, end in zip(counts, seq_lens, strict=True)])


def _state_after(r: int, tokens: int) -> int:
    """The block of request r's state after a step that ends with so many tokens."""
    return 3 * r + 2 + tokens % 2


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
        group = self.spec.group(name)
        table = self.block_table[:, :: group.entry_tokens]
        return _View(group, self.query_start, self.seq_lens, table, self.slot_mapping)


def step_of(spec: CacheSpec, prompts: Sequence[np.ndarray], ranges: Sequence[tuple[int, int]]) -> Any:
    """A step over ``scratch_cache`` that computes [start, end) of each prompt."""
    table = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    first = 1
    for row, prompt in enumerate(prompts):
        table[row, : len(prompt)] = np.arange(first, first + len(prompt))
        first += len(prompt)
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
    """Zeroed pools [1 + tokens, 1, H, D], one per layer; K and V have equal strides, as in real pools. Few states."""

    def __init__(self, spec: CacheSpec, device: torch.device, tokens: int) -> None:
        self.spec = spec
        self._kv = {
            (g.name, i): torch.zeros(
                1 + tokens, 1, g.num_kv_heads, sum(g.head_dims), dtype=getattr(torch, g.dtype), device=device
            ).split(g.head_dims, -1)
            for g in spec.groups
            if not isinstance(g.attention, RecurrentState)
            for i in range(g.num_layers)
        }
        self._states = {
            (g.name, i): tuple(
                torch.zeros(1 + 3 * _REQUESTS, *part.shape, dtype=getattr(torch, part.dtype), device=device)
                for part in g.attention.parts
            )
            for g in spec.groups
            if isinstance(g.attention, RecurrentState)
            for i in range(g.num_layers)
        }

    def state(self, group: str, layer: int) -> tuple[Tensor, ...]:
        return self._states[group, layer]

    def kv(self, group: str, layer: int) -> tuple[Tensor, ...]:
        return self._kv[group, layer]

    def all_kv(self) -> list[Tensor]:
        """K and V of every layer, [1 + tokens, 1, H, D]; prompts lie one after the other from 1 on."""
        return [x for pair in self._kv.values() for x in pair]

    def all_states(self, tokens: int) -> list[Tensor]:
        """The first prompt's states in each layer, all parts, after a step that ended with so many tokens."""
        return [x[_state_after(0, tokens)] for parts in self._states.values() for x in parts]


def scratch_cache(spec: CacheSpec, device: torch.device, tokens: int = sum(_SHORT)) -> Any:
    """Stands in for a ``KVCache`` of ``spec`` in a forward: ``tokens`` blocks of one token in groups of K and V."""
    return _ScratchCache(
        CacheSpec([replace(g, block_tokens=g.entry_tokens) for g in spec.groups], layers=spec.layers), device, tokens
    )


def _packed(model: Any, trial: _Trial, spec: CacheSpec) -> Tensor:
    """Our logits [steps * requests, vocab] of the last token of each range."""
    cache = scratch_cache(spec, model.device, sum(map(len, trial.prompts)))
    logits = [model.forward(step_of(cache.spec, trial.prompts, ranges), cache) for ranges in trial.steps]
    return torch.cat([_of_rows(model, each, len(trial.prompts)) for each in logits])


@torch.no_grad()
def _alone(model: Any, trial: _Trial) -> Tensor:
    """The family's own logits of the same tokens, one request at a time."""
    ends = torch.tensor([[end for _, end in ranges] for ranges in trial.steps], device=model.device)
    logits = []
    with _attending(model, "eager"):
        for r, prompt in enumerate(trial.prompts):
            ids = torch.as_tensor(prompt)[None].to(model.device)
            found = model.model(ids, use_cache=False, logits_to_keep=ends[:, r] - 1).logits[0]
            logits.append(_of_rows(model, found, len(ends)))
    return torch.stack(logits, 1).flatten(0, 1).float()


def _of_rows(model: Any, logits: Tensor, rows: int) -> Tensor:
    """``logits``, if they have this many rows."""
    if len(logits) != rows:
        raise UnsupportedModel(
            f"{model.config.model_type}: its forward gives {len(logits)} rows of logits where {rows} were asked for "
            "(logits_to_keep), so it is not known which are which"
        )
    return logits


@torch.no_grad()
def _own_rules(model: Any, trial: _Trial) -> dict[int, masks.Rule]:
    """The rule of the mask that the family builds for each layer, if it shows one; none if its forward fails."""
    rules: dict[int, masks.Rule] = {}
    ids = torch.as_tensor(trial.prompts[1])[None, :2].to(model.device)
    with _attending(model, masks.NAME):
        try:
            model.model(ids, use_cache=False, kvtier=rules)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception:  # whatever modeling code trips over: the packed forward tells what it is
            return {}
    return rules


@contextmanager
def _attending(model: Any, implementation: str) -> Iterator[None]:
    """The model as transformers made it: with another attention, and with the query scales that we took over."""
    tempered = [
        m
        for m in model.model.modules()
        if hasattr(m, "attn_temperature_tuning") and getattr(m, "layer_idx", None) in model.temperatures
    ]
    model.model.set_attn_implementation(implementation)
    for module in tempered:
        module.attn_temperature_tuning = True
    try:
        yield
    finally:
        model.model.set_attn_implementation(NAME)
        for module in tempered:
            module.attn_temperature_tuning = False
