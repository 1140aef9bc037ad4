"""``MemoryGuard``: the memory that a copy engine reads and writes, and the engine's last moment.

Owns       the end of the engine and of its arenas.
Promises   memory is given back once no copy can touch it. If a copy does not end, memory and engine are kept for the
           life of the process (``KEPT``). An owner that was never closed, or not even completed, leaves no threads
           behind. A forked child touches neither. Keeps I22, I23.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.cpu_offload.engines import CopyEngine, EngineFactory
from kvtier.cpu_offload.engines.by_name import build_engine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.machine.errors import CacheClosed
from kvtier.machine.forks import of_another_process, watch
from kvtier.machine.kept import KEPT
from kvtier.pools.arena import Arena

CLOSE_TIMEOUT_S = 30.0
CLOSE_AGAIN_S = 0.1
"""Timeout of a repeated ``close``: long enough to poll an idle device once."""
LAST_S = 1.0
"""Seconds that the finalizer of an unclosed owner waits for copies in flight; idle threads end at once."""


class MemoryGuard:
    """Over ``arenas``. ``make_engine`` may bring the memory of some, and makes the copy engine."""

    def __init__(self, make_engine: EngineFactory, arenas: Sequence[Arena]) -> None:
        self._make = make_engine
        self._arenas = arenas
        self._engine: CopyEngine | None = None
        self._also: Callable[[float], bool] = lambda timeout_s: True
        self._last: weakref.finalize[[CopyEngine, TierMemory], object] | None = None
        self._others: list[weakref.finalize[[float], object]] = []
        self._is_closing = self._is_free = self._is_elsewhere = False
        self._lock = threading.RLock()

    def build_engine(self, owner: object, memory: TierMemory) -> CopyEngine:
        """The copy engine over ``memory``. It is stopped when ``owner`` is, or when nobody has it any more."""
        self._engine = build_engine(self._make, memory)
        self._last = weakref.finalize(owner, _stop, self._engine, memory)
        watch(self)
        return self._engine

    def also(self, owner: object, close: Callable[[float], bool]) -> None:
        """``close`` ends, within the given seconds, what else touches the memory; False if it may still do so.

        It is called too when nobody has ``owner`` any more.
        """
        self._also = close
        self._others.append(weakref.finalize(owner, close, LAST_S))

    def on_fork(self) -> None:
        """Engine and memory are the parent's: here they are neither ended nor given back."""
        self._is_free = self._is_elsewhere = True
        self._lock = threading.RLock()  # some other thread may have had it
        for last in (self._last, *self._others):
            if last is not None:
                last.detach()
        KEPT.append(self)

    def check_here(self) -> None:
        """Raises ``CacheClosed`` in a forked child."""
        if self._is_elsewhere:
            raise CacheClosed(of_another_process("this host tier"))

    def give_up(self) -> None:
        """The owner could not be completed: gives back its memory, unless a copy may still write there."""
        idle = self._also(LAST_S)
        idle &= bool(self._make.give_back() if self._last is None else self._last())
        if idle:
            for arena in self._arenas:
                arena.free()
        else:
            KEPT.append(self._arenas)

    def close(self) -> bool:
        """Ends all copies (bounded) and gives the memory back; False if a copy may still write there.

        If it was False, the next call looks again, for a moment. From any thread.
        """
        with self._lock:
            if self._is_free:
                return True
            timeout_s = CLOSE_AGAIN_S if self._is_closing else CLOSE_TIMEOUT_S
            self._is_closing = True
            is_idle = self._also(timeout_s)
            if (self._engine is None or self._engine.close(timeout_s)) and is_idle:
                for arena in self._arenas:
                    arena.free()
                self._is_free = True  # last: after an interruption the next call begins again
            return self._is_free


def _stop(engine: CopyEngine, memory: TierMemory) -> bool:
    """Finalizer: stops the engine. If copies still run, it leaks the engine and its memory on purpose."""
    stopped = False
    with suppress(Exception):  # no caller to tell
        stopped = engine.close(LAST_S)
    if not stopped:
        KEPT.append((engine, memory))
    return stopped
