"""The thread that steps an engine while there is work.

Owns       the thread, and weak references to the streams of the requests' tokens.
Promises   bookkeeping runs on no other thread, so that no signal and no cancelled task leaves it halfway. A request is
           aborted if its stream has no holder any more. If the thread dies, the log has the error with its traceback at
           once, and once; then open requests end with ``EngineDead``. In a forked child every call raises
           ``CacheClosed``.
Does not   keep the engine alive: dropping the last reference to this object ends the thread. On a CPU it keeps no notes
           for gradients either: all runs in torch's inference mode. A tensor that a hook of a module keeps has to be
           cloned before it is changed or differentiated.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from kvtier import CacheClosed, KVTierError, Request
from kvtier.machine.forks import of_another_process, watch
from kvtier.machine.wakeup import Wakeup
from runner.engine.loop import Engine
from runner.engine.readers import Letters, Readers
from runner.engine.streams import StreamRef, TokenStream
from runner.errors import EngineDead
from runner.sampling.state import SamplingState

T = TypeVar("T")

log = logging.getLogger("kvtier.engine")


class _Call(NamedTuple):
    """A task for the thread, and its substitute if the thread has ended."""

    run: Callable[[], object]
    refuse: Callable[[KVTierError], object]


class _Shared:
    """The shared state of the thread and its owner; it keeps neither alive."""

    def __init__(self) -> None:
        self.news = Wakeup()
        self.closing = False
        self.thread: threading.Thread | None = None


class EngineThread:
    """Runs one engine. Any thread except its own may call all methods, and interrupt them at any point."""

    def __init__(self, engine: Engine, settles: bool) -> None:
        """``settles``: goes on until copies have ended; else copies are polled with the next request."""
        self._engine = engine
        self._has_work = engine.has_work if settles else engine.has_requests
        self._streams: dict[str, weakref.ref[TokenStream]] = {}
        self._calls: deque[_Call] = deque()
        """Calls to run between two steps, in their order."""
        self._readers = Readers(engine.scheduler.max_running)
        self._shared = _Shared()
        self._stop = weakref.finalize(self, _stop, self._shared)
        self.death: BaseException | None = None
        """The exception that ended the thread."""
        self.is_elsewhere = False
        """Whether this is a forked child: the thread is the parent's."""
        self._shared.thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._shared), name="kvtier-engine", daemon=True
        )
        self._shared.thread.start()
        watch(self)

    def on_fork(self) -> None:
        """A forked child has no such thread; what is open belongs to the parent's."""
        self._shared.closing = self.is_elsewhere = True
        self._stop.detach()
        self._calls.clear()
        self._streams.clear()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served: False after a death and after ``close``."""
        return self.death is None and not self._shared.closing

    def check(self) -> None:
        """Raises ``EngineDead`` or ``CacheClosed`` unless requests are served."""
        if self.death is not None:
            raise EngineDead(_told(self.death)) from self.death
        if self._shared.closing:
            raise CacheClosed(of_another_process("this engine") if self.is_elsewhere else "the engine is closed")

    def submit(self, requests: Sequence[tuple[Request, SamplingState, TokenStream]], share: str = "") -> None:
        """Queues requests that ``Scheduler.check`` has passed, all at once; ``share``: of the steps. Raises
        ``EngineDead``.

        A request that nevertheless cannot be queued ends with the error in its stream.
        """
        self.check()
        rows = [(request, state, weakref.ref(stream)) for request, state, stream in requests]
        self._ask(partial(self._add, rows, share), partial(self._refuse, rows))

    def abort(self, request_id: str) -> None:
        """Aborts a request before the next step, as ``Engine.abort`` does."""
        self._ask(partial(self._engine.abort, request_id))

    def finish(self, request_id: str) -> None:
        """Finishes a request before the next step, as ``Engine.finish`` does."""
        self._ask(partial(self._engine.finish, request_id))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function between two steps, on the engine's thread. Raises ``EngineDead``."""
        self.check()
        future: Future[T] = Future()
        self._ask(partial(_answer, future, function), partial(_fail, future))
        return future

    def settle(self) -> None:
        """Waits until there is nothing left to do."""

        def drain() -> None:
            while self._engine.has_work():
                self._step()

        self.call(drain).result()

    def end_copies(self, timeout_s: float) -> None:
        """Waits, while no request is open, until all copies have ended; ``timeout_s`` seconds at most."""
        until = time.monotonic() + timeout_s

        def drain() -> None:
            engine = self._engine
            while engine.has_work() and not engine.has_requests() and time.monotonic() < until:
                self._step()

        self.call(drain).result()

    def close(self) -> None:
        """Ends the thread after the step that it is in; requests that are open end with ``CacheClosed``."""
        self._stop()
        self._give_up(self._dead())

    def _ask(self, run: Callable[[], object], refuse: Callable[[KVTierError], object] = lambda _: None) -> None:
        """``refuse``: called instead, if the thread has ended."""
        self._calls.append(_Call(run, refuse))
        self._shared.news.set()
        self._engine.scheduler.wake()  # it may wait for copies
        if not self.is_alive:
            self._give_up(self._dead())

    def _drop(self, request_id: str, _: object) -> None:
        """A stream has gone. It does no more: the garbage collector may be at work, anywhere."""
        self._calls.append(_Call(partial(self._engine.abort, request_id), lambda _: None))
        self._shared.news.set()
        self._engine.scheduler.wake()

    # --- on the thread ----------------------------------------------------------------------------

    def _turn(self) -> bool:
        """The queued calls, and one step if there is something to do; False if there was not."""
        while self._calls:
            self._calls.popleft().run()
        if not self._has_work():
            self._engine.rest()
            return False
        self._step()
        return True

    def _add(self, requests: Sequence[tuple[Request, SamplingState, StreamRef]], share: str) -> None:
        for request, state, ref in requests:
            stream, name = ref(), request.request_id
            if stream is None:
                continue
            try:
                self._engine.add(request, state, share)
            except KVTierError as problem:
                self._refuse([(request, state, ref)], problem)
                continue
            self._streams[name] = weakref.ref(stream, partial(self._drop, name))
            del stream

    def _refuse(self, requests: Sequence[tuple[Request, SamplingState, StreamRef]], error: KVTierError) -> None:
        self._lose([(request.request_id, ref()) for request, _, ref in requests], error)

    def _lose(self, streams: Sequence[tuple[str, TokenStream | None]], error: KVTierError) -> None:
        """Ends the streams of requests that nobody will report."""
        letters = Letters()
        for name, stream in streams:
            if stream is not None:
                letters.to(stream.mail.post).lost.append((weakref.ref(stream), name, error))
        letters.send()

    def _stream(self, request_id: str) -> TokenStream | None:
        """The stream of a request with a reader."""
        ref = self._streams.get(request_id)
        return None if ref is None else ref()

    def _step(self) -> None:
        output = self._engine.step()
        for row, name in output.entered:
            self._readers.enter(row, self._stream(name))
        letters = self._readers.letters(output.rows, output.token_ids, output.logprobs)
        for name, told in output.prompt_logprobs:
            stream = self._stream(name)
            if stream is not None:
                letters.to(stream.mail.post).prompt_logprobs.append((weakref.ref(stream), told))
        for report in output.finished:
            stream = self._stream(report.request_id)
            self._streams.pop(report.request_id, None)
            if stream is not None:
                error = output.errors.get(report.request_id)
                letters.to(stream.mail.post).ends.append((weakref.ref(stream), report, error))
        letters.send()

    def _die(self, problem: BaseException) -> None:
        self.death = problem
        log.error(_told(problem), exc_info=problem)
        self._give_up(self._dead())

    def _dead(self) -> KVTierError:
        try:
            self.check()
        except KVTierError as error:
            return error
        return EngineDead("the engine has ended")

    def _give_up(self, error: KVTierError) -> None:
        """Ends all open requests, and refuses all calls that have not run."""
        with contextlib.suppress(IndexError):  # another thread may take from it too
            while True:
                self._calls.popleft().refuse(error)
        open_ones = []
        while self._streams:
            name, ref = self._streams.popitem()
            open_ones.append((name, ref()))
        self._lose(open_ones, error)


def _told(death: BaseException) -> str:
    return f"the engine died of {type(death).__name__}: {death}"


def _answer(future: Future[T], function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as problem:
            future.set_exception(problem)


def _fail(future: Future[Any], error: KVTierError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _run(owner: weakref.ref[EngineThread], shared: _Shared) -> None:
    """The thread, on its engine's device."""
    mine = owner()
    if mine is None:
        return
    device = mine._engine.model.device
    del mine
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Without notes for gradients a view of a tensor takes a third less time. On a GPU it was not tried.
    with torch.inference_mode() if device.type == "cpu" else contextlib.nullcontext():
        _serve(owner, shared)


def _serve(owner: weakref.ref[EngineThread], shared: _Shared) -> None:
    """Holds its owner only while it works, so that an engine without another holder is freed."""
    while not shared.closing:
        shared.news.clear()
        mine = owner()
        if mine is None:
            return
        try:
            while not shared.closing and mine._turn():
                pass
        except BaseException as problem:
            mine._die(problem)
            return
        del mine
        shared.news.wait(60.0)


def _stop(shared: _Shared) -> None:
    shared.closing = True
    shared.news.set()
    thread = shared.thread
    if thread is not None and thread is not threading.current_thread():
        with contextlib.suppress(RuntimeError):
            thread.join()
