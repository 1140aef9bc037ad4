"""What a section gives back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.kernels import Kernel, StateKernel


@dataclass(frozen=True)
class Figure:
    """One measured number and, where one was asked for, the mark that it must reach."""

    section: str
    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the mark is reached; None if there is none."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


class Budget:
    """The time that a whole run may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._kept_s = 0.0

    def keep(self, needs_s: float, later_s: Iterable[float]) -> None:
        """Keeps of what is left what later sections need, as far as it also holds ``needs_s`` for the next one."""
        self._kept_s, left = 0.0, self._end - time.monotonic() - needs_s
        for later in later_s:
            if self._kept_s + later <= left:
                self._kept_s += later

    @property
    def left_s(self) -> float:
        """Seconds left for the section that runs; never negative."""
        return max(0.0, self._end - time.monotonic() - self._kept_s)


@dataclass(frozen=True)
class Section:
    """A part of the run. ``needs_s``: seconds without which it is not begun; ``kernels``: FlashInfer's that it runs."""

    name: str
    run: Callable[[Budget], Iterator[Figure]]
    needs_s: float = 20.0
    kernels: Callable[[], Set[Kernel | StateKernel]] = set
