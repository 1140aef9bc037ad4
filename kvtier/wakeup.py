"""``Wakeup``: ends the wait of another thread, or of the thread that a signal's handler interrupts."""

from __future__ import annotations

import threading


class Wakeup:
    """A ``threading.Event`` that may be set within itself.

    A signal's handler runs in the middle of whatever its thread does, be it a call of ``set`` or ``wait``. The lock of
    an ``Event`` is not re-entrant, so a handler that sets one can wait for itself for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._is_set = False

    def is_set(self) -> bool:
        """Whether ``set`` was called after the last ``clear``."""
        return self._is_set

    def set(self) -> None:
        """Ends every ``wait``, and those that begin before ``clear`` is called. From any thread or handler."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """The next ``wait`` waits again."""
        self._is_set = False

    def wait(self, timeout_s: float) -> bool:
        """Until it is set, then True, or ``timeout_s`` seconds are over."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout_s)
