"""The copy engine's calls to CUDA: streams, events, copies, registered memory.

Owns       the shape of every CUDA call that the engine makes (``CudaApi``), and ``CuPyApi``, which makes them.
Promises   each copy is a call of its own: the driver's batched copy has lost bytes (ADR 41).
Does not   decide which bytes to copy or the order of work; hold tensors: torch does.

torch owns the compute stream. The copy streams are CuPy's own: torch's pool has 32 streams, and one stream may have
several owners. They would then wait for each other's copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.machine.device import install_extra
from kvtier.machine.errors import DeviceUnavailable, TransferError
from kvtier.machine.loops.jit import foreign, jit

NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered behind the legacy null stream
NO_TIMING = 2  # cudaEventDisableTiming
LEGACY = 1  # cudaStreamLegacy: the null stream by its own name, whatever 0 means to the binding
NOT_READY = 600  # cudaErrorNotReady
NOT_NOW = range(900, 909)
"""Errors of stream capture: the process captures a graph in a mode that forbids other threads to ask."""
PORTABLE = 1  # cudaHostRegisterPortable: for all contexts


class CudaError(TransferError):
    """A CUDA call failed; ``status`` is its error code."""

    def __init__(self, call: str, status: int, detail: str = "") -> None:
        self.status = status
        super().__init__(f"{call} failed with CUDA error {status}{': ' if detail else ''}{detail}")


class CudaApi(Protocol):
    """One device's calls. Streams, events and addresses are integers. May be used from several threads.

    A failing call raises ``CudaError``. Threads that copy call ``bind_thread`` first; other threads keep their current
    device.
    """

    def bind_thread(self) -> None:
        """Makes the calling thread's CUDA calls go to this device; once in every thread that makes CUDA calls."""

    def compute_stream(self) -> int:
        """The stream on which the calling thread's torch work runs."""

    def new_stream(self, urgent: bool) -> int:
        """A non-blocking stream, of the highest priority or of the usual priority."""

    def drop_stream(self, stream: int) -> None:
        """Gives it back."""

    def new_event(self) -> int:
        """An event that keeps no time."""

    def drop_event(self, event: int) -> None:
        """Gives it back."""

    def record(self, event: int, stream: int) -> None:
        """The event is now behind all work that the stream has been given."""

    def wait(self, stream: int, event: int) -> None:
        """Later work of the stream waits for the event as it is recorded now."""

    def has_happened(self, event: int) -> bool:
        """Never waits; False if it cannot be asked now. Raises ``CudaError`` if the device is lost."""

    def synchronize(self, stream: int) -> None:
        """Waits for the stream."""

    def copy_function(self) -> int:
        """The address of a C function: one asynchronous copy, (dst, src, bytes, stream) -> status (``copy_each``)."""

    def host_register(self, address: int, num_bytes: int) -> None:
        """Pins host memory for this device. Raises ``CudaError``."""

    def host_unregister(self, address: int) -> None:
        """Undoes ``host_register``."""


# --- copies ---------------------------------------------------------------------------------------


@jit
def _copy_each(function: Any, dst: Any, src: Any, sizes: Any, stream: Any, status: Any) -> int:
    """Returns the number of copies that were enqueued. ``status`` [1]: of the last call."""
    for k in range(len(dst)):
        status[0] = foreign(function, dst[k], src[k], sizes[k], stream)
        if status[0] != 0:
            return k
    return len(dst)


def copy_each(function: int, copies: Copies, stream: int) -> None:
    """Gives ``stream`` the copies in their order, without the interpreter's lock.

    ``function``: ``CudaApi.copy_function``'s address. Raises ``CudaError`` with the number of the first copy that is
    refused. Copies before it are under way.
    """
    status, count = np.zeros(1, np.int32), len(copies.dst)
    done = _copy_each(np.uint64(function), *copies, np.uint64(stream), status)
    if done < count:
        raise CudaError("cuMemcpyAsync", int(status[0]), f"copy {done} of {count}")


# --- the real thing -------------------------------------------------------------------------------


class CuPyApi:
    """CUDA through CuPy's runtime binding, and copies through libcuda."""

    def __init__(self, index: int) -> None:
        """``index``: the device's number. Raises ``DeviceUnavailable`` if CuPy is missing."""
        self.index = index
        self._runtime = cupy_runtime()
        self._driver: Any = ctypes.CDLL("libcuda.so.1")

    @contextmanager
    def _call(self, name: str) -> Iterator[Any]:
        """The binding, for one call on this device; the thread then gets its old device back. Errors become
        ``CudaError``.

        The null stream's name and the registration of memory mean the current device's. An event can only be recorded
        on its own device's streams.
        """
        try:
            before = int(self._runtime.getDevice())
            if before == self.index:
                yield self._runtime
                return
            self._runtime.setDevice(self.index)
            try:
                yield self._runtime
            finally:
                self._runtime.setDevice(before)
        except self._runtime.CUDARuntimeError as problem:
            raise CudaError(name, int(problem.status), str(problem)) from problem

    def bind_thread(self) -> None:
        try:
            self._runtime.setDevice(self.index)
            self._runtime.free(0)  # makes the device's context current, which driver calls need
        except self._runtime.CUDARuntimeError as problem:
            raise CudaError("cudaSetDevice", int(problem.status), str(problem)) from problem

    def compute_stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream) or LEGACY

    def new_stream(self, urgent: bool) -> int:
        # Priorities are clamped to what the device has; lower numbers come first.
        with self._call("cudaStreamCreateWithPriority") as runtime:
            return int(runtime.streamCreateWithPriority(NON_BLOCKING, -5 if urgent else 0))

    def drop_stream(self, stream: int) -> None:
        with self._call("cudaStreamDestroy") as runtime:
            runtime.streamDestroy(stream)

    def new_event(self) -> int:
        with self._call("cudaEventCreateWithFlags") as runtime:
            return int(runtime.eventCreateWithFlags(NO_TIMING))

    def drop_event(self, event: int) -> None:
        with self._call("cudaEventDestroy") as runtime:
            runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        with self._call("cudaEventRecord") as runtime:
            runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        with self._call("cudaStreamWaitEvent") as runtime:
            runtime.streamWaitEvent(stream, event)

    def has_happened(self, event: int) -> bool:
        try:
            status = int(self._runtime.eventQuery(event))
        except self._runtime.CUDARuntimeError as problem:
            status = int(problem.status)
        if status in NOT_NOW:
            return False
        if status not in (0, NOT_READY):
            raise CudaError("cudaEventQuery", status, "the device is lost")
        return status == 0

    def synchronize(self, stream: int) -> None:
        with self._call("cudaStreamSynchronize") as runtime:
            runtime.streamSynchronize(stream)

    def copy_function(self) -> int:
        return ctypes.cast(self._driver.cuMemcpyAsync, ctypes.c_void_p).value or 0

    def host_register(self, address: int, num_bytes: int) -> None:
        with self._call("cudaHostRegister") as runtime:
            runtime.hostRegister(address, num_bytes, PORTABLE)

    def host_unregister(self, address: int) -> None:
        with self._call("cudaHostUnregister") as runtime:
            runtime.hostUnregister(address)


def cupy_runtime() -> Any:
    """CuPy's binding of the CUDA runtime. Raises ``DeviceUnavailable`` with the extra to install."""
    try:
        from cupy.cuda import runtime
    except Exception as problem:  # it looks for libraries when it is imported, and fails in its own ways
        raise DeviceUnavailable(
            f"copies between a GPU and the host tier need CuPy, which cannot be imported ({problem}); "
            f"{install_extra()}, or use host_bytes=0"
        ) from problem
    return runtime
