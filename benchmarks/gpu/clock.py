"""Moments of the stream that forwards run on: CUDA events on a GPU, elsewhere the host's clock."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes times on a device."""

    def mark(self) -> Any:
        """The moment behind everything that was launched so far."""

    def seconds(self, first: Any, last: Any) -> float:
        """Between two moments. Waits until both have come."""

    def wait(self) -> None:
        """Until the device has nothing left to do."""


class HostClock:
    """For a CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def wait(self) -> None: ...


class CudaClock:
    """For a GPU's current stream."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
