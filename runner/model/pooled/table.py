"""Gives recurrent mixers FlashInfer's kernels: a trial for each kind of mixer judges, on the device that will run it.

Owns       which function of a family's code which kernel takes the place of, and why a model keeps its own.
Promises   a model has kernels in all of its mixers, or in none. Mixers of one kind differ in their weights only. A
           kernel that gives other numbers than the family's code, or writes where it should not, is not used.
Does not   change what mixers do without a step of ours.

Families of transformers call functions of their file for the recurrence alone. A mixer with kernels runs the family's
own forward, in which these names mean ours. Where ours cannot serve a call, it goes on to the family's function.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.geometry.kinds import STATE_TOKENS, Part
from kvtier.machine.device import forget_last_error
from runner.model.pooled import delta, mamba2
from runner.model.states import Call, Mixer, Mixers, turned_parts

_log = logging.getLogger("kvtier.pooled")

_ROWS = 3, 20
"""Requests of a trial's decodes: FlashInfer has other kernels for few than for many."""
_SHORT, _LONG = 5, STATE_TOKENS + 6
"""Tokens of its prompts: the second goes on from the first, beyond a chunk of the kernels."""
_BLOCKS = 1 + _ROWS[-1] + _ROWS[-1] // 2
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 3e-2}
"""The most that the RMS of a difference may be, relative."""


@dataclass(frozen=True)
class Sort:
    """Mixers whose code calls ``function``; ``module`` has the kernels for them.

    ``module`` has ``refuses(parts)``, why the kernels cannot take such states ("" if they can), and
    ``functions(own)``: by name, what takes the places of the family's functions ``own``. ``is_turned``: the kernels
    read recurrent states with their last two sizes swapped.
    """

    function: str
    module: Any
    is_turned: bool


SORTS = (
    Sort("torch_recurrent_gated_delta_rule", delta, is_turned=True),
    Sort("mamba2_selective_state_update", mamba2, is_turned=False),
)


def take(mixers: Mixers, parts: tuple[Part, ...], device: torch.device, dtype: torch.dtype) -> str:
    """Gives all mixers kernels, or none; returns why none, or "".

    ``parts``: of each mixer's state, as the family's code has them. ``dtype``: of the weights.
    """
    if any(_mixer(module).pooled for module in mixers.modules):
        return ""
    why = _taken(mixers, parts, device, dtype)
    if why:
        _log.info("recurrent layers keep the family's code: %s", why)
    return why


def _taken(mixers: Mixers, parts: tuple[Part, ...], device: torch.device, dtype: torch.dtype) -> str:
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    tried: dict[tuple[object, ...], str] = {}
    turned = set()
    module: Any
    for module in sorted(mixers.modules, key=_layer):  # the first of a kind is tried, and no other at each load
        sort = next((sort for sort in SORTS if sort.function in _names(module)), None)
        if sort is None:
            return f"{type(module).__name__}: FlashInfer's kernels take no such recurrence"
        kind = type(module), *(weight.shape for weight in module.parameters())
        turned.add(sort.is_turned)
        if kind not in tried:
            why = "" if dtype in _TOLERANCE else f"the kernels take half types, and weights are {dtype}"
            tried[kind] = why or sort.module.refuses(parts) or _fails(module, sort, parts, device, dtype)
        if tried[kind]:
            return f"{type(module).__name__}: {tried[kind]}"
        forwards[module] = _ours(module, sort)
    if len(turned) != 1:
        return "its recurrent layers are of several sorts" if turned else "it has no recurrent layers"
    for module, forward in forwards.items():
        _mixer(module).pooled = forward
    mixers.is_turned = turned.pop()
    return ""


def _layer(module: Any) -> int:
    return int(module.layer_idx)


def _mixer(module: Any) -> Mixer:
    mixer: Mixer = module.forward
    return mixer


def _names(module: nn.Module) -> tuple[str, ...]:
    forward = inspect.unwrap(type(module).forward)
    return forward.__code__.co_names if isinstance(forward, FunctionType) and not forward.__closure__ else ()


def _ours(module: Any, sort: Sort) -> Callable[..., Any]:
    """The module's own forward, in which the family's functions are ours."""
    forward: Any = inspect.unwrap(type(module).forward)
    functions = {**forward.__globals__, **sort.module.functions(forward.__globals__)}
    ours = FunctionType(forward.__code__, functions, forward.__name__, forward.__defaults__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(ours, module)


@torch.no_grad()
def _fails(module: Any, sort: Sort, parts: tuple[Part, ...], device: torch.device, dtype: torch.dtype) -> str:
    """Why a mixer cannot have the kernels; "" if it can."""
    try:
        return next(_differences(module, sort, parts, device, dtype), "")
    except Exception as problem:  # whatever a compiler, kernels or modeling code trip over
        forget_last_error(device)
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def _differences(
    module: Any, sort: Sort, parts: tuple[Part, ...], device: torch.device, dtype: torch.dtype
) -> Iterator[str]:
    """Computes prompts and a decode by the family's functions and by ours; says where they differ."""
    generator, mixer = torch.Generator().manual_seed(0), _mixer(module)

    def hidden(rows: int, tokens: int) -> Tensor:
        return torch.randn(rows, tokens, int(module.hidden_size), generator=generator).to(device, dtype)

    pools = [torch.zeros(_BLOCKS, *part.shape, dtype=getattr(torch, part.dtype), device=device) for part in parts]
    own = Call(mixer.inner, mixer.argument, parts, pools, {})
    every = list(range(_BLOCKS))
    own.write(every, own(hidden(_BLOCKS, _SHORT), None)[1])
    lie = turned_parts(parts) if sort.is_turned else parts
    copies = [
        (x if theirs is part else x.transpose(-1, -2)).clone(memory_format=torch.contiguous_format)
        for x, part, theirs in zip(pools, parts, lie, strict=True)
    ]
    ours = Call(mixer.inner, mixer.argument, lie, copies, {}, _ours(module, sort))
    # A prompt from nothing, and one that goes on.
    for start, tokens in ((None, _SHORT), ([1], _LONG)):
        x = hidden(1, tokens)
        (out, after), (got, found) = (call(x, call.read(start) if start else None) for call in (own, ours))
        yield from _between(f"a prompt of {tokens} tokens", dtype, [out, *after], [got, *found])
    # Each request goes on from its block; every other one goes to another block.
    for rows in _ROWS:
        source = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
        target = torch.where(source % 2 == 0, _BLOCKS - source // 2, source)
        x = hidden(rows, 1)
        out, got = (call.decode(x, source, target) for call in (own, ours))
        written = target.tolist()
        yield from _between("a decode", dtype, [out, *own.read(written)], [got, *ours.read(written)])
        for block in set(every) - set(written):
            if not all(torch.equal(a, b) for a, b in zip(own.read([block]), ours.read([block]), strict=True)):
                yield "a decode writes to a block that is not its own"
        ours.write(written, own.read(written))


def _between(what: str, dtype: torch.dtype, expected: list[Tensor], found: list[Tensor]) -> Iterator[str]:
    for name, a, b in zip(("its output", *["a state"] * len(expected)), expected, found, strict=False):
        difference = float((b.float() - a.float()).square().mean().sqrt() / a.float().square().mean().sqrt())
        if a.shape != b.shape or not difference <= _TOLERANCE[dtype]:
            yield f"{name} differs by {difference:.2g} after {what}"
