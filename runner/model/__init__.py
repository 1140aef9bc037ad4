"""A model in memory, and its attention over the pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.model.hybrid import HybridModel

__all__ = ["HybridModel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runner.model.hybrid import HybridModel

    return HybridModel
