"""Grammars on their way to being compiled, in processes of their own (``grammar_child.py``).

Owns       the process that compiles, from the first grammar on; its jobs, and a thread that waits for them while there
           are any.
Promises   a grammar ends once it has used up its CPU time or its memory, or once all its callers have left. Quick
           grammars do not wait for slow ones. A process that has ended is made anew for the next grammar.
Does not   know what a grammar is, or keep compiled ones (``structured.py``).

A grammar that takes longer than ``SHORT_S`` ends there, and begins again once one of the turns for slow ones is free.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvtier import CacheClosed, InvalidRequest
from kvtier.machine.forks import watch
from kvtier.machine.reference_engine import as_main
from runner.errors import GrammarFailed
from runner.sampling.grammars import child as grammar_child

SLOW_NICE = 10
"""Slow grammars leave the processor to everything else."""

AT_ONCE = 2
"""Quick grammars compiled at once, and as many slow ones; further ones wait for their turn."""

SHORT_S = 0.5
"""CPU time from which on a grammar is a slow one. Usual ones take some milliseconds."""

MOST_MEMORY = 2**30
"""Bytes that compiling one grammar may take."""

MOST_BYTES = 2**26
"""Most bytes of a compiled grammar, as it is sent. One over 262,144 tokens has some 1 to 30 MB."""

_PATIENCE_S = 60.0
"""Time for the process to take a job while it starts; it takes half a second."""

_NO_PROCESS = "the process that compiles grammars has ended, or cannot be started; the log says why"

T = TypeVar("T")


class _Pace(Enum):
    """The turns that a job waits for."""

    QUICK = 0
    SLOW = 1


@dataclass(eq=False)
class _Job(Generic[T]):
    """One grammar, for all who want the same."""

    key: Hashable
    order: dict[str, Any]
    callers: list[Future[T]] = field(default_factory=list)
    pace: _Pace = _Pace.QUICK
    process: CompilerProcess | None = None
    """The process that has the job, or had it last."""
    is_second: bool = False
    """Whether a process has ended before it began with it."""
    line: socket.socket | None = None
    """The line to the child that works on the job."""
    heard: bytearray = field(default_factory=bytearray)

    @property
    def is_wanted(self) -> bool:
        return not all(caller.cancelled() for caller in self.callers)


class CompilerProcess:
    """The process that forks the children. It ends with this object."""

    def __init__(self, start: dict[str, Any]) -> None:
        mine, its = socket.socketpair()
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *as_main(grammar_child.__name__, str(its.fileno()))],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
                env=os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._line = mine
        self._end = weakref.finalize(self, _end, mine, self._process)
        self._line.settimeout(_PATIENCE_S)
        try:
            self._send(json.dumps(start).encode(), [])
        except OSError:
            self.close()
            raise

    def begin(self, order: dict[str, Any]) -> socket.socket:
        """The line to a new child, which works on ``order``. Raises ``OSError`` if the process has ended."""
        mine, its = socket.socketpair()
        with its:
            try:
                self._send(json.dumps(order).encode(), [its.fileno()])
            except BaseException:
                mine.close()
                raise
        mine.setblocking(False)
        return mine

    def close(self) -> None:
        """Ends it; its children end once their lines are closed."""
        self._end()

    def _send(self, message: bytes, files: list[int]) -> None:
        socket.send_fds(self._line, [grammar_child.HEAD.pack(len(message))], files)
        self._line.sendall(message)


def _end(line: socket.socket, process: subprocess.Popen[bytes]) -> None:
    line.close()
    process.kill()
    process.wait()


class Compilations(Generic[T]):
    """Compiles grammars for callers on any threads. ``begin`` never waits."""

    def __init__(
        self, start: Callable[[], dict[str, Any]], finish: Callable[[Hashable, str], T], limit_s: float
    ) -> None:
        """``start``: what the process has to know, asked before the first grammar; ``finish``: makes the callers'
        result of what a child has sent. Both run on the thread here, and may raise. ``limit_s``: CPU seconds of one
        grammar."""
        self._start, self._finish, self._limit_s = start, finish, limit_s
        self._lock = threading.Lock()
        self._jobs: dict[Hashable, _Job[T]] = {}
        """All that have not ended, in the order in which they wait."""
        self._bell: socket.socket | None = None
        """Wakes the thread, while there is one."""
        self._process: CompilerProcess | None = None
        self._is_closed = False
        watch(self)

    def on_fork(self) -> None:
        """A forked child has no such thread; the process that compiles is its parent's."""
        self._lock, self._is_closed = threading.Lock(), True
        self._bell = self._process = None
        self._jobs.clear()

    def begin(self, key: Hashable, order: dict[str, Any]) -> Future[T]:
        """Compiles ``order``, once for all callers with an equal ``key``. To leave, cancel the future."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise CacheClosed("the engine is closed")
            self._jobs.setdefault(key, _Job(key, order)).callers.append(future)
            if self._bell is None:
                self._bell, hears = socket.socketpair()
                self._bell.setblocking(False)
                threading.Thread(target=self._run, args=(hears,), name="kvtier-grammars", daemon=True).start()
        future.add_done_callback(lambda ended: self._ring() if ended.cancelled() else None)
        self._ring()
        return future

    def close(self) -> None:
        """Ends all that is being compiled; its callers get ``CacheClosed``."""
        with self._lock:
            self._is_closed = True
            process = self._process if self._bell is None else None
        self._ring()
        if process is not None:
            process.close()

    def _ring(self) -> None:
        with self._lock:
            if self._bell is not None:
                with suppress(BlockingIOError):  # it rings already
                    self._bell.send(b"r")

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self, hears: socket.socket) -> None:
        with hears, selectors.DefaultSelector() as selector:
            selector.register(hears, selectors.EVENT_READ)
            try:
                while self._has_work(selector):
                    for ready, _ in selector.select():
                        if ready.data is None:
                            hears.recv(2**12)
                        else:
                            self._hear(ready.data, selector)
            except BaseException as problem:  # a fault of ours: nobody may wait for ever
                with self._lock:
                    left, self._bell = list(self._jobs.values()), None
                    self._jobs.clear()
                for job in left:
                    self._tell(job, problem)
                raise

    def _has_work(self, selector: selectors.BaseSelector) -> bool:
        """Ends the jobs that nobody wants, and begins the next ones; False if none is left, and the thread ends."""
        with self._lock:
            unwanted = [job for job in self._jobs.values() if self._is_closed or not job.is_wanted]
            for job in unwanted:
                del self._jobs[job.key]
            ready = [job for pace in _Pace for job in self._next(pace)]
            is_over = not self._jobs
            if is_over and self._bell is not None:
                self._bell.close()
                self._bell = None
        for job in unwanted:
            self._hang_up(job, selector)
            self._tell(job, CacheClosed("the engine is closed"))
        for job in ready:
            try:
                self._send(job, selector)
            except Exception as problem:
                self._end(job, problem)
        if is_over and self._is_closed and self._process is not None:
            self._process.close()
        return not is_over

    def _next(self, pace: _Pace) -> list[_Job[T]]:
        """The jobs whose turn has come."""
        alike = [job for job in self._jobs.values() if job.pace is pace]
        waiting = [job for job in alike if job.line is None]
        return waiting[: AT_ONCE - (len(alike) - len(waiting))]

    def _send(self, job: _Job[T], selector: selectors.BaseSelector) -> None:
        """A child begins to work on a job. Raises ``GrammarFailed``, and what ``start`` raises."""
        is_quick = job.pace is _Pace.QUICK
        seconds = min(SHORT_S, self._limit_s) if is_quick else self._limit_s
        limits = {"seconds": seconds, "memory": MOST_MEMORY, "most": MOST_BYTES, "nice": 0 if is_quick else SLOW_NICE}
        try:
            if self._process is None:
                self._process = CompilerProcess(self._start())
            job.process = self._process
            job.line = self._process.begin(job.order | limits)
        except OSError as problem:
            self._lose(job)
            if job.is_second:
                raise GrammarFailed(_NO_PROCESS) from problem
            job.is_second = True
            self._send(job, selector)
        else:
            selector.register(job.line, selectors.EVENT_READ, job)

    def _lose(self, job: _Job[T]) -> None:
        """A process has ended by itself, before it began with a job: there will be a new one."""
        if self._process is not None and job.process is self._process:
            self._process.close()
            self._process = None

    def _hear(self, job: _Job[T], selector: selectors.BaseSelector) -> None:
        """Takes what a child has sent; its job has ended if that is all."""
        assert job.line is not None
        try:
            data = job.line.recv(2**20)
        except OSError:
            data = b""
        job.heard += data
        if data and len(job.heard) <= MOST_BYTES + 2:
            return
        self._hang_up(job, selector)
        heard, job.heard = bytes(job.heard), bytearray()
        if not heard and not job.is_second:
            self._lose(job)
            job.is_second = True
            return
        if heard[1:2] == grammar_child.TOO_LONG and job.pace is _Pace.QUICK and self._limit_s > SHORT_S:
            job.pace = _Pace.SLOW
            with self._lock:
                self._jobs[job.key] = self._jobs.pop(job.key)  # behind those that wait already
            return
        try:
            self._end(job, self._result(job, heard))
        except Exception as problem:
            self._end(job, problem)

    def _result(self, job: _Job[T], heard: bytes) -> T:
        """The callers' result, of what a child has said before it ended. Raises what they are told else."""
        begun, kind, text = heard[:1], heard[1:2], heard[2:]
        if begun != grammar_child.BEGUN:
            raise GrammarFailed(_NO_PROCESS)
        if kind == grammar_child.COMPILED:
            return self._finish(job.key, text.decode())
        reasons = {
            grammar_child.REFUSED: text.decode("utf-8", "replace"),
            grammar_child.TOO_LONG: f"compiling it takes more than {self._limit_s:g} s of CPU time; make it simpler",
            grammar_child.TOO_LARGE: "compiling it takes too much memory; make it simpler",
        }
        why = reasons.get(kind, "the process that compiled it has ended; make it simpler")
        raise InvalidRequest(f"structured_outputs.{job.order['kind']} cannot be used: {why}")

    def _hang_up(self, job: _Job[T], selector: selectors.BaseSelector) -> None:
        """The child of a job ends."""
        if job.line is not None:
            selector.unregister(job.line)
            job.line.close()
            job.line = None

    def _end(self, job: _Job[T], result: T | Exception) -> None:
        with self._lock:
            del self._jobs[job.key]
        self._tell(job, result)

    def _tell(self, job: _Job[T], result: T | BaseException) -> None:
        for caller in job.callers:
            if caller.set_running_or_notify_cancel():
                if isinstance(result, BaseException):
                    caller.set_exception(result)
                else:
                    caller.set_result(result)
