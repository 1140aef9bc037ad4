"""The reference engine: serves hybrid transformers models with kvtier.

Its names are imported at their first use: torch and transformers take seconds, and ``kvtier --help`` must not wait.
Loading any model registers the bundled model's architecture with transformers; so does ``runner.needle``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner import needle as needle
    from runner.api.async_llm import AsyncLLM
    from runner.api.llm import LLM
    from runner.engine.outputs import CompletionOutput, RequestOutput
    from runner.errors import (
        EngineDead,
        ForwardFailed,
        ModelLoadError,
        NonFiniteLogits,
        NonFiniteState,
        Overloaded,
        RunnerError,
        UnknownRequest,
    )
    from runner.sampling.grammars.structured_outputs import StructuredOutputs
    from runner.sampling.params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineDead",
    "ForwardFailed",
    "ModelLoadError",
    "NonFiniteLogits",
    "NonFiniteState",
    "Overloaded",
    "RequestOutput",
    "RequestOutputKind",
    "RunnerError",
    "SamplingParams",
    "StructuredOutputs",
    "UnknownRequest",
]

_HOMES = {
    "AsyncLLM": "runner.api.async_llm",
    "CompletionOutput": "runner.engine.outputs",
    "EngineDead": "runner.errors",
    "ForwardFailed": "runner.errors",
    "LLM": "runner.api.llm",
    "ModelLoadError": "runner.errors",
    "NonFiniteLogits": "runner.errors",
    "NonFiniteState": "runner.errors",
    "Overloaded": "runner.errors",
    "RequestOutput": "runner.engine.outputs",
    "RequestOutputKind": "runner.sampling.params",
    "RunnerError": "runner.errors",
    "SamplingParams": "runner.sampling.params",
    "StructuredOutputs": "runner.sampling.grammars.structured_outputs",
    "UnknownRequest": "runner.errors",
}


def __getattr__(name: str) -> Any:
    if name != "needle" and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "needle":
            return import_module("runner.needle")
        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as problem:
        from runner.errors import of_missing

        told = of_missing(problem, name)
        if told is None:
            raise
        raise told from problem
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "needle"})
