"""Decode steps of a CPU as a list of torch's calls, recorded once: no modules, no Python between the calls.

Owns       when a step is recorded, what it consists of, and what makes a recording invalid.
Promises   a recording is the model's own calls. A model stays as it is if what it does depends on values of tensors, or
           if it reads tensors that it keeps from step to step. The first replay of each size runs beside the model, and
           all bits of the logits must be equal. Modules run while one has a hook, and are recorded anew if a module, a
           weight or a forward is replaced.
Does not   know attention, or products: they are calls like torch's (``visible``). It does not notice other state of
           Python: a counter of steps in a module would stay as it was.

In eager steps of small models, half of the time goes to modules, checks and shapes, which come out the same for each
step of as many rows. Sizes are baked into a recording, so there is one for each number of rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

_log = logging.getLogger(__name__)

AFTER = 8
"""The step of a size that is recorded. A recording costs as much as 7 to 12 steps save (Gemma-3-270M and the bundled
model), so a size that ends right then has cost some twice what was to be had."""
_SHAPES = "size", "dim", "stride", "numel", "nelement", "element_size", "storage_offset", "__len__"
_KINDS = "get_device", "is_contiguous", "is_floating_point", "is_complex", "is_neg", "is_inference"
"""Questions about a tensor whose answers do not depend on values, as no answer of a property does: results whose size
depends on values are refused where they are made."""
_CASTS = "to", "float", "type", "type_as", "contiguous"
"""Calls that give back what they were given if they have nothing to do, which is so by its type and its place in
memory. Then they are left out."""
_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""torch's own marks of operations whose result has a size by values, or is a value."""
_LITERALS = frozenset((int, bool, str, type(None), type(...)))

F = TypeVar("F", bound=Callable[..., Any])


def visible(function: F) -> F:
    """``function`` of tensors, seen as one call by torch's function modes, as torch's own functions are.

    Sizes of its results must not depend on values.
    """

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if has_torch_function(args):
            return handle_torch_function(function, args, *args, **named)
        return function(*args, **named)

    function.is_whole = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


class _Operations(TorchDispatchMode):
    """Sees the operations within torch's calls; ``by_values``: the name of one that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.by_values = ""
        self.looks = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.looks:
            if func._can_decompose():  # what it consists of comes here, too
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            if not _BY_VALUES.isdisjoint(func.tags) and not _is_gather(func, args):
                self.by_values = func.overloadpacket.__name__
        return func(*args, **kwargs)


def _is_gather(func: Any, args: Sequence[Any]) -> bool:
    """Whether it indexes by integers. Masks have a size by values."""
    masks = torch.bool, torch.uint8
    return func is torch.ops.aten.index.Tensor and all(i is None or i.dtype not in masks for i in args[1])


class Recorder(TorchFunctionMode):
    """Notes torch's calls in its context. ``inputs`` by name; ``weights``, by id: tensors that may be read besides.

    ``problem`` says why the calls are not all that the model does; "" if they are.
    """

    def __init__(self, inputs: dict[str, Any], weights: dict[int, Tensor]) -> None:
        super().__init__()
        self.problem = ""
        self._inputs, self._weights = inputs, weights
        self._names = {id(value): name for name, value in inputs.items()}
        self._held: list[Any] = list(inputs.values())  # no other object gets the id of one of them
        self._globals: dict[str, Any] = {}
        self._calls: list[str] = []
        self._last_use: dict[str, int] = {}
        self._operations = _Operations()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._operations.looks = not getattr(func, "is_whole", False)
        with self._operations:
            out = func(*args, **kwargs)
        if not self.problem:
            self._note(func, args, kwargs, out)
        return out

    def recording(self, result: Tensor) -> Callable[..., Tensor]:
        """The calls as a function of ``inputs``, in their order, that gives ``result``."""
        name = self._written(result)
        ends: dict[int, list[str]] = {}
        for value, last in self._last_use.items():
            if value != name and value not in self._inputs:
                ends.setdefault(last, []).append(value)
        lines = [f"def recording({', '.join(self._inputs)}):"]
        for i, call in enumerate(self._calls):
            lines.append(f"    {call}")
            if i in ends:
                lines.append(f"    del {', '.join(ends[i])}")
        lines.append(f"    return {name}")
        exec("\n".join(lines), self._globals)
        made: Callable[..., Tensor] = self._globals["recording"]
        return made

    def _note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        name = func.__name__
        if self._operations.by_values:
            self.problem = self.problem or f"what it does depends on values of tensors ({self._operations.by_values})"
            return
        if name in ("__get__", *_SHAPES, *_KINDS) and not isinstance(out, Tensor):
            return
        if name in _CASTS and out is args[0]:
            return
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if in_place and id(args[0]) in self._weights:
            self.problem = self.problem or f"it changes a weight or buffer {list(args[0].shape)} ({name})"
        given = [self._written(arg) for arg in args] + [f"{key}={self._written(arg)}" for key, arg in kwargs.items()]
        call = f"{self._constant(func)}({', '.join(given)})"
        if isinstance(out, Tensor):
            self._calls.append(f"{self._named(out)} = {call}")
        elif isinstance(out, tuple | list) and out and all(isinstance(each, Tensor) for each in out):
            self._calls.append(f"{', '.join(map(self._named, out))}, = {call}")
        elif out is None:
            self._calls.append(call)
        else:
            self.problem = self.problem or f"it asks a tensor for more than its shape ({name})"

    def _named(self, out: Tensor) -> str:
        """The name of a result: that of an argument if it is one, as of calls in place."""
        name = self._names.setdefault(id(out), f"v{len(self._held)}")
        self._held.append(out)
        self._last_use[name] = len(self._calls)
        return name

    def _written(self, value: Any) -> str:
        """An argument, as source."""
        if id(value) in self._names:
            name = self._names[id(value)]
            self._last_use[name] = len(self._calls)
            return name
        if isinstance(value, Tensor) and id(value) not in self._weights:
            self.problem = self.problem or f"it reads a tensor {list(value.shape)} that is none of its weights"
        if isinstance(value, list):
            return f"[{', '.join(map(self._written, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._written(each)}, ' for each in value)})"
        if isinstance(value, dict | set):
            self.problem = self.problem or f"it gives a {type(value).__name__} to a function of tensors"
        if type(value) is slice:
            return f"slice({', '.join(self._written(each) for each in (value.start, value.stop, value.step))})"
        return repr(value) if type(value) in _LITERALS else self._constant(value)

    def _constant(self, value: Any) -> str:
        """The name of an object that is the same in each step."""
        name = f"c{id(value)}"
        self._globals[name] = value
        return name


class _Parts:
    """What a model consists of, by identity: modules, weights, buffers, and forwards of single modules; its mode."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._vars = [vars(module) for module in modules]
        self._tables = [t for m in modules for t in (m._modules, m._parameters, m._buffers) if t]
        self._hooks = [table for m in modules for table in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [of_modules._global_forward_hooks, of_modules._global_forward_pre_hooks]
        self._then = self._now()

    @property
    def have_hooks(self) -> bool:
        return any(self._hooks)

    @property
    def are_same(self) -> bool:
        now = self._now()
        return len(now) == len(self._then) and all(map(is_, now, self._then))

    def _now(self) -> list[Any]:
        parts = chain.from_iterable(table.values() for table in self._tables)
        return [*parts, *(own.get("forward") for own in self._vars), self._vars[0]["training"]]


class RecordedSteps:
    """The recorded decode steps of one model on a CPU. Calls come from one thread at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parts = _Parts(model)
        self._recordings: dict[int, Callable[..., Tensor]] = {}
        self._compared = set[int]()
        self._seen = Counter[int]()
        self._problem, self._renewals = "", 0
        self.is_on = True
        """Off: all steps run module by module."""
        self.replayed = 0

    @property
    def reason(self) -> str:
        """Why steps run module by module; "" if they are recorded."""
        return "modules have hooks" if self._parts.have_hooks else self._problem if self.is_on else "it is off"

    def forward(self, run: Callable[..., Tensor], token_ids: Tensor, context: Any, rows: Tensor) -> Tensor:
        """What ``run`` gives for a step of one token an entry; ``run`` may be called twice."""
        if self._problem or not self.is_on or self._parts.have_hooks or torch.is_autocast_enabled("cpu"):
            return run(token_ids, context, rows)
        if not self._parts.are_same:
            self._begin_anew()
        size = len(rows)
        recording = self._recordings.get(size)
        if recording is None:
            self._seen[size] += 1
            if self._seen[size] < AFTER or self._problem:
                return run(token_ids, context, rows)
            return self._recorded(run, token_ids, context, rows)
        try:
            found = recording(token_ids, context.positions, rows, context)
        except Exception as problem:  # if it is not the recording's alone, the model raises it again
            self._give_up(f"a recorded step of {size} rows raised {type(problem).__name__}: {problem}")
            return run(token_ids, context, rows)
        if size not in self._compared:
            expected = run(token_ids, context, rows)  # last, so what it has written stays
            if not _same_bits(found, expected):
                self._give_up(f"a recorded step of {size} rows gave other logits")
                return expected
            self._compared.add(size)
            self._renewals = 0
        self.replayed += 1
        return found

    def stats(self) -> dict[str, Any]:
        """Recorded sizes, replayed steps, and why no more are recorded, if so."""
        return {"recorded": sorted(self._recordings), "replayed": self.replayed, "reason": self.reason}

    def _recorded(self, run: Callable[..., Tensor], token_ids: Tensor, context: Any, rows: Tensor) -> Tensor:
        """The step's result, which is recorded."""
        inputs = {"token_ids": token_ids, "positions": context.positions, "rows": rows, "step": context}
        weights = {id(x): x for x in (*self._model.parameters(), *self._model.buffers())}
        recorder = Recorder(inputs, weights)
        with recorder:
            result = run(token_ids, context, rows)
        recording = recorder.recording(result)
        if recorder.problem:
            self._give_up(recorder.problem)
        else:
            self._recordings[len(rows)] = recording
        return result

    def _begin_anew(self) -> None:
        """The model has other parts. If it gets them again and again, it is not recorded any more."""
        self._renewals += 1
        if self._renewals == AFTER:
            self._give_up("its modules or weights are replaced from step to step")
        self._parts = _Parts(self._model)
        self._recordings.clear()
        self._compared.clear()
        self._seen.clear()

    def _give_up(self, problem: str) -> None:
        self._problem = problem
        self._recordings.clear()
        _log.info("decode steps run module by module: %s", problem)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Of float32 tensors; NaN is equal to the same NaN."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
