"""``CudaRuntime``: the ``StreamRuntime`` of ``StreamsEngine``, on CUDA.

Owns       the copy streams, a pool of events, and the measurements of the link.
Promises   a transfer's copies, neighbours merged, are enqueued by one compiled loop. With ``verify="full"`` checksums
           are taken on a stream beside each copy stream. A store's are taken while its bytes are read. A load's are
           taken piece by piece, each while the next piece arrives. They cost no time on the compute stream, and the
           link waits for the last piece's at most. A lost device ends every copy as a failure, and objects held by its
           copies are never given back. Keeps I17, I29.
Does not   order anything by itself: ``StreamsEngine`` does; hold CUDA calls: ``CudaApi`` does.

``sleep`` asks an event again and again, with pauses of 50 us that double up to 500 us. This finds an end well within a
millisecond, at some percent of a core. A host callback stops its stream until it has returned, and would wait for the
interpreter lock. Blocking in cudaEventSynchronize cannot be woken when a request arrives.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.engines.cuda.descriptors import Addresses, Copies, coalesce
from kvtier.cpu_offload.engines.cuda.driver import CudaApi, CudaError, copy_each
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemoryReport
from kvtier.cpu_offload.engines.cuda.pieces import MOST_PIECES, PACED_BYTES, PIECE_BYTES, pieces
from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.machine.kept import KEPT
from kvtier.machine.stats import LinkStats
from kvtier.machine.wakeup import Wakeup

FIRST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 500e-6

Sums = Callable[[], npt.NDArray[np.uint64]]


class DeviceSums(Protocol):
    """Takes the checksums of blocks on the device."""

    def try_out(self, stream: int, memory: TierMemory) -> str:
        """Takes one checksum, before there is anything to lose. If it fails, returns why and its substitute."""

    def begin(self, stream: int, memory: TierMemory, groups: Ids, addresses: Addresses) -> Sums:
        """Gives ``stream`` the checksums of the blocks of ``groups``, int32 [n], at ``addresses`` on the device.

        The result, uint64 [n], may be asked for once the stream is past them.
        """

    def close(self) -> None:
        """Gives back the memory kept for its streams, while these streams exist."""


class CudaRuntime:
    """A ``StreamRuntime`` on one CUDA device.

    ``starts``: first address of each registration of host memory; uint64, ascending. ``host``: the report on this
    memory. ``on_close`` runs once, when nothing runs any more.

    ``paced``: a stream gets a piece of its copies once it has made the one before, so that others get a turn (ADR 23).
    """

    def __init__(
        self,
        api: CudaApi,
        starts: Addresses,
        sums: DeviceSums | None = None,
        host: HostMemoryReport | None = None,
        on_close: Callable[[], None] = lambda: None,
        paced: bool = False,
    ) -> None:
        self._api = api
        self._paced = paced
        self._last_piece: dict[int, int] = {}  # by copy stream, the event behind the piece that it was given last
        self._is_hurried, self._host = False, host
        self.notes: list[str] = []
        """Failures with the link that are no errors, and why."""
        self._starts = starts
        self._sums = sums
        self._copy = api.copy_function()
        self._on_close = on_close
        self._events: deque[int] = deque()  # events that are not in use
        self._made: deque[int] = deque()
        self._streams: list[int] = []
        self._beside: dict[int, int] = {}  # by copy stream, the stream of its checksums
        self._held: dict[int, list[Sums]] = {}
        """By ticket: objects that live until the stream is past its copies, failed ones included.

        torch takes pinned memory back while its stream exists, and no later. The memory of a lost device must never go
        back to torch. torch would record an event, fail, and end the process, since its destructors may not raise.
        """
        self._woken = Wakeup()
        self._lost = ""
        self._closed = False
        self.link_gbps: Mapping[Direction, float] = {}
        """The speed of one long copy each way, once it was measured."""
        self.counts = {"transfers": 0, "blocks": 0, "copies": 0}
        self.submit_s = 0.0
        self._counting = threading.Lock()

    def bind_thread(self) -> None:
        """Every thread that gives streams their copies calls this first."""
        self._api.bind_thread()

    # --- streams and events -----------------------------------------------------------------------

    def compute_stream(self) -> int:
        return self._api.compute_stream()

    def new_stream(self, name: str) -> int:
        if not self._made:  # so that there is an event to ask whether the device is lost
            self._made.append(self._api.new_event())
            self._events.append(self._made[0])
        count = 1 if self._sums is None else 2
        for _ in range(count):
            self._streams.append(self._api.new_stream(urgent=name == Direction.LOAD.value))
        stream = self._streams[-count]
        self._beside[stream] = self._streams[-1]
        return stream

    def record(self, stream: int) -> int:
        try:
            event = self._events.pop()
        except IndexError:
            made: list[int] = []
            self._unless_lost(lambda: made.append(self._api.new_event()))
            self._made += made
            event = made[0] if made else self._made[0]
        self._unless_lost(self._api.record, event, stream)
        return event

    def retire(self, event: int) -> None:
        self._events.append(event)

    def wait(self, stream: int, event: int) -> None:
        self._unless_lost(self._api.wait, stream, event)

    def _unless_lost(self, call: Callable[..., None], *arguments: int) -> None:
        """On a lost device every call fails, but nothing runs there any more: all its events count as done."""
        try:
            if not self._lost:
                call(*arguments)
        except CudaError:
            self.is_done(self._made[0])
            if not self._lost:
                raise

    def is_done(self, event: int) -> bool:
        if not self._lost:
            try:
                return self._api.has_happened(event)
            except CudaError as problem:  # nothing runs on it any more; copies under way did not arrive
                self._lost = str(problem)
                KEPT.append(self._held)
        return True

    # --- copies -----------------------------------------------------------------------------------

    def copy(self, stream: int, memory: TierMemory, transfer: Transfer) -> Callable[[], Outcome]:
        begun = time.perf_counter()
        store, verifies, beside = transfer.direction is Direction.STORE, memory.verifies, self._beside[stream]
        device, host, sizes = memory.addresses(transfer)
        dst, src = (host, device) if store else (device, host)
        sums, num_copies, failure = list[Sums](), 0, ""
        self._held[transfer.ticket] = sums  # at once: a copy that fails half-way has work under way as well

        def sum_up(at: slice) -> None:
            self._follow(beside, stream)
            assert self._sums is not None, "verify needs checksums on the device"
            sums.append(self._sums.begin(beside, memory, transfer.groups[at], device[at]))

        try:
            for at in self._cuts(sizes, verifies and not store):
                self._pace(stream)
                if verifies and store:
                    sum_up(at)
                copies = coalesce(dst[at], src[at], sizes[at], store, self._starts)
                self.send(copies, stream)
                num_copies += len(copies.dst)
                if self._paced:
                    self._last_piece[stream] = self.record(stream)
                if verifies and not store:
                    sum_up(at)
        except Exception as problem:
            failure = f"{type(problem).__name__}: {problem}"
        if verifies:
            self._follow(stream, beside)  # a wait for the copies is a wait for the checksums
        with self._counting:
            for name, n in (("transfers", 1), ("blocks", len(sizes)), ("copies", num_copies)):
                self.counts[name] += n
            self.submit_s += time.perf_counter() - begun
        return lambda: self._outcome(memory, transfer, failure)

    def _cuts(self, sizes: Addresses, in_pieces: bool) -> list[slice]:
        """The parts of a transfer that are given one after the other."""
        if self._paced:
            return pieces(sizes, PACED_BYTES, len(sizes))
        return pieces(sizes, PIECE_BYTES, MOST_PIECES) if in_pieces else [slice(None)]

    def _pace(self, stream: int) -> None:
        """Waits until the stream has nothing left to do, so that other copies get their turn on the copy engine."""
        last = self._last_piece.pop(stream, None)
        if last is None:
            return
        while not self._is_hurried and not self.is_done(last):
            time.sleep(FIRST_PAUSE_S)
        self.retire(last)

    def hurry(self, on: bool) -> None:
        self._is_hurried = on

    def move(self, memory: TierMemory, g: int, sources: Ids, targets: Ids) -> None:
        memory.move(g, sources, targets)  # torch's current stream is the compute stream

    def wipe(self, memory: TierMemory, groups: Ids, blocks: Ids) -> None:
        memory.wipe(groups, blocks)  # likewise

    def send(self, copies: Copies, stream: int) -> None:
        """Gives ``stream`` the copies."""
        copy_each(self._copy, copies, stream)

    def _follow(self, later: int, earlier: int) -> None:
        """Later work of stream ``later`` comes after all work that ``earlier`` has been given."""
        event = self.record(earlier)
        self.wait(later, event)
        self.retire(event)

    def _outcome(self, memory: TierMemory, transfer: Transfer, failure: str) -> Outcome:
        if self._lost:
            return Outcome(transfer.ticket, failure or self._lost)
        sums = self._held.pop(transfer.ticket, [])
        if failure:
            return Outcome(transfer.ticket, failure)
        if not sums:
            return Outcome(transfer.ticket)
        try:
            found = np.concatenate([read() for read in sums])
        except Exception as problem:
            return Outcome(transfer.ticket, f"{type(problem).__name__}: {problem}")
        if transfer.direction is Direction.STORE:
            memory.note_sums(transfer, found)
            return Outcome(transfer.ticket)
        return Outcome.of_check(transfer, memory.compare_sums(transfer, found))

    # --- time and end -----------------------------------------------------------------------------

    def sleep(self, heads: Callable[[], Sequence[int]], timeout_s: float) -> bool:
        end, pause = self.now() + timeout_s, FIRST_PAUSE_S
        while True:
            if any(self.is_done(event) for event in heads()):
                return True
            left = end - self.now()
            if left <= 0.0 or self._woken.wait(min(pause, left)):
                self._woken.clear()
                return False
            pause = min(2.0 * pause, LONGEST_PAUSE_S)

    def wake(self) -> None:
        self._woken.set()

    def now(self) -> float:
        return time.monotonic()

    def close(self, timeout_s: float) -> bool:
        if self._closed:
            return True
        end = self.now() + timeout_s
        last = [] if self._lost else [self.record(stream) for stream in self._streams]
        while not all(self.is_done(event) for event in last):
            if self.now() >= end:
                self._events += last
                return False
            time.sleep(LONGEST_PAUSE_S)
        if not self._lost:
            self._give_back()
        self._on_close()
        self._closed = True  # last: after an interruption the next call begins again
        return True

    def _give_back(self) -> None:
        """Gives back as much as possible: nothing runs any more, and a refusal must not keep the host memory pinned."""
        self._held.clear()
        self._events.clear()
        if self._sums is not None:
            with suppress(Exception):
                self._sums.close()
        for drop, handles in ((self._api.drop_stream, self._streams), (self._api.drop_event, self._made)):
            while handles:
                with suppress(Exception):
                    drop(handles.pop())

    def link_stats(self) -> LinkStats:
        """The path of the bytes, and the speed measured when it was built."""
        h = self._host or HostMemoryReport(0, 0, None, 0.0, 0.0)
        return LinkStats(
            store_gbps=self.link_gbps.get(Direction.STORE),
            load_gbps=self.link_gbps.get(Direction.LOAD),
            submit_s=self.submit_s,
            **self.counts,
            pinned_bytes=h.num_bytes,
            pieces=h.pieces,
            numa_node=h.numa_node,
            fault_s=h.fault_s,
            pin_s=h.pin_s,
            notes=(*h.notes, *self.notes),
        )
