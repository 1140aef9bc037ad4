"""``Wakeup``: ends the wait of another thread, or of the thread that a signal's handler interrupts."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Wakeup:
    """A ``threading.Event`` that a signal's handler may set.

    A handler runs in the middle of whatever its thread does, be it a call of ``set`` or ``wait``. An ``Event`` has a
    lock, for which the handler would wait for ever, and it misses a handler that comes between its look and its sleep.
    ``SimpleQueue.put`` is made for handlers, and ``get`` misses nothing.
    """

    def __init__(self) -> None:
        self._news: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether ``set`` was called after the last ``clear``."""
        return not self._news.empty()

    def set(self) -> None:
        """Ends every ``wait``, and those that begin before ``clear`` is called. From any thread or handler."""
        if self._news.empty():
            self._news.put(None)

    def clear(self) -> None:
        """The next ``wait`` waits again. Who waits for a condition clears, asks for it, and only then waits."""
        with suppress(Empty):
            while True:
                self._news.get_nowait()

    def wait(self, timeout_s: float) -> bool:
        """Until it is set, then True, or ``timeout_s`` seconds are over."""
        try:
            self._news.get(timeout=max(0.0, timeout_s))
        except Empty:
            return False
        self._news.put(None)
        return True
