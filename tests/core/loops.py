"""kvtier's compiled loops, and the types of arguments that they have been compiled for."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence

from numba.core.dispatcher import Dispatcher

import kvtier


@functools.cache
def loops() -> Sequence[tuple[str, Dispatcher]]:
    """Every compiled loop that an engine calls from Python (inlined ones are compiled into their callers)."""
    found = list[tuple[str, Dispatcher]]()
    for module in pkgutil.walk_packages(kvtier.__path__, "kvtier."):
        if module.name.startswith(("kvtier.testing", "kvtier.integrations.vllm")):
            continue
        try:
            there = importlib.import_module(module.name)
        except ModuleNotFoundError as missing:  # an extra's, such as msgspec: no loop lies behind it
            if str(missing.name).startswith(("kvtier", "runner")):
                raise
            continue
        for name, value in vars(there).items():
            own = isinstance(value, Dispatcher) and value.py_func.__module__ == module.name
            if own and not value.targetoptions.get("forceinline"):
                found.append((f"{module.name}.{name}", value))
    return found


def compiled_again() -> dict[str, list[str]]:
    """Loops that were compiled for a second form of their arguments: somebody's step has waited for the compiler."""
    return {name: [*map(str, loop.signatures)] for name, loop in loops() if len(loop.signatures) > 1}
