"""Gives modules their fused forward: a trial for each kind of module judges, on the device that will run it.

Owns       which module gets which forward, and why one does not.
Promises   a module whose fused forward gives other numbers, or none, keeps its own.
Does not   change weights that somebody reads, or modules of kinds that it does not know.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kvtier.attention.kernels.choice import runs_kernel
from kvtier.machine.device import forget_last_error
from runner.model.fused import experts, gates, linears, norms, room, rope

_log = logging.getLogger("kvtier.fused")

Maker = Callable[[Any], Callable[..., Tensor]]
"""Makes a module's fused forward."""


def fuse(model: nn.Module, device: torch.device, exact: bool = False) -> dict[str, int]:
    """Fuses what can be fused; returns how many modules of each sort were.

    ``exact``: linear layers whose rows do not depend on others are wanted, faster or not.
    """
    counts = {"experts": 0, "rope": 0, "norms": 0, "gates": 0, "linears": 0}
    users = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    read = {child for module in model.modules() for child in _read_by(module)}
    trials: dict[tuple[object, ...], Maker | None] = {}
    done = set[nn.Module]()
    with room.side_by_side():
        for sort, module in _candidates(model, device, exact):
            if module in done:
                continue
            of_kind = sort.kind(module)
            if of_kind in trials:
                make = trials[of_kind]
                forward = None if make is None else make(module)
            else:
                trials[of_kind], forward = _tried(sort, module, device)
            if forward is not None:
                module.forward = forward
                counts[sort.__name__.rpartition(".")[2]] += 1
                layers = gates.take_over(module) if sort is gates else (module,) if sort is linears else ()
                done.update(layers)
                for layer in layers:
                    if layer not in read and users[layer.weight.data_ptr()] == 1:
                        linears.let_go(layer)
    return counts


def _candidates(model: nn.Module, device: torch.device, exact: bool) -> Iterator[tuple[Any, Any]]:
    kernels = runs_kernel(device)
    for module in model.modules():
        if kernels and experts.is_one(module):
            yield experts, module
        elif rope.is_one(module) and (kernels or rope.has_loop(module)):
            yield rope, module
        elif norms.is_one(module):
            yield norms, module
        elif gates.is_one(module, exact):
            yield gates, module
        elif linears.is_one(module, exact):
            yield linears, module


def _read_by(module: nn.Module) -> Iterator[nn.Module]:
    """The linear layers whose weight the code of ``module``, their parent, reads itself, such as LongCat's router."""
    names = [name for name, child in module.named_children() if type(child) is nn.Linear]
    if names:
        kind: Any = type(module)
        code = _source(kind)
        yield from (getattr(module, name) for name in names if f".{name}.weight" in code)


@cache
def _source(of: type) -> str:
    """The code of a class, with what it inherits; "" of one that has none to read."""
    found = ""
    for each in of.__mro__:
        if each is nn.Module:
            break
        try:
            found += inspect.getsource(each)
        except (OSError, TypeError):
            continue
    return found


def _tried(sort: Any, module: Any, device: torch.device) -> tuple[Maker | None, Callable[..., Tensor] | None]:
    """How modules of this one's kind are fused, and its own fused forward; None if they are not."""
    whys = []
    for make in sort.WAYS:
        before = room.mark()
        try:
            forward = make(module)
            why = "its activation or dtype is not known" if forward is None else sort.differs(module, forward)
            if not why:
                return make, forward
        except Exception as problem:  # whatever a compiler or modeling code trips over
            forget_last_error(device)
            why = f"{type(problem).__name__}: {problem}"
        forward = None
        room.back_to(before)
        whys.append(why)
    level = logging.WARNING if getattr(module, "is_slow", False) else logging.INFO
    _log.log(level, "%s keeps its own forward: %s", type(module).__name__, "; ".join(whys))
    return None, None
