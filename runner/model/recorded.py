"""Decode steps of a CPU as a list of torch's calls, recorded once: no modules, no Python between the calls.

Owns       when a step is recorded, what it consists of, and the proof that it is the model's.
Promises   the bits of the model's own forward: the first replay of each size is compared with it, K and V written again
           by the model. A forward that asks for the value of a tensor, or reads one from elsewhere than its weights, is
           not recorded, and neither are others of this model. While a module has hooks, its own forward runs.
Does not   know attention, or products: they are calls like torch's (``visible``).

In eager steps of small models, half of the time goes to modules, checks and shapes, which come out the same for each
step of as many rows. Sizes are baked into a recording, so there is one for each number of rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

_log = logging.getLogger(__name__)

AFTER = 8
"""Steps of a size before it is recorded. A recording costs as much as 5 to 12 steps save (Gemma-3-270M and the bundled
model), so a size that ends right then has cost at most twice what was to be had."""
_SHAPES = "size", "dim", "stride", "numel", "nelement", "element_size", "storage_offset", "__len__"
_KINDS = "get_device", "is_contiguous", "is_floating_point", "is_complex", "is_neg", "is_inference"
"""Questions whose answers do not depend on a tensor's values, as no answer of a property does."""
_CASTS = "to", "float", "contiguous", "type_as"
"""Calls that may have nothing to do, and then give back what they were given."""
_LITERALS = frozenset((int, bool, str, type(None), type(...)))

F = TypeVar("F", bound=Callable[..., Any])


def visible(function: F) -> F:
    """``function`` of tensors, seen as one call by torch's function modes, as torch's own functions are."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if has_torch_function(args):
            return handle_torch_function(function, args, *args, **named)
        return function(*args, **named)

    return call  # type: ignore[return-value]


class CannotRecord(Exception):
    """A forward is more than a list of calls of its inputs; the message says why."""


class Recorder(TorchFunctionMode):
    """Notes torch's calls in its context. ``inputs`` by name; ``weights``, by id: tensors that may be read besides."""

    def __init__(self, inputs: dict[str, Any], weights: dict[int, Tensor]) -> None:
        self._inputs, self._weights = inputs, weights
        self._names = {id(value): name for name, value in inputs.items()}
        self._held: list[Any] = list(inputs.values())  # no other object gets the id of one of them
        self._globals: dict[str, Any] = {}
        self._calls: list[str] = []
        self._last_use: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.__name__
        if name in ("__get__", *_SHAPES, *_KINDS) and not isinstance(out, Tensor):
            return out
        if name in _CASTS and out is args[0]:
            return out
        given = [self._written(arg) for arg in args] + [f"{key}={self._written(arg)}" for key, arg in kwargs.items()]
        call = f"{self._constant(func)}({', '.join(given)})"
        if isinstance(out, Tensor):
            self._calls.append(f"{self._named(out)} = {call}")
        elif isinstance(out, tuple | list) and out and all(isinstance(each, Tensor) for each in out):
            self._calls.append(f"{', '.join(map(self._named, out))}, = {call}")
        elif out is None:
            self._calls.append(call)
        else:
            raise CannotRecord(f"its code looks at the values of a tensor ({name})")
        return out

    def recording(self, result: Tensor) -> Callable[..., Tensor]:
        """A function of ``inputs``, in their order, that gives ``result``."""
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
        found: Callable[..., Tensor] = self._globals["recording"]
        return found

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
        if isinstance(value, Tensor):
            if id(value) not in self._weights:
                raise CannotRecord(f"it reads a tensor {list(value.shape)} that is none of its weights")
            return self._constant(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._written, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._written(each)}, ' for each in value)})"
        if isinstance(value, dict | set):
            raise CannotRecord(f"it gives a {type(value).__name__} to a function of tensors")
        if type(value) is slice:
            return f"slice({', '.join(self._written(each) for each in (value.start, value.stop, value.step))})"
        return repr(value) if type(value) in _LITERALS else self._constant(value)

    def _constant(self, value: Any) -> str:
        """The name of an object that is the same in each step."""
        name = f"c{id(value)}"
        self._globals[name] = value
        return name


class RecordedSteps:
    """The recorded decode steps of one model on a CPU. Calls come from one thread at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recordings: dict[int, Callable[..., Tensor]] = {}
        self._compared = set[int]()
        self._seen = Counter[int]()
        self._hooks: list[Any] = [of_modules._global_forward_hooks, of_modules._global_forward_pre_hooks]
        for module in model.modules():
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self.replayed = 0
        self.reason = ""
        """Why steps are not recorded; "" if they are."""

    def forward(self, run: Callable[..., Tensor], token_ids: Tensor, context: Any, rows: Tensor) -> Tensor:
        """What ``run`` gives for a step of one token an entry; ``run`` may be called twice."""
        if self.reason or any(self._hooks):
            return run(token_ids, context, rows)
        size = len(rows)
        recording = self._recordings.get(size)
        if recording is None:
            self._seen[size] += 1
            if self._seen[size] < AFTER:
                return run(token_ids, context, rows)
            return self._recorded(run, token_ids, context, rows)
        found = recording(token_ids, context.positions, rows, context)
        if size not in self._compared:
            expected = run(token_ids, context, rows)  # last, so what it has written stays
            if not _same_bits(found, expected):
                return self._given_up(f"a recorded step of {size} rows gave other logits", expected)
            self._compared.add(size)
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
        try:
            with recorder:
                result = run(token_ids, context, rows)
            self._recordings[len(rows)] = recorder.recording(result)
        except Exception as problem:  # if it is not the recorder's, the model raises it again
            why = str(problem) if isinstance(problem, CannotRecord) else f"{type(problem).__name__}: {problem}"
            return self._given_up(why, run(token_ids, context, rows))
        return result

    def _given_up(self, why: str, result: Tensor) -> Tensor:
        self.reason = why
        self._recordings.clear()
        _log.info("decode steps run module by module: %s", why)
        return result


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Of float32 tensors; NaN is equal to the same NaN."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
