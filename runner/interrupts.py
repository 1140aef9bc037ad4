"""Signals at their time: one that raises (Ctrl-C) takes effect in a forward or between two steps, nowhere else.

Owns       the handlers of this process's signals while a call runs, on the main thread.
Promises   bookkeeping is never left halfway by a signal; a signal is at most a step late.
Does not   act on other threads: Python runs handlers on the main one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """``with interrupts.held():`` around a call, and in it ``with interrupts.allowed():`` around what may be left."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._waiting: list[int] = []
        self._allowed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals with a Python handler wait, until ``allowed`` or the end. Does nothing on other threads."""
        if threading.current_thread() is not threading.main_thread() or self._handlers:
            yield
            return
        for kind in signal.valid_signals():
            handler = signal.getsignal(kind)
            if callable(handler):
                self._handlers[int(kind)] = handler
        try:
            for number in self._handlers:
                signal.signal(number, self._on_signal)
            yield
        finally:
            self._allowed = False
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._on_signal:  # else somebody has put another one there
                    signal.signal(number, handler)
            handlers, self._handlers = self._handlers, {}
            waiting, self._waiting = self._waiting, []
            for number in waiting:  # the first that raises ends the call, as it would have
                handlers[number](number, None)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Signals take effect here, first of all those that wait. One that raises ends this: the next ones wait."""
        self._allowed = True
        try:
            while self._waiting:
                self._run(self._waiting.pop(0), None)
            yield
        finally:
            self._allowed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._run(number, frame)
        else:
            self._waiting.append(number)

    def _run(self, number: int, frame: FrameType | None) -> None:
        self._allowed = False
        self._handlers[number](number, frame)
        self._allowed = True
