"""Points in a device's compute stream, for which the host can wait.

Owns       one event each; on a CPU nothing.
Promises   ``synchronize`` returns once all work queued before ``record`` has run. During a graph's capture it returns
           at once, since a capture allows no waits.
Does not   know what is queued.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Moment(Protocol):
    """A point in the compute stream."""

    def record(self) -> None:
        """Now, behind all queued work."""

    def synchronize(self) -> None:
        """Returns once all work queued before ``record`` has run; at once if nothing was recorded."""


class _CudaMoment:
    """An event of the stream that is current on a device, whatever the current device is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        if not torch.cuda.is_current_stream_capturing():  # a capture allows no waits, and earlier work has run
            self._event.synchronize()


class _Now:
    """On a CPU all queued work has run."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def new_moment(device: torch.device) -> Moment:
    """A moment of the current stream of ``device``."""
    return _CudaMoment(device) if device.type == "cuda" else _Now()
