"""Recurrent layers over the pools: a mixer sees, as its cache, the states of some entries of a step.

Owns       the wrappers around the mixers of a loaded model, and the cache that a mixer is given.
Promises   a piece of a prompt goes on from the state after the token before it, and leaves states where the step wants
           them: the mixer is called once for each segment, and once for all entries of one token. What a step goes on
           from is copied first, so a block that others find is never written.
Does not   change the family's own forward: without a step, a mixer is as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtier.geometry.spec import GroupSpec, Part, RecurrentState
from kvtier.machine.errors import UnsupportedModel
from runner.model.time_steps import limit_decodes

_CALLS = ("update_conv_state", "update_recurrent_state")
_ARGUMENTS = ("cache", "cache_params", "past_key_values")
_ATTRIBUTE = "_kvtier_mixers"
_OURS = ("attention_mask", "kvtier", "position_ids")
"""Arguments that mean the packed step, of which a mixer sees a part."""


@dataclass(frozen=True)
class Segment:
    """The next tokens [start, end) of a step; the state after them goes to block ``target``."""

    start: int
    end: int
    target: int


@dataclass(frozen=True)
class StatesOfStep:
    """A group's states in one step: what each entry goes on from (0: nothing), and its segments."""

    source: list[int]
    segments: list[list[Segment]]

    @classmethod
    def from_step(cls, step: Any, group: GroupSpec) -> StatesOfStep:
        """``group``'s part of a scheduled step."""
        found = step.group(group.name).states()
        first = (step.query_start[:-1].astype("int64") - (step.seq_lens - _counts(step))).tolist()
        segments: list[list[Segment]] = [[] for _ in first]
        for k, end, target in zip(found.entry.tolist(), found.end.tolist(), found.target.tolist(), strict=True):
            start = segments[k][-1].end if segments[k] else int(step.query_start[k])
            segments[k].append(Segment(start, first[k] + end, target))
        return cls(found.source.tolist(), segments)


def _counts(step: Any) -> Any:
    return step.query_start[1:].astype("int64") - step.query_start[:-1]


class Mixers:
    """The recurrent layers of a loaded model, which keep their states in the pools while a step is set."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Mixers:
        """Those of ``model``, which has one set of them, however often it is asked for."""
        mixers: Mixers | None = vars(model).get(_ATTRIBUTE)
        if mixers is None:
            mixers = cls(model)
            object.__setattr__(model, _ATTRIBUTE, mixers)
        return mixers

    def __init__(self, model: torch.nn.Module) -> None:
        self.step: Any = None
        """The StepContext of the forward under way; None: the family's own forward."""
        self.layers: set[int] = set()
        """Indices of the layers with one."""
        for module, argument in _mixers(model):
            self.layers.add(int(module.layer_idx))
            limit_decodes(module, lambda: self.step is not None)
            module.forward = _Mixer(self, module, argument)


def _mixers(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """The modules that keep a state, and their argument for it."""
    for module in model.modules():
        own = type(module).forward
        named = inspect.signature(own).parameters
        argument = next((name for name in _ARGUMENTS if name in named), None)
        if argument is not None and hasattr(module, "layer_idx") and _keeps_states(type(module)):
            yield module, argument


def _keeps_states(of: type) -> bool:
    try:
        return any(call in inspect.getsource(of) for call in _CALLS)
    except (OSError, TypeError):
        return False


class _Mixer:
    """A mixer's forward."""

    def __init__(self, mixers: Mixers, module: Any, argument: str) -> None:
        self._mixers, self._argument, self._layer = mixers, argument, int(module.layer_idx)
        self._inner = type(module).forward.__get__(module)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = self._mixers.step
        if context is None:
            return self._inner(hidden_states, *args, **kwargs)
        place = context.spec.places("state")[self._layer]
        if place is None:
            raise UnsupportedModel(f"layer {self._layer} keeps a state, but the config was read as one without")
        name, index = place
        state = context.spec.group(name).attention
        assert isinstance(state, RecurrentState)
        tensors, step = context.cache.state(name, index), context.states[name]
        call = _Call(self._inner, self._argument, state.parts, tensors, _others(kwargs))
        out = _run(call, hidden_states, step)
        context.mixed.append(self._layer)
        return out if call.rest is None else (out, *call.rest)


def _others(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in (*_ARGUMENTS, *_OURS)}


def _run(call: _Call, hidden: Tensor, step: StatesOfStep) -> Tensor:
    """The mixer's output of all tokens, [1, T, ...]; the step's states are written."""
    outs: list[Tensor | None] = [None] * len(step.source)
    single = [k for k, of in enumerate(step.segments) if step.source[k] and of[-1].end - of[0].start == 1]
    if single:
        at = torch.tensor([step.segments[k][0].start for k in single], device=hidden.device)
        sources, targets = [step.source[k] for k in single], [step.segments[k][0].target for k in single]
        made = call(hidden[0, at][:, None], sources, targets)
        for i, k in enumerate(single):
            outs[k] = made[i : i + 1]
    for k, segments in enumerate(step.segments):
        if outs[k] is None:
            source, pieces = step.source[k], []
            for segment in segments:
                pieces.append(call(hidden[:, segment.start : segment.end], [source], [segment.target]))
                source = segment.target
            outs[k] = torch.cat(pieces, 1)
    return torch.cat([out for out in outs if out is not None], 1)


class _Call:
    """Calls of one mixer in one step."""

    def __init__(
        self, inner: Any, argument: str, parts: Sequence[Part], tensors: Sequence[Tensor], kwargs: dict[str, Any]
    ) -> None:
        self._inner, self._argument, self._parts, self._tensors, self._kwargs = inner, argument, parts, tensors, kwargs
        self.rest: tuple[Any, ...] | None = None
        """What the family returns beside the output; None if that is not a tuple."""

    def __call__(self, hidden: Tensor, sources: list[int], targets: list[int]) -> Tensor:
        """The output of ``hidden`` [B, n, ...], which goes on from blocks ``sources``. The states go to ``targets``."""
        seen = _Seen(self._parts, self._tensors, sources, hidden.dtype)
        out = self._inner(hidden, **{self._argument: seen}, **self._kwargs)
        seen.write(targets)
        if isinstance(out, tuple):
            self.rest = (None,) * (len(out) - 1)
            out = out[0]
        made: Tensor = out
        return made


class _Seen:
    """The cache of one call: what transformers' caches answer for one layer, from the states of ``sources``."""

    def __init__(
        self, parts: Sequence[Part], tensors: Sequence[Tensor], sources: list[int], dtype: torch.dtype
    ) -> None:
        """``sources``: blocks; all 0: nothing yet. ``dtype``: of the hidden states, which convolutions work in."""
        from transformers.cache_utils import LinearAttentionLayer

        self._parts, self._tensors = parts, tensors
        self._layer = layer = LinearAttentionLayer(number_of_states=1 + max(_number(part) for part in parts))
        if sources[0] == 0:
            return
        for part, tensor in zip(parts, tensors, strict=True):
            k, states = _number(part), tensor[torch.tensor(sources, device=tensor.device)]
            layer.has_previous_state[k] = True
            if part.name.startswith("conv"):
                layer.conv_states[k], layer.conv_kernel_size[k] = states.to(dtype), states.shape[-1]
                layer.is_conv_states_initialized[k] = True
            else:
                layer.recurrent_states[k] = states
                layer.is_recurrent_states_initialized[k] = True

    def write(self, targets: list[int]) -> None:
        """The states go to these blocks."""
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            of = self._layer.conv_states if part.name.startswith("conv") else self._layer.recurrent_states
            made = of[_number(part)]
            assert made is not None
            tensor[torch.tensor(targets, device=tensor.device)] = made.to(tensor.dtype)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        has = self._layer.has_previous_state[state_idx]
        states: Tensor | None = self._layer.conv_states[state_idx] if has else None
        return states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        has = self._layer.is_recurrent_states_initialized[state_idx]
        states: Tensor | None = self._layer.recurrent_states[state_idx] if has else None
        return states

    def update_conv_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **more: Any) -> Tensor:
        made: Tensor = self._layer.update_conv_state(states, state_idx, **more)
        return made

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **more: Any) -> Tensor:
        made: Tensor = self._layer.update_recurrent_state(states, state_idx, **more)
        return made

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return all(self._layer.has_previous_state.values())

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def get_seq_length(self, *_: Any) -> int:
        return 0


def _number(part: Part) -> int:
    return int(part.name.lstrip("abcdefghijklmnopqrstuvwxyz"))
