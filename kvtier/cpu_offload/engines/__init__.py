"""Copy engines: ``threads`` (CPU), ``streams`` (a device's streams), ``simulated`` (faults and delays), ``null``.

An engine moves bytes and knows neither keys nor references. Of a ``Transfer`` it needs ``direction``, and ``groups``,
``device`` and ``host``, int32 [n] each: block host[k] and block device[k] of group groups[k]. To write one, inherit
from ``CopyEngine``: seven methods are yours, four have defaults. Pass the class, or a function that makes the engine,
as ``KVCache(copy_engine=...)``:

    class Copier(CopyEngine):
        def __init__(self, memory: TierMemory) -> None:
            super().__init__(memory)
            self._ended: list[Outcome] = []

        def submit(self, transfer: Transfer) -> None:
            bad = self.memory.copy(transfer)  # here and now: the caller's writes are there
            self._ended.append(Outcome.of_check(transfer, bad))

        def poll(self) -> list[Outcome]:
            ended, self._ended = self._ended, []
            return ended

        def order_after(self, tickets, timeout_s): return True  # nothing is ever under way
        def wait(self, timeout_s): return bool(self._ended)
        def wake(self): ...
        def now(self): return time.monotonic()
        def close(self, timeout_s): return True

An engine that needs host memory of its own, such as pinned memory, comes with an ``EngineFactory``.

All calls except ``wake`` and ``close`` come from one thread. ``close`` may come from another thread, but not from a
signal handler: let the handler set a flag, and call ``close`` in a ``finally``. ``wake`` may come at any moment, even
from a garbage collector's callback in the middle of another call: it takes no lock (see ``kvtier.machine.wakeup``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.transfer import Transfer
from kvtier.geometry.layout import Seams
from kvtier.machine.stats import LinkStats

if TYPE_CHECKING:
    from kvtier.cpu_offload.shared_memory import SharedMemory
    from kvtier.cpu_offload.tier_memory import Ids, TierMemory


@dataclass(frozen=True)
class Outcome:
    """The end of a transfer's copies: all went well if ``error`` is "".

    ``bad``: positions in the transfer of the blocks that did not arrive whole; None means all of them. The other blocks
    did arrive, with the stored bytes if blocks are verified. ``corrupt``: they arrived, but their bytes are not the
    stored bytes.
    """

    ticket: int
    error: str = ""
    bad: npt.NDArray[np.int64] | None = None
    corrupt: bool = False

    @staticmethod
    def of_check(transfer: Transfer, bad: npt.NDArray[np.int64] | Sequence[int]) -> Outcome:
        """All copies have ended; ``bad`` are the positions of the blocks whose checksum is wrong."""
        if len(bad) == 0:
            return Outcome(transfer.ticket)
        error = f"checksum mismatch in {len(bad)} of {len(transfer.groups)} blocks"
        return Outcome(transfer.ticket, error, np.asarray(bad, np.int64), corrupt=True)


class CopyEngine(ABC):
    """Moves the bytes of transfers between the tiers; see the module's docstring.

    ``memory``: the bytes of both tiers. The default of ``move`` needs it, so call ``super().__init__(memory)``.
    """

    def __init__(self, memory: TierMemory) -> None:
        self.memory = memory

    @abstractmethod
    def submit(self, transfer: Transfer) -> None:
        """Starts the copies of ``transfer``; returns at once.

        They come after all reads and writes of the caller so far (edges 1, 2 and 4 of the ordering contract).
        """

    @abstractmethod
    def poll(self) -> Sequence[Outcome]:
        """Transfers that ended since the last call, each once. Never waits."""

    @abstractmethod
    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        """Orders the caller's next writes after these tickets (edge 4), and waits if it must; False if the time is
        over."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """True as soon as ``poll`` has something to report; False after ``timeout_s`` seconds or a ``wake``."""

    @abstractmethod
    def wake(self) -> None:
        """Ends a ``wait`` early. From any thread, at any moment."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on the clock that deadlines use."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Stops; True if no copy runs any more. Calling it again does nothing."""

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        """Copies blocks of group ``g`` on the device to other blocks, in the order of the device's computing.

        By default at once, on the current stream.
        """
        self.memory.move(g, sources, targets)

    def wipe(self, groups: Ids, blocks: Ids) -> None:
        """Writes zeros to blocks on the device, int32 [n] each, in the order of the device's computing.

        Called for what a failed load has written, once its end was reported. By default at once, on the current stream.
        """
        self.memory.wipe(groups, blocks)

    def quiesce(self, timeout_s: float) -> bool:
        """Waits until no copy is under way on a stream of the device, as graph captures demand; False if the time is
        over.

        By default there is no such stream.
        """
        return True

    def link_stats(self) -> LinkStats | None:
        """Known facts of the link, None by default. ``store_gbps`` bounds the stores under way."""
        return None


class EngineFactory(ABC):
    """Makes a cache's copy engine. A function from ``TierMemory`` to an engine is enough for most.

    The cache calls ``host_memory`` if it has a host tier, and then the factory itself. If the cache cannot be made
    after that and there is no engine yet, it calls ``give_back``.
    """

    shared: SharedMemory | None = None
    """Memory of several processes, if ``host_memory`` maps that."""

    @abstractmethod
    def __call__(self, memory: TierMemory) -> CopyEngine:
        """The engine. It owns the memory that ``host_memory`` has made from now on."""

    def host_memory(self, num_bytes: int, setting: str, seams: Seams) -> npt.NDArray[np.uint8] | None:
        """Memory for the host tier, uint8 [num_bytes]; None, the default: the cache takes ordinary memory.

        ``setting``: the option that gave its size, for messages. ``seams``: where it may be cut (``geometry.layout``).
        """
        return None

    def give_back(self) -> bool:
        """Releases host memory that no engine has taken over; False if something may still write there."""
        return True
