"""A worker's half of a host tier: it makes the copies that ``HostTierScheduler`` orders, and reports their ends.

Owns       the host memory of one worker (``HostBytes``), and the copies under way.
Promises   an overdue load is reported as late once, and its end later. What a failed load has written is wiped before
           that is reported (``Wiper``). A store whose source was overwritten before it had ended is reported as failed.
           In a forked child every call but ``close`` raises ``CacheClosed``.
Does not   know keys, content or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.connector import LONGEST_WAIT_S
from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.engines.by_name import MakesEngine
from kvtier.cpu_offload.shared_memory import SharedMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.cpu_offload.wiping import Wiper
from kvtier.geometry.options import check_identity, seconds, wait_seconds
from kvtier.host_tier.memory import HostBytes
from kvtier.host_tier.orders import End, Orders, Report
from kvtier.host_tier.plan import HostPlan
from kvtier.machine.arguments import check_type
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown
from kvtier.machine.stats import LinkStats
from kvtier.remote.backends.contract import Backend
from kvtier.remote.check import check_uri
from kvtier.remote.opening import open_worker
from kvtier.remote.relay import RemoteWorker

if TYPE_CHECKING:
    import torch

_NO_KEYS = np.empty((0, 2), np.uint64)
ORDER_S = 60.0
"""No step waits longer for stores; what they then read is never found."""
SPOILED = "its device blocks were written before the store had ended"


class Ended(NamedTuple):
    """Copies that have ended since the last ``poll``. Loads by ticket; of failed loads the problem."""

    loaded: tuple[int, ...]
    failed: dict[int, str]
    """A load that is late is here, and ends a second time in ``report`` alone."""
    report: Report
    """The report for ``HostTierScheduler.report``."""


@dataclass
class _UnderWay:
    transfer: Transfer
    begun_s: float
    at: npt.NDArray[np.int64] | None = None
    """Where its blocks are in the ordered copy; None: they are all of it."""
    is_late: bool = False
    is_spoiled: bool = False

    @property
    def is_load(self) -> bool:
        return self.transfer.direction is Direction.LOAD


class HostTierWorker:
    """One worker of a ``HostTierScheduler`` of the same ``plan``. ``memory`` and ``copy_engine``: as ``HostTier``'s.

    ``deadline_s``: seconds after which a load is reported as late, and after which nobody waits for a store.
    ``shared``: the host memory of a plan with several ``sharers``. Each of them stores its part of the blocks there,
    and loads all.
    """

    def __init__(
        self,
        plan: HostPlan,
        memory: npt.NDArray[np.uint8] | torch.Tensor,
        deadline_s: float = 30.0,
        copy_engine: MakesEngine | str | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        self._deadline_s = seconds(deadline_s, "deadline_s")
        self._bytes = HostBytes(plan, memory, copy_engine, shared)
        self._shared = shared
        self._engine = self._bytes.engine
        self._wiper = Wiper(self._engine)
        self._under_way: dict[int, _UnderWay] = {}
        self._at_once: list[Outcome] = []  # copies that have ended as they began
        self._backend: RemoteWorker | None = None

    def use_remote(self, uri: str | Backend, key_secret: bytes, rank: int = 0) -> None:
        """Opens the books' remote tier, once. ``rank``: this worker's number, from 0 on. Raises ``ConfigError``."""
        self._bytes.check_here()
        if self._backend is not None:
            raise ConfigError("this worker has a remote already")
        check_uri(uri)
        check_identity("", key_secret)
        number = integer(rank)
        if number is None or number < 0 or key_secret is None:
            raise ConfigError(f"a remote needs key_secret, and rank, a number from 0 on, got {shown(rank)}")
        sharers = 1 if self._shared is None else self._shared.ranks
        self._backend = open_worker(uri, key_secret, self._bytes.blocks, number, sharers, self._engine.wake)
        self._bytes.also(self._backend.close)

    def begin(self, orders: Orders) -> None:
        """Submits the stores before the caller's next writes, and orders these after ``orders.after``.

        Begins too what is to go to or come from the remote, between which and the device there is no order.
        """
        self._bytes.check_here()
        check_type(orders, Orders, "orders")
        self._submit(orders, is_load=False)
        if self._backend is not None:
            self._backend.begin(orders.parcels)
        waited = [ticket for ticket in orders.after if ticket in self._under_way]
        end_s = self._engine.now() + min(self._deadline_s, ORDER_S)
        for ticket in waited:
            if not self._order_after(ticket, max(0.0, end_s - self._engine.now())):
                self._under_way[ticket].is_spoiled = True

    def load(self, orders: Orders) -> None:
        """Submits the loads; they come after all writes so far."""
        self._bytes.check_here()
        check_type(orders, Orders, "orders")
        self._submit(orders, is_load=True)

    def poll(self) -> Ended:
        """Ends since the last call; never waits."""
        self._bytes.check_here()
        report, loaded, failed = Report(), list[int](), dict[int, str]()
        for ticket, receipt in ({} if self._backend is None else self._backend.poll()).items():
            report.add_receipt(ticket, receipt)
        begun, self._at_once = self._at_once, []
        for outcome in (*begun, *self._wiper.poll(lambda ticket: self._under_way[ticket].transfer)):
            mine = self._under_way.pop(outcome.ticket)
            bad = outcome.bad if mine.at is None or outcome.bad is None else mine.at[outcome.bad]
            end = End(outcome.error, bad, outcome.corrupt)
            if mine.is_spoiled and not mine.is_load:
                end = End(outcome.error or SPOILED)
            report.add(outcome.ticket, end)
            if mine.is_load and not mine.is_late:
                if end.error:
                    failed[outcome.ticket] = end.error
                else:
                    loaded.append(outcome.ticket)
        now = self._engine.now()
        for ticket, mine in self._under_way.items():
            if mine.is_load and not mine.is_late and now - mine.begun_s >= self._deadline_s:
                mine.is_late = True
                failed[ticket] = f"not ended after {self._deadline_s:g} s"
        return Ended(tuple(loaded), failed, report)

    def wait(self, timeout_s: float) -> None:
        """Until a copy ends or the remote tells something, at most ``timeout_s`` seconds; at once if nothing is under
        way."""
        self._bytes.check_here()
        seconds = wait_seconds(timeout_s)
        moves = 0 if self._backend is None else self._backend.num_live
        if (self._under_way or moves) and not self._at_once:
            self._engine.wait(min(seconds, LONGEST_WAIT_S))

    @property
    def num_under_way(self) -> int:
        """Copies, and moves to and from the remote, without an end so far."""
        return len(self._under_way) + (0 if self._backend is None else self._backend.num_live)

    def link_stats(self) -> LinkStats | None:
        """Known facts of the link; None if there are none."""
        return self._engine.link_stats()

    def close(self) -> bool:
        """Ends the worker, as ``HostTier.close`` does; False if a copy may still write to the host memory."""
        return self._bytes.close()

    def _submit(self, orders: Orders, is_load: bool) -> None:
        for copy in orders.copies:
            if copy.is_load is not is_load:
                continue
            direction, at = Direction.LOAD if is_load else Direction.STORE, None
            if self._shared is not None and not is_load:
                copy, at = copy.of_rank(self._shared.rank, self._shared.ranks)
            transfer = Transfer(copy.ticket, direction, copy.groups, copy.device, copy.host, _NO_KEYS, 0, 0)
            self._under_way[copy.ticket] = _UnderWay(transfer, self._engine.now(), at)
            is_none = at is not None and len(at) == 0
            ended = Outcome(copy.ticket) if is_none else self._wiper.submit(transfer)
            if ended is not None:
                self._at_once.append(ended)

    def _order_after(self, ticket: int, timeout_s: float) -> bool:
        try:
            return self._engine.order_after([ticket], timeout_s)
        except Exception:  # an engine that cannot say what comes after what: as if the copy did not end
            return False
