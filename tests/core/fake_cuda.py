"""The CUDA calls that need a GPU, played on this process's memory: addresses are real, and every byte is really moved.

Only ``CudaApi`` is played. Streams are queues that run late and out of step with each other, when somebody asks after
an event; a copy arrives through a C function of the driver's very signature.
Whatever a real driver would refuse, or would silently do wrong, is refused or noted in ``problems``.
The compute stream is the host itself: what a test writes has happened at once, so a wait of the compute stream runs the
other streams up to there. A test may give it a queue of work that is late, ``streams[COMPUTE]``.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from kvtier.cpu_offload.engines.cuda.driver import CudaError
from kvtier.cpu_offload.tier_memory import TierMemory

INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS, ALREADY_REGISTERED = 1, 2, 700, 712
COMPUTE = 0x77
PAGE = 4096
_MEMCPY_ASYNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(eq=False)
class Mark:
    """One recording of an event."""

    done: bool = False


@dataclass(eq=False)
class Stream:
    urgent: bool
    queue: deque[Any] = field(default_factory=deque)  # a Mark to set, ("wait", Mark), or a function to call


class FakeCuda:
    """``pinnable``: bytes that can be pinned."""

    def __init__(self, seed: int = 0, pinnable: int = 1 << 40) -> None:
        self.pinnable = pinnable
        self.problems: list[str] = []
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Mark | None] = {}
        self.registered: dict[int, int] = {}
        self.device_ranges: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int, int, int]] = []
        """(dst, src, bytes, stream) of every copy."""
        self.refuse: Callable[[int, int, int, int], int] = lambda dst, src, num_bytes, stream: 0
        """The status of a copy; one that is not 0 is not made."""
        self.lost = False
        self.held = False
        """Streams stand still."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._handles = count(0x1000, 16)
        self._bound = {threading.get_ident()}
        self._scheduler = threading.get_ident()
        self._function = _MEMCPY_ASYNC(self._copy)

    # --- CudaApi ----------------------------------------------------------------------------------

    def bind_thread(self) -> None:
        self._bound.add(threading.get_ident())

    def _check_bound(self) -> None:
        """For copies. Other calls choose the device themselves, or need none (``cudaEventQuery``)."""
        if threading.get_ident() not in self._bound:
            self.problems.append("a thread that has not chosen its device makes copies")

    def compute_stream(self) -> int:
        if threading.get_ident() != self._scheduler:
            self.problems.append("another thread asks for its own compute stream, which is not the engine's")
        return COMPUTE

    def new_stream(self, urgent: bool) -> int:
        handle = next(self._handles)
        self.streams[handle] = Stream(urgent)
        return handle

    def drop_stream(self, stream: int) -> None:
        if self.streams.pop(stream).queue:
            self.problems.append("a stream is dropped while it has work")

    def new_event(self) -> int:
        if self.lost:
            raise CudaError("cudaEventCreate", ILLEGAL_ADDRESS, "the device is lost")
        handle = next(self._handles)
        self.events[handle] = None
        return handle

    def drop_event(self, event: int) -> None:
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        if self.lost:
            raise CudaError("cudaEventRecord", ILLEGAL_ADDRESS, "the device is lost")
        with self._lock:
            queued = stream in self.streams
            if event not in self.events:
                self.problems.append("an event is recorded that has been given back")
            mark = self.events[event] = Mark(done=not queued)
            if queued:
                self.streams[stream].queue.append(mark)

    def wait(self, stream: int, event: int) -> None:
        if self.lost:
            raise CudaError("cudaStreamWaitEvent", ILLEGAL_ADDRESS, "the device is lost")
        with self._lock:
            mark = self.events[event]
            if mark is None:
                self.problems.append("a stream waits for an event that was never recorded: it does not wait")
            elif stream in self.streams:
                self.streams[stream].queue.append(("wait", mark))
            else:
                self._run_until(mark)

    def has_happened(self, event: int) -> bool:
        with self._lock:
            if self.lost:
                raise CudaError("cudaEventQuery", ILLEGAL_ADDRESS, "the device is lost")
            self.progress(self._random.randrange(4))
            mark = self.events[event]
            return mark is None or mark.done

    def synchronize(self, stream: int) -> None:
        with self._lock:
            while self.streams[stream].queue and self.progress(1):
                pass

    def copy_function(self) -> int:
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def host_register(self, address: int, num_bytes: int) -> None:
        for at, n in self.registered.items():
            if address // PAGE <= (at + n - 1) // PAGE and at // PAGE <= (address + num_bytes - 1) // PAGE:
                raise CudaError("cudaHostRegister", ALREADY_REGISTERED, "part of it is registered")
        if sum(self.registered.values()) + num_bytes > self.pinnable:
            raise CudaError("cudaHostRegister", OUT_OF_MEMORY, "out of memory")
        self.registered[address] = num_bytes

    def host_unregister(self, address: int) -> None:
        del self.registered[address]

    # --- cuMemcpyAsync, as C calls it -------------------------------------------------------------

    def _copy(self, dst: int, src: int, num_bytes: int, stream: int | None) -> int:
        self._check_bound()
        try:
            if stream not in self.streams:
                self.problems.append(f"a copy on stream {stream}")
                return INVALID_VALUE
            if self._refused(dst, src, num_bytes):
                return INVALID_VALUE
            if status := self.refuse(dst, src, num_bytes, stream):
                return status
            self.copies.append((dst, src, num_bytes, stream))
            self.enqueue(stream, lambda: ctypes.memmove(dst, src, num_bytes))
            return 0
        except Exception as problem:  # ctypes would swallow it
            self.problems.append(repr(problem))
            return INVALID_VALUE

    # --- what a driver looks at -------------------------------------------------------------------

    def _refused(self, dst: int, src: int, num_bytes: int) -> str:
        """Why the driver would not copy; one end is on the device, the other inside one registration."""
        ends = [(dst, num_bytes), (src, num_bytes)]
        host = [self._inside(at, n, list(self.registered.items())) for at, n in ends]
        device = [self._inside(at, n, self.device_ranges) for at, n in ends]
        if num_bytes == 0 or not ((host[0] and device[1]) or (host[1] and device[0])):
            self.problems.append(
                f"copy of {num_bytes} bytes: host side inside one registration {host}, device side {device}"
            )
            return self.problems[-1]
        return ""

    @staticmethod
    def _inside(at: int, num_bytes: int, ranges: list[tuple[int, int]]) -> bool:
        return any(start <= at and at + num_bytes <= start + n for start, n in ranges)

    # --- time -------------------------------------------------------------------------------------

    def enqueue(self, stream: int, op: Callable[[], object]) -> None:
        with self._lock:
            self.streams[stream].queue.append(op)

    def progress(self, steps: int) -> bool:
        """Streams in random order do something; False if none can."""
        moved = True
        with self._lock:
            while steps > 0 and moved and not self.held:
                steps -= 1
                moved = any(self._step(s) for s in self._random.sample(list(self.streams.values()), len(self.streams)))
        return moved and not self.held

    @staticmethod
    def _step(stream: Stream) -> bool:
        if not stream.queue:
            return False
        op = stream.queue[0]
        if isinstance(op, Mark):
            op.done = True
        elif isinstance(op, tuple):
            if not op[1].done:
                return False
        else:
            op()
        stream.queue.popleft()
        return True

    def _run_until(self, mark: Mark) -> None:
        while not mark.done:
            if not self.progress(1):
                self.problems.append("the compute stream hangs")
                return

    def run(self) -> None:
        """Everything that streams have been given happens."""
        while self.progress(1):
            pass


class FakeSums:
    """Checksums of device blocks as work on the fake's streams; ``TorchSums`` is the real code.

    ``kernel``: as ``TorchSums`` takes it. What it raises is raised where it is launched.
    """

    def __init__(self, cuda: FakeCuda, kernel: Any = None) -> None:
        from kvtier.cpu_offload.engines.cuda.device_sums import TorchSums

        self._cuda = cuda
        self._sums = TorchSums(kernel)

    def try_out(self, stream: int, memory: TierMemory) -> str:
        return self._sums.try_out(stream, memory)

    def close(self) -> None:
        assert self._cuda.streams, "while there are the streams that it was given"

    def begin(self, stream: int, *blocks: Any) -> Callable[[], np.ndarray]:
        if self._sums._kernel is not None:
            self._sums.begin(0, *blocks)
        sums: list[np.ndarray] = []
        self._cuda.enqueue(stream, lambda: sums.append(self._sums.begin(0, *blocks)()))
        return lambda: sums[0]
