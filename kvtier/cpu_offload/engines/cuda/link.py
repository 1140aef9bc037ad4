"""A GPU's link to its host tier: checked, its memory pinned, its engine built. ``copy_engine="cuda"`` makes it.

Owns       the order in which the parts come up, and their removal if a part does not come up.
Promises   unfit software is refused before anything is allocated, with the fix. If pinning fails, nothing is left
           behind. The short measurement copies bytes of the device out and back and changes nothing.
Does not   move bytes: ``CudaRuntime`` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines import EngineFactory
from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.cpu_offload.engines.cuda.device_sums import TorchSums, triton_kernel
from kvtier.cpu_offload.engines.cuda.driver import CudaApi, CuPyApi, cupy_runtime
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Progress, Registration
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime, DeviceSums
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.engines.submission import Submission, SubmissionThreads
from kvtier.cpu_offload.shared_memory import SharedMemory
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction
from kvtier.geometry.layout import Seams
from kvtier.machine.errors import DeviceUnavailable
from kvtier.machine.kept import KEPT
from kvtier.machine.stats import LinkStats

log = logging.getLogger("kvtier.transfers")

BAR_BYTES = 2 << 30
"""Pinning less than this takes no time worth a progress bar."""
STORE, LOAD = Direction.STORE, Direction.LOAD
CLOSE_S = 30.0
WHOLE_BYTES = 64 << 20
"""Bytes moved at once to measure the link."""
MEASURED = 3
"""Repetitions of each measurement; the shortest counts."""


class CudaEngine(StreamsEngine):
    """The copy engine of a GPU, which knows its link."""

    def __init__(self, memory: TierMemory, runtime: CudaRuntime, submission: Submission | None = None) -> None:
        super().__init__(memory, runtime, submission)
        self._link_stats = runtime.link_stats

    def link_stats(self) -> LinkStats:
        return self._link_stats()


class CudaLink(EngineFactory):
    """Makes the host tier's memory, pinned, then the engine.

    ``api``: the device's calls; by default CuPy's, for device number ``index``. ``paced``: for engines with copies of
    their own between host and device in each step, which must not wait behind long loads and stores (docs/GPU.md).
    ``shared``: memory of several processes, which becomes the host tier; each pins all of it.
    """

    def __init__(
        self,
        index: int = 0,
        api: CudaApi | None = None,
        sums: DeviceSums | None = None,
        pci_bus_id: str = "",
        progress: Progress | None = None,
        paced: bool = False,
        shared: SharedMemory | None = None,
    ) -> None:
        if api is None:
            check_software(index)
            api = CuPyApi(index)
            sums = sums or TorchSums(triton_kernel())
            pci_bus_id = pci_bus_id or str(cupy_runtime().deviceGetPCIBusId(index))
        self._api = api
        self.paced = paced
        self.shared = shared
        self._sums = sums
        self._pci_bus_id = pci_bus_id
        self._progress = progress
        self._host: HostMemory | None = None  # until an engine has taken it over
        self._runs = False

    def host_memory(self, num_bytes: int, setting: str, seams: Seams) -> npt.NDArray[np.uint8]:
        """``num_bytes`` of pinned memory near the device, uint8; raises ``MemoryUnavailable`` naming ``setting``."""
        self._runs = False
        registration = Registration(self._api.host_register, self._api.host_unregister)
        with _bar(num_bytes) if self._progress is None else _same(self._progress) as progress:
            self._host = HostMemory(
                num_bytes,
                registration,
                setting=setting,
                seams=seams,
                pci_bus_id=self._pci_bus_id,
                progress=progress,
                shared=self.shared,
            )
        return self._host.array

    def __call__(self, memory: TierMemory) -> CudaEngine:
        """The engine, its link measured; takes the pinned memory over and releases it when it is closed."""
        host = self._host
        assert host is not None, "host_memory comes first"
        made: list[_Closes] = []
        try:
            sums = self._sums if memory.verifies else None
            runtime = CudaRuntime(self._api, host.starts, sums, host.report, host.release, self.paced)
            made.append(runtime)
            submission = SubmissionThreads(runtime.bind_thread)
            made.append(submission)
            engine = CudaEngine(memory, runtime, submission)
            mark = runtime.record(runtime.compute_stream())  # behind all writes, such as torch's zeros
            # On a thread of its own: the caller's current device stays what it is.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._measure, runtime, memory, mark).result()
            runtime.retire(mark)
        except BaseException:
            self._runs = not all(_has_stopped(part) for part in reversed(made))
            if self._runs:
                KEPT.append(made)
            self.give_back()
            raise
        self._host = None
        return engine

    def give_back(self) -> bool:
        """Releases memory that no engine has taken over; False if something may still write there."""
        if self._host is not None and not self._runs:
            self._host.release()
            self._host = None
        return not self._runs

    def _measure(self, runtime: CudaRuntime, memory: TierMemory, mark: int) -> None:
        """Copies the first bytes of the device's arena to the host's, which holds nothing yet, and back; behind
        ``mark``. Of shared memory a rank takes its own part."""
        runtime.bind_thread()
        device, host = memory.arenas
        stream = runtime.new_stream("measurement")
        runtime.wait(stream, mark)
        self._api.synchronize(stream)  # so that no measurement waits for it
        first, length = (0, len(host.storage)) if self.shared is None else self.shared.own
        begin, length = host.address + first, max(0, min(length, len(host.storage) - first))
        later = [] if self._host is None else [int(at) for at in self._host.starts if at > begin]
        most = min(*(at - begin for at in later[:1]), length, len(device.storage), WHOLE_BYTES)
        size = np.array([most // 16 * 16], np.uint64)

        def seconds(direction: Direction) -> float:
            ends = np.array([device.address], np.uint64), np.array([begin], np.uint64)
            dst, src = ends[::-1] if direction is STORE else ends
            best = 1e9
            for _ in range(MEASURED):
                begun = time.perf_counter()
                runtime.send(Copies(dst, src, size), stream)
                self._api.synchronize(stream)
                best = min(best, time.perf_counter() - begun)
            return max(best, 1e-9)

        if memory.verifies and self._sums is not None and (note := self._sums.try_out(stream, memory)):
            runtime.notes.append(note)
        if size[0]:  # the store first: the load brings back its bytes, so that an engine's memory keeps its content
            runtime.link_gbps = {d: int(size[0]) / seconds(d) / 1e9 for d in (STORE, LOAD)}


class _Closes(Protocol):
    def close(self, timeout_s: float) -> bool: ...


def _has_stopped(part: _Closes) -> bool:
    try:
        return part.close(CLOSE_S)
    except Exception:  # why the engine could not be made is what the user needs to know
        return False


@contextmanager
def _bar(num_bytes: int) -> Iterator[Progress]:
    """Tells of each task on a lot of memory: a progress bar, or without tqdm a line of the log when it begins."""
    bars: dict[str, Any] = {}

    def tell(what: str, done: int, total: int) -> None:
        if num_bytes < BAR_BYTES:
            return
        if what not in bars:
            bars[what] = _begun(f"{what} {total / 2**30:.1f} GiB of host memory", total)
        if bars[what] is not None:
            bars[what].update(done - bars[what].n)

    try:
        yield tell
    finally:
        for bar in bars.values():
            if bar is not None:
                bar.close()


def _begun(text: str, total: int) -> Any:
    """A bar of tqdm; None, and a line of the log, where that is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        log.info("%s", text)
        return None
    return tqdm(total=total, desc=text, unit="B", unit_scale=True)


@contextmanager
def _same(progress: Progress) -> Iterator[Progress]:
    yield progress


def check_software(index: int) -> None:
    """Raises ``DeviceUnavailable`` if CuPy is missing, of another CUDA than torch, or too new for the driver."""
    import torch

    runtime = cupy_runtime()
    try:
        driver = int(runtime.driverGetVersion())
    except Exception:
        driver = 0
    problem = mismatch(torch.version.cuda, int(runtime.runtimeGetVersion()), driver)
    if problem:
        raise DeviceUnavailable(f"cuda:{index} cannot serve a host tier: {problem}")


def mismatch(torch_cuda: str | None, cupy_runtime_version: int, driver_version: int) -> str:
    """The mismatch and its fix; "" if all fits. Versions as CUDA writes them: 12080 is 12.8."""
    if torch_cuda is None:
        return "this torch was built without CUDA; install a CUDA build of torch"
    major, cupy_major = int(torch_cuda.split(".")[0]), cupy_runtime_version // 1000
    if cupy_major != major:
        return (
            f"torch was built for CUDA {torch_cuda}, but the installed CuPy is for CUDA {cupy_major}; "
            f"install the extra kvtier[gpu-cuda{major}] (pip uninstall cupy-cuda{cupy_major}x first)"
        )
    if driver_version == 0:
        return "there is no NVIDIA driver, or it does not answer; install one (nvidia-smi should list the GPU)"
    if driver_version // 1000 < major:
        have = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        return (
            f"the NVIDIA driver is made for CUDA {have}, but torch and CuPy for CUDA {major}; update the driver, or "
            f"install a torch for CUDA {driver_version // 1000} and the extra that goes with it"
        )
    return ""
