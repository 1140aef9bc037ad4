"""The copy engine's calls to CUDA: streams, events, copies, registered memory; and the batched copy's two ABIs.

Owns       the shape of every CUDA call that the engine makes (``CudaApi``), and ``CuPyApi``, which makes them.
Promises   a batched copy is always called with the arguments of exactly the version that was asked for. It
           never runs on the legacy null stream, which the driver forbids.
Does not   decide which bytes to copy or the order of work; hold tensors: torch does.

torch owns the compute stream. The copy streams are CuPy's own: torch's pool has 32 streams, and one stream may have
several owners. They would then wait for each other's copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, Protocol

from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.machine.device import install_extra
from kvtier.machine.errors import DeviceUnavailable, TransferError

NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered behind the legacy null stream
NO_TIMING = 2  # cudaEventDisableTiming
LEGACY = 1  # cudaStreamLegacy: the null stream by its own name, whatever 0 means to the binding
NOT_READY = 600  # cudaErrorNotReady
NOT_NOW = range(900, 909)
"""Errors of stream capture: the process captures a graph in a mode that forbids other threads to ask."""
PORTABLE = 1  # cudaHostRegisterPortable: for all contexts
DEFAULT_KIND = 4  # cudaMemcpyDefault: the driver knows which side is which
ENTRY_POINT = b"cuMemcpyBatchAsync"
NO_DESCRIPTOR = ctypes.c_size_t(-1).value  # failIdx of an error that is no single copy's fault


class CudaError(TransferError):
    """A CUDA call failed; ``status`` is its error code."""

    def __init__(self, call: str, status: int, detail: str = "") -> None:
        self.status = status
        super().__init__(f"{call} failed with CUDA error {status}{': ' if detail else ''}{detail}")


class SourceOrder(IntEnum):
    """When a batched copy may read its source (CUmemcpySrcAccessOrder)."""

    STREAM = 1
    """Behind all work that its stream was given before."""
    ANY = 3
    """At any time, even before the stream has come that far: only for memory without writers."""


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

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        """One asynchronous copy."""

    def entry_point(self, symbol: bytes, version: int) -> int | None:
        """Address of a driver function in its form of CUDA ``version`` (12080 is 12.8); None if missing."""

    def host_register(self, address: int, num_bytes: int) -> None:
        """Pins host memory for this device. Raises ``CudaError``."""

    def host_unregister(self, address: int) -> None:
        """Undoes ``host_register``."""


# --- the batched copy -----------------------------------------------------------------------------


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the hints are for managed and pageable memory only."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


_P, _N = ctypes.c_void_p, ctypes.c_size_t
_COMMON = (_P, _P, _P, _N, ctypes.POINTER(_Attributes), ctypes.POINTER(_N), _N)  # dsts srcs sizes count attrs idxs n
ABIS = {
    12080: ctypes.CFUNCTYPE(ctypes.c_int, *_COMMON, ctypes.POINTER(_N), _P),  # ..., failIdx, stream
    13000: ctypes.CFUNCTYPE(ctypes.c_int, *_COMMON, _P),  # ..., stream
}
"""cuMemcpyBatchAsync in the form of each version that can be asked for. 9 arguments became 8 in CUDA 13."""


class BatchCopy:
    """``cuMemcpyBatchAsync`` in one of its forms."""

    def __init__(self, address: int, version: int) -> None:
        self.version = version
        self._call: Any = ABIS[version](address)
        self._fails = version < 13000  # it takes failIdx

    @staticmethod
    def find(api: CudaApi) -> BatchCopy | None:
        """The driver's batched copy; None if it has none (before 12.8). A CUDA 13 driver still gives out 12.8's
        form."""
        for version in ABIS:
            address = api.entry_point(ENTRY_POINT, version)
            if address:
                return BatchCopy(address, version)
        return None

    def __call__(self, copies: Copies, order: SourceOrder, stream: int) -> None:
        """Enqueues all copies with one call. Raises ``CudaError``; then some of them may be under way."""
        if stream in (0, LEGACY):
            raise TransferError("a batched copy must not go to the legacy null stream")
        count = len(copies.dst)
        if count == 0:
            return
        attributes, first, failed = _Attributes(src_access_order=order), _N(0), _N(NO_DESCRIPTOR)
        arrays = (copies.dst.ctypes.data, copies.src.ctypes.data, copies.sizes.ctypes.data)
        common = (*arrays, count, ctypes.byref(attributes), ctypes.byref(first), 1)
        status = self._call(*common, ctypes.byref(failed), stream) if self._fails else self._call(*common, stream)
        if status:
            which = "" if failed.value == NO_DESCRIPTOR else f"copy {failed.value} of {count}"
            raise CudaError("cuMemcpyBatchAsync", status, which)


# --- the real thing -------------------------------------------------------------------------------


class CuPyApi:
    """CUDA through CuPy's runtime binding, and through libcuda for the one call that CuPy lacks."""

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

    def copy(self, dst: int, src: int, num_bytes: int, stream: int) -> None:
        try:  # by a bound thread, thousands at a time
            self._runtime.memcpyAsync(dst, src, num_bytes, DEFAULT_KIND, stream)
        except self._runtime.CUDARuntimeError as problem:
            raise CudaError("cudaMemcpyAsync", int(problem.status), str(problem)) from problem

    def entry_point(self, symbol: bytes, version: int) -> int | None:
        found, status = ctypes.c_void_p(), ctypes.c_int(0)
        with suppress(AttributeError):  # a driver before 12.0 has the form with four arguments only
            error = self._driver.cuGetProcAddress_v2(
                symbol, ctypes.byref(found), version, ctypes.c_uint64(0), ctypes.byref(status)
            )
            return found.value if error == 0 and status.value == 0 else None
        return None

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
