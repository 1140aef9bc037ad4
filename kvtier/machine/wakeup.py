"""``Wakeup``: an event that may be set at any moment, by any thread."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Wakeup:
    """A ``threading.Event`` without a lock.

    Garbage collector callbacks and signal handlers run in the middle of any code of their thread, even of ``set`` or
    ``wait``. There they would wait for the lock of an ``Event`` for ever. ``SimpleQueue.put`` is made for them.
    """

    def __init__(self) -> None:
        self._news: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether ``set`` was called after the last ``clear``."""
        return not self._news.empty()

    def set(self) -> None:
        """Ends every ``wait``, even a ``wait`` that begins later but before ``clear``. From anywhere."""
        if self._news.empty():
            self._news.put(None)

    def clear(self) -> None:
        """The next ``wait`` waits again. To wait for a condition: clear, check the condition, and only then wait."""
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
