"""Recurrent layers over the pools: a mixer sees, as its cache, the states of some entries of a step.

Owns       the wrappers around the mixers of a loaded model, and the cache that a mixer is given. A mixer with kernels
           of its own (pooled/) finds its recurrent states where they lie (``Pooled``).
Promises   a piece of a prompt goes on from the state after the token before it, and leaves states where the step wants
           them. The mixer is called once for each segment, and once for all entries of one token. What a step goes on
           from is copied first, so a block that others find is never written. Entries whose states are not finite are
           named (``unsound``) before anybody finds these.
Does not   change the family's own forward: without a step, a mixer is as it was.

If states keep the inputs since their last boundary (``with_inputs``), bits do not depend on how a text is cut. The text
is cut into chunks of ``STATE_TOKENS`` tokens, from token 0 on. Each is one call, for one request, of so many rows, from
the state before it; rows that are not known yet are zeros. A decode is such a call, too. The state after a chunk is
kept once the chunk is whole. Before that, a block has the state before it, and the chunk's inputs so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvtier.geometry.kinds import STATE_TOKENS, Part, RecurrentState
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.machine.errors import UnsupportedModel
from runner.model.state_steps import StatesOfDecode, StatesOfStep
from runner.model.time_steps import limit_decodes

_CALLS = ("update_conv_state", "update_recurrent_state")
_ARGUMENTS = ("cache", "cache_params", "past_key_values")
_ATTRIBUTE = "_kvtier_mixers"
_OURS = ("attention_mask", "kvtier", "position_ids")
"""Arguments that mean the packed step, of which a mixer sees a part."""
INPUTS = "inputs"
"""Name of a state's last part, if it has the mixer's inputs since the last boundary."""
_RECURRENT, _TURNED = "recurrent", "turned"
"""Names of recurrent parts: as transformers' code has them, and with the last two sizes swapped."""


def with_inputs(spec: CacheSpec, size: int, dtype: str) -> CacheSpec:
    """``spec``, whose states have a chunk's inputs of ``size`` numbers a token, too."""
    return _with_parts(spec, lambda parts: (*parts, Part(INPUTS, (STATE_TOKENS, size), dtype)))


def turned(spec: CacheSpec) -> CacheSpec:
    """``spec``, whose recurrent parts lie with their last two sizes swapped, under another name."""
    return _with_parts(spec, turned_parts)


def turned_parts(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The same of one layer's parts."""

    def of(part: Part) -> Part:
        if not part.name.startswith(_RECURRENT):
            return part
        *heads, rows, columns = part.shape
        return Part(part.name.replace(_RECURRENT, _TURNED), (*heads, columns, rows), part.dtype)

    return tuple(of(part) for part in parts)


def _with_parts(spec: CacheSpec, changed: Callable[[tuple[Part, ...]], tuple[Part, ...]]) -> CacheSpec:
    def of(group: GroupSpec) -> GroupSpec:
        state = group.attention
        if not isinstance(state, RecurrentState):
            return group
        return replace(group, attention=RecurrentState(changed(state.parts)))

    return CacheSpec([of(group) for group in spec.groups], layers=spec.layers)


class Mixers:
    """The recurrent layers of a loaded model, which keep their states in the pools while a step is set."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Mixers:
        """The states of ``model``, which has one set of them, however often it is asked for."""
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
        self.modules: set[torch.nn.Module] = set()
        self.is_turned = False
        """Whether recurrent states lie in the pools as ``turned`` has them."""
        for module, argument in _mixers(model):
            self.modules.add(module)
            self.layers.add(int(module.layer_idx))
            limit_decodes(module, lambda: self.step is not None)
            module.forward = Mixer(self, module, argument)


def _mixers(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """The modules that keep a state, and their argument for it."""
    for module in model.modules():
        kind: Any = type(module)
        named = inspect.signature(kind.forward).parameters
        argument = next((name for name in _ARGUMENTS if name in named), None)
        if argument is not None and hasattr(module, "layer_idx") and _keeps_states(kind):
            yield module, argument


@cache
def _keeps_states(of: Any) -> bool:
    try:
        return any(call in inspect.getsource(of) for call in _CALLS)
    except (OSError, TypeError):
        return False


class Mixer:
    """A mixer's forward."""

    def __init__(self, mixers: Mixers, module: Any, argument: str) -> None:
        self._mixers, self.argument, self._layer = mixers, argument, int(module.layer_idx)
        self.inner: Any = type(module).forward.__get__(module)
        """The family's own."""
        self.pooled: Any = None
        """The same with functions that read and write recurrent states where they lie, if it has such."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = self._mixers.step
        if context is None:
            return self.inner(hidden_states, *args, **kwargs)
        place = context.spec.places("state")[self._layer]
        if place is None:
            raise UnsupportedModel(f"layer {self._layer} keeps a state, but the config was read as one without")
        name, index = place
        state = context.spec.group(name).attention
        assert isinstance(state, RecurrentState)
        tensors, step = context.cache.state(name, index), context.states[name]
        lie_turned = any(part.name.startswith(_TURNED) for part in state.parts)
        pooled = self.pooled if lie_turned == self._mixers.is_turned else None  # a cache may be of another spec
        call = Call(self.inner, self.argument, state.parts, tensors, _others(kwargs), pooled)
        if isinstance(step, StatesOfDecode):
            out = call.decode(hidden_states.transpose(0, 1), *step.blocks).transpose(0, 1)
        elif state.parts[-1].name == INPUTS:
            out = _run_by_chunks(call, hidden_states, step)
        else:
            out = _run(call, hidden_states, step)
        context.mixed.append(self._layer)
        return out if call.rest is None else (out, *call.rest)


def _others(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in (*_ARGUMENTS, *_OURS)}


def _run(call: Call, hidden: Tensor, step: StatesOfStep) -> Tensor:
    """The mixer's output of all tokens, [1, T, ...]; the step's states are written."""
    outs: list[Tensor | None] = [None] * len(step.source)
    if step.single:
        at, source, target = step.rows
        made = call.decode(hidden[0, at][:, None], source, target)
        for i, k in enumerate(step.single):
            outs[k] = made[i : i + 1]
            segment = step.segments[k][0]
            if segment.is_kept and not _is_finite(call.read([segment.target])):
                step.unsound.add(k)
    for k, segments in enumerate(step.segments):
        if outs[k] is None:
            source, pieces = step.source[k], []
            for segment in segments:
                made, after = call(hidden[:, segment.start : segment.end], call.read([source]) if source else None)
                call.write([segment.target], after)
                pieces.append(made)
                if segment.is_kept and not _is_finite(after):
                    step.unsound.add(k)
                source = segment.target
            outs[k] = torch.cat(pieces, 1)
    return torch.cat([out for out in outs if out is not None], 1)


def _run_by_chunks(call: Call, hidden: Tensor, step: StatesOfStep) -> Tensor:
    """The same, by chunks of the text; blocks have a chunk's inputs, too."""
    outs: list[Tensor] = []
    for k, segments in enumerate(step.segments):
        source, at, row = step.source[k], step.before[k], segments[0].start
        first = at // STATE_TOKENS * STATE_TOKENS
        state = call.read([source]) if first else None
        rows = hidden.new_zeros(1, STATE_TOKENS, hidden.shape[-1])
        rows[0, : at - first] = call.inputs[source][: at - first]
        while row < segments[-1].end:
            count = min(first + STATE_TOKENS - at, segments[-1].end - row)
            rows[0, at - first : at - first + count] = hidden[0, row : row + count]
            whole = None
            for segment in (segment for segment in segments if row < segment.end <= row + count):
                if (known := at - first + segment.end - row) == STATE_TOKENS:
                    whole = segment
                elif segment.target == source and at > first:  # which has all but the newest inputs
                    call.inputs[source][at - first : known] = rows[0, at - first : known]
                else:
                    call.write_unfinished(segment.target, state, rows[0, :known])
            made, state = call(rows, state)  # the states before it are gone
            outs.append(made[:, at - first : at - first + count])
            if whole is not None:
                call.write_unfinished(whole.target, state, rows[0, :0])
                if whole.is_kept and not _is_finite(state):
                    step.unsound.add(k)
            at, row = at + count, row + count
            if at == first + STATE_TOKENS:
                first, rows = at, torch.zeros_like(rows)
    return torch.cat(outs, 1)


def _is_finite(states: Sequence[Tensor]) -> bool:
    return all(bool(state.isfinite().all()) for state in states)


@dataclass(frozen=True)
class Pooled:
    """A part of the states of B requests where it lies: it goes from blocks ``source`` to blocks ``target``.

    ``pool``: [blocks, *part.shape]. ``source`` and ``target``: int32 [B].
    """

    pool: Tensor
    source: Tensor
    target: Tensor


States = list[Tensor]
"""The parts of a layer's state of B requests: [B, *part.shape] each, in the order of the parts. Parts that lie turned
are as the family's code has them here."""


class Call:
    """Calls of one mixer in one step. What a call goes on from is overwritten by it."""

    def __init__(
        self,
        inner: Any,
        argument: str,
        parts: Sequence[Part],
        tensors: Sequence[Tensor],
        kwargs: dict[str, Any],
        pooled: Any = None,
    ) -> None:
        """``tensors``: the layer's pools. ``pooled``: as in ``Mixer``."""
        self._inner, self._argument, self._kwargs, self._pooled = pooled or inner, argument, kwargs, pooled
        self.inputs = tensors[-1]
        """[blocks, STATE_TOKENS, size], if states have them."""
        own = len(parts) - (parts[-1].name == INPUTS)
        self._parts, self._pools = parts[:own], tensors[:own]
        self._tensors = [
            pool.transpose(-1, -2) if part.name.startswith(_TURNED) else pool
            for part, pool in zip(self._parts, self._pools, strict=True)
        ]
        self.rest: tuple[Any, ...] | None = None
        """What the family returns beside the output; None if that is not a tuple."""

    def __call__(self, hidden: Tensor, states: Sequence[Tensor | Pooled] | None) -> tuple[Tensor, Any]:
        """The output of ``hidden`` [B, n, ...], which goes on from ``states`` (None: from nothing), and those after."""
        seen = _Seen(self._parts, states, hidden.dtype)
        out = self._inner(hidden, **{self._argument: seen}, **self._kwargs)
        if isinstance(out, tuple):
            self.rest = (None,) * (len(out) - 1)
            out = out[0]
        return out, seen.states()

    def decode(self, hidden: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """The output of one token each, [B, 1, ...]. States go from blocks ``source`` to ``target``, int32 [B]."""
        before = [
            Pooled(pool, source, target) if self._pooled and not _is_conv(part) else tensor[source]
            for part, pool, tensor in zip(self._parts, self._pools, self._tensors, strict=True)
        ]
        out, after = self(hidden, before)
        for tensor, state in zip(self._tensors, after, strict=True):
            if not isinstance(state, Pooled):
                tensor[target] = state
        return out

    def read(self, blocks: list[int]) -> States:
        """The states in these blocks."""
        at = torch.tensor(blocks, device=self._tensors[0].device)
        return [tensor[at] for tensor in self._tensors]

    def write(self, blocks: list[int], states: States) -> None:
        """The states go to these blocks."""
        at = torch.tensor(blocks, device=self._tensors[0].device)
        for tensor, state in zip(self._tensors, states, strict=True):
            tensor[at] = state

    def write_unfinished(self, block: int, states: States | None, inputs: Tensor) -> None:
        """The states at the last boundary, and the inputs [n, size] since then, go to ``block``."""
        if states is not None:
            self.write([block], states)
        self.inputs[block, : len(inputs)] = inputs
        self.inputs[block, len(inputs) :] = 0


class _Seen:
    """The cache of one call: what transformers' caches answer for one layer."""

    def __init__(self, parts: Sequence[Part], states: Sequence[Tensor | Pooled] | None, dtype: torch.dtype) -> None:
        """``states``: None: nothing yet. ``dtype``: of the hidden states, which convolutions work in."""
        from transformers.cache_utils import LinearAttentionLayer

        self._parts = parts
        self._dtypes = [getattr(torch, part.dtype) for part in parts]
        self._layer = layer = LinearAttentionLayer(number_of_states=1 + max(_number(part) for part in parts))
        for part, state in zip(parts, states or (), strict=bool(states)):
            k = _number(part)
            layer.has_previous_state[k] = True
            if _is_conv(part):
                assert isinstance(state, Tensor)
                layer.conv_states[k], layer.conv_kernel_size[k] = state.to(dtype), state.shape[-1]
                layer.is_conv_states_initialized[k] = True
            else:
                layer.recurrent_states[k] = state  # type: ignore[assignment]
                layer.is_recurrent_states_initialized[k] = True

    def states(self) -> list[Any]:
        """Those after the call, in the parts' dtypes; or ``Pooled``, which are written."""
        found = []
        for part, dtype in zip(self._parts, self._dtypes, strict=True):
            of = self._layer.conv_states if _is_conv(part) else self._layer.recurrent_states
            made: Any = of[_number(part)]
            assert made is not None
            found.append(made if isinstance(made, Pooled) else made.to(dtype))
        return found

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

    def update_recurrent_state(self, states: Any, layer_idx: int, state_idx: int = 0, **more: Any) -> Any:
        return states if isinstance(states, Pooled) else self._layer.update_recurrent_state(states, state_idx, **more)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return all(self._layer.has_previous_state.values())

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def get_seq_length(self, *_: Any) -> int:
        return 0


def _is_conv(part: Part) -> bool:
    return part.name.startswith("conv")


def _number(part: Part) -> int:
    return int(part.name.lstrip("abcdefghijklmnopqrstuvwxyz"))
