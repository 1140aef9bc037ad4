"""The host tier's memory for a GPU: one mapping of exactly the given size, faulted in, near the GPU, pinned.

Owns       the mapping and its registrations with the device.
Promises   not a byte is rounded up beyond the last page. ``release`` undoes every registration, even if one of them
           fails. If memory cannot be had, ``MemoryUnavailable`` names the limit, the setting and a size to try. The
           memory lives as long as a view of it.
Does not   know CUDA: registering and its undoing are functions. Keeps I22, I28.

torch's and CuPy's pinned allocators round up to a power of two: 100 GB would take 128 (ADR 0016). Several threads fault
pages in before they are pinned: a driver that has to fault them in itself uses one thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines.cuda import numa
from kvtier.cpu_offload.shared_memory import SharedMemory
from kvtier.geometry.layout import Seams
from kvtier.machine.errors import MemoryUnavailable
from kvtier.machine.memory_limits import explain, limits

PAGE = mmap.PAGESIZE
PIECE_BYTES = 16 << 30
"""Most bytes of one registration; with several, progress can be shown."""
TOUCH_BYTES = 64 << 20
"""Bytes that a thread faults in at a time."""
MADV_POPULATE_WRITE = 23

Progress = Callable[[str, int, int], None]
"""Called with (task, bytes done, bytes in all), from one thread."""


@dataclass(frozen=True)
class Registration:
    """How memory is pinned for a device and released again; (address, bytes) and (address)."""

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


@dataclass(frozen=True)
class HostMemoryReport:
    """A host tier's memory, and the cost of getting it."""

    num_bytes: int
    pieces: int
    """Number of registrations."""
    numa_node: int | None
    fault_s: float
    pin_s: float
    notes: tuple[str, ...] = ()
    """Failures that are no errors, and why."""


class HostMemory:
    """``num_bytes`` of pinned host memory; see the module's docstring.

    ``setting``      the option that the user may lower.
    ``seams``        (offset, bytes), ascending: from each offset on, a cut after every ``bytes`` bytes splits no slab
                     or block. Memory is cut only there, if whole pages allow it.
    ``piece_bytes``  the longest registration.
    ``pci_bus_id``   of the GPU that it should be near; "" if it does not matter.
    ``threads``      that fault pages in.
    ``shared``       memory of several processes to take, wherever its pages lie.
    ``huge_pages``   asks for them. If memory is fragmented, the kernel then compacts it: seconds a GiB (ADR 0016).
    """

    def __init__(
        self,
        num_bytes: int,
        registration: Registration,
        setting: str = "host_bytes",
        seams: Seams = ((0, PAGE),),
        piece_bytes: int = PIECE_BYTES,
        pci_bus_id: str = "",
        threads: int = min(16, os.cpu_count() or 1),
        huge_pages: bool = False,
        progress: Progress = lambda what, done, total: None,
        shared: SharedMemory | None = None,
    ) -> None:
        self.num_bytes = num_bytes
        self._registration = registration
        self._registered: list[int] = []
        self._setting = setting
        self._notes: list[str] = []
        try:
            own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            file, flags = (-1, own) if shared is None else (shared.descriptor, mmap.MAP_SHARED)
            self._map: mmap.mmap | None = mmap.mmap(file, num_bytes, flags=flags)
        except (OSError, ValueError, OverflowError) as problem:
            raise self._refused("mapping", problem) from problem
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        """The memory, uint8 [num_bytes]; empty once it is released."""
        self.address = int(self.array.ctypes.data)
        node = self._place(pci_bus_id if shared is None else "", huge_pages)
        try:
            start = time.perf_counter()
            self._populate(threads, progress)
            middle = time.perf_counter()
            self.starts = self._register(pieces_of(num_bytes, seams, piece_bytes), progress)
            """First address of each registration; uint64, ascending. No copy may cross one."""
        except BaseException:
            self.release()
            raise
        end = time.perf_counter()
        notes = tuple(self._notes)
        self.report = HostMemoryReport(num_bytes, len(self.starts), node, middle - start, end - middle, notes)

    # --- placing ----------------------------------------------------------------------------------

    def _place(self, pci_bus_id: str, huge_pages: bool) -> int | None:
        """Advice before the first touch: not for children, huge pages, near the GPU; returns the node."""
        # A child's copy-on-write would move the pages away from under the device.
        self._advise(mmap.MADV_DONTFORK, "MADV_DONTFORK")
        if huge_pages:
            self._advise(mmap.MADV_HUGEPAGE, "MADV_HUGEPAGE")
        if not pci_bus_id:
            return None
        node, why = numa.node_of(pci_bus_id)
        if node is not None:
            free = numa.free_bytes(node)
            fits = free is None or free >= self.num_bytes
            if not fits:  # bound strictly, the kernel would rather kill the process than look elsewhere
                self._notes.append(f"NUMA node {node} has {free:,} bytes free: the rest lies elsewhere")
            why = numa.bind(self.address, self._mapped, node, numa.BIND if fits else numa.PREFERRED)
        if why:
            self._notes.append(f"not bound to the GPU's memory node: {why}")
        return None if why else node

    @property
    def _mapped(self) -> int:
        """Bytes of the mapping, whole pages."""
        return -(-self.num_bytes // PAGE) * PAGE

    def _advise(self, advice: int, name: str) -> None:
        assert self._map is not None
        try:
            self._map.madvise(advice)
        except OSError as problem:
            self._notes.append(f"{name}: {problem.strerror}")

    # --- faulting in ------------------------------------------------------------------------------

    def _populate(self, threads: int, progress: Progress) -> None:
        """Faults all pages in with several threads; the caller's thread reports the progress."""
        pieces = [(at, min(TOUCH_BYTES, self.num_bytes - at)) for at in range(0, self.num_bytes, TOUCH_BYTES)]
        todo, done, failed = iter(pieces), threading.Semaphore(0), list[OSError]()
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    piece = None if failed else next(todo, None)
                if piece is None:
                    return
                try:
                    self._touch(*piece)
                except OSError as problem:
                    failed.append(problem)
                done.release()

        workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(pieces)))]
        for worker in workers:
            worker.start()
        told = 0
        for k in range(len(pieces)):
            while not done.acquire(timeout=0.1):
                if not any(worker.is_alive() for worker in workers):
                    break
            told = pieces[k][0] + pieces[k][1]
            if failed:
                break
            progress("faulting in", told, self.num_bytes)
        for worker in workers:
            worker.join()
        if failed:
            raise self._refused("faulting in", failed[0]) from failed[0]

    def _touch(self, at: int, num_bytes: int) -> None:
        """Faults in one range. A kernel before 5.14 lacks the call: then a byte of each page is written."""
        libc = ctypes.CDLL(None, use_errno=True)
        whole = -(-num_bytes // PAGE) * PAGE
        address = ctypes.c_void_p(self.address + at)
        while libc.madvise(address, ctypes.c_size_t(whole), MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                self.array[at : at + num_bytes : PAGE] = 0
                return
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, os.strerror(code))

    # --- pinning ----------------------------------------------------------------------------------

    def _register(self, cuts: Sequence[int], progress: Progress) -> npt.NDArray[np.uint64]:
        for start, end in pairwise(cuts):
            try:
                self._registration.register(self.address + start, end - start)
            except Exception as problem:
                raise self._refused("pinning", problem) from problem
            self._registered.append(self.address + start)
            progress("pinning", end, self.num_bytes)
        return np.array(self._registered, np.uint64)

    def release(self) -> None:
        """Unpins all of it. The memory is freed with its last view. Calling it again does nothing."""
        while self._registered:
            with suppress(Exception):  # the device may be lost: release the rest all the same
                self._registration.unregister(self._registered[-1])
            self._registered.pop()
        self._map = None
        self.array = np.empty(0, np.uint8)

    def _refused(self, doing: str, problem: BaseException) -> MemoryUnavailable:
        return MemoryUnavailable(explain(self.num_bytes, self._setting, doing, str(problem), limits()))


def pieces_of(num_bytes: int, seams: Seams, piece_bytes: int) -> Sequence[int]:
    """Where to cut a mapping for registration: offsets, the first 0, the last ``num_bytes``.

    Pieces are at most ``piece_bytes`` long. They are cut at whole pages, since two registrations cannot share a page.
    They are cut at ``seams`` too, if such a place is in the second half of a piece.
    """
    cuts = [0]
    while num_bytes - cuts[-1] > piece_bytes:
        most = (cuts[-1] + piece_bytes) // PAGE * PAGE
        seam = _last_seam(seams, cuts[-1] + piece_bytes // 2, most)
        cuts.append(most if seam is None else seam)
    return [*cuts, num_bytes]


def _last_seam(seams: Seams, least: int, most: int) -> int | None:
    """The last seam at a whole page, ``least`` or more and ``most`` at most."""
    for start, unit in reversed(seams):
        if start > most:
            continue
        last = start + (most - start) // unit * unit
        # Of PAGE seams one is at a whole page, if any is.
        for at in range(last, max(start, least, last - PAGE * unit) - 1, -unit):
            if at % PAGE == 0:
                return at
        most = start
    return None
