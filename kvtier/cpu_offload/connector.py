"""Copies between the tiers: the only owner of transfers.

Owns       what a transfer does from plan to end: its pins, its fences, its copy; and the copy engine.
Promises   one transfer per key. A store never holds memory hostage: it fences its device source, it does not pin it.
           A key is findable in a tier only once its bytes are there and, where asked for, verified. Nobody waits for a
           transfer past its deadline. Nothing is stored while stores hang. Keeps I13, I17, I18, I19, I20,
           I21.
Does not   decide what to store (``StorePolicy``), or know requests: the owner of a load asks ``is_live`` by its ticket.

Stores are PLANNED, and submitted while the bytes in flight stay under a bound. A planned store's device block may be
handed out like any other fenced block: the store is then submitted first and the block's next writer ordered after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.books import Books, Latencies
from kvtier.cpu_offload.device_side import DeviceSide
from kvtier.cpu_offload.ends import Ends
from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.failures import CopyNews
from kvtier.cpu_offload.ledger import Ledger
from kvtier.cpu_offload.store_queue import StoreQueue
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.cpu_offload.wiping import Wiper
from kvtier.machine.errors import TransferError
from kvtier.machine.wakeup import Wakeup
from kvtier.pools.block_pool import BlockPools, Ids, Mark, Words, fence_of

Counts = npt.NDArray[np.int64]

LONGEST_WAIT_S = 1e6
"""What a thread can be asked to wait; deadlines may be longer."""


class Connector:
    """Copies between a device and, if there is a host tier, the host pools. All calls come from one thread.

    ``pools``: the device's; None: an engine owns its blocks and their content.
    """

    def __init__(
        self,
        device: DeviceSide,
        pools: BlockPools | None,
        host: BlockPools | None,
        engine: CopyEngine | None,
        block_bytes: npt.NDArray[np.int64],
        deadline_s: float,
        news: CopyNews,
    ) -> None:
        self._device, self._pools = device, pools
        self.news = news
        """What is told of copies that go wrong."""
        self._host = host
        self._engine = engine
        self._wiper = None if engine is None else Wiper(engine)
        self._block_bytes = block_bytes
        self.ledger = Ledger(deadline_s)
        """Its live transfers."""
        self._queue = StoreQueue(engine)
        self._fencing: dict[int, Transfer] = {}  # stores that the next writers must be ordered after, oldest first
        self._refuses = False  # the engine, stores, since the last poll
        self._last_overdue = self._last_ended = 0  # tickets of stores; a later store has a greater one
        self._woken = Wakeup()
        self._ends = Ends(device, pools, host, block_bytes)
        self.counts = self._ends.counts
        self.latencies = {direction: Latencies() for direction in Direction}

    # --- stores -----------------------------------------------------------------------------------

    def store(self, groups: Ids, blocks: Ids, hosts: Ids, keys: Words, cold: bool, superseded: bool) -> None:
        """Plans to store device blocks into host blocks that carry their keys, PENDING, each with one reference.

        The sources are fenced from now on. Copies of what is ``superseded`` are the first that the host gives up.
        """
        for part, num_bytes in self._queue.parts(self._block_bytes[groups]):
            on, device, to = groups[part], blocks[part], hosts[part]
            transfer = self.ledger.open(Direction.STORE, on, device, to, keys[part], num_bytes, cold)
            transfer.superseded = np.ones(len(on), bool) if superseded else None
            self._device.fence(on, device, transfer.ticket)
            self._queue.planned.append(transfer)
            self._fencing[transfer.ticket] = transfer

    @property
    def refuses_stores(self) -> bool:
        """Whether the engine has refused one since the last ``poll``."""
        return self._refuses

    def submit_planned(self) -> None:
        """Submits planned stores, oldest first, while the bytes in flight stay under the bound."""
        queue = self._queue
        while queue.planned and queue.is_due:
            self._submit(queue.planned.popleft())

    def clear_fences(self, deficit: npt.NDArray[np.int64]) -> bool:
        """Makes at least ``deficit[g]`` fenced blocks of group g clean, those of the oldest tickets first.

        Returns whether anything has changed. Waits on engines that cannot order a writer any other way. An overdue
        ticket is given up, and its blocks are quarantined. Then fewer may be clean: ask again.
        """
        lacking, changed = deficit.copy(), False
        for transfer in self._still_fencing():
            if not np.any(lacking > 0):
                break
            free = self._device.are_waited_for(transfer.groups, transfer.device)
            gain = np.bincount(transfer.groups[free], minlength=len(lacking))
            if np.any((gain > 0) & (lacking > 0)):
                changed = True
                if not self._clear(transfer):
                    break  # what waited for the link may be clean now
                lacking -= gain
        return changed

    def clear_until(self, enough: Callable[[], bool]) -> bool:
        """``clear_fences`` where pools share slabs, so that any fence may be in the way, until there is ``enough``.

        Checks ``enough()`` after each ticket, and clears at least one. Ends with one that is given up, as
        ``clear_fences`` does.
        """
        changed = False
        for transfer in self._still_fencing():
            changed = True
            if not self._clear(transfer) or enough():
                break
        return changed

    def order_writers(self, fences: Ids) -> None:
        """Orders the next writers of these blocks after the stores that read them. Fence 0: none.

        Waits on engines that cannot order a writer any other way; a store that is overdue is given up.
        """
        for transfer in self._fencing_as(fences):
            self._clear(transfer)

    def spoil(self, fences: Ids) -> None:
        """Discards the stores that read these blocks: the source is being overwritten. Fence 0: none."""
        for transfer in self._fencing_as(fences):
            self._ends.outdate(transfer)
            self.ledger.outdate(transfer)

    def _fencing_as(self, fences: Ids) -> Iterator[Transfer]:
        wanted = set(np.unique(fences[fences > 0]).tolist())
        return (t for t in self._still_fencing() if fence_of(t.ticket) in wanted)

    def _still_fencing(self) -> Iterator[Transfer]:
        """Stores that fence their source, oldest first; those that cease to meanwhile are left out."""
        for transfer in list(self._fencing.values()):
            if transfer.ticket in self._fencing:
                yield transfer

    def _clear(self, transfer: Transfer) -> bool:
        """Orders writers after a store, which fences nothing any more then; False if it was given up instead."""
        if self._order_after(transfer):
            self._device.unfence(transfer.groups, transfer.device, transfer.ticket, transfer.cold)
            transfer.ordered = True
            self._fencing.pop(transfer.ticket, None)  # it may have ended with its submission
            return True
        self._expire(transfer)
        for store in self._overdue():  # time has passed: nobody is to be preempted for what hangs on the same link
            if store.direction is Direction.STORE and not self._order_after(store):
                self._expire(store)
        return False

    def _order_after(self, transfer: Transfer) -> bool:
        assert self._engine is not None
        while transfer.state is TransferState.PLANNED:
            self._submit(self._queue.planned.popleft())
        if transfer.state is not TransferState.IN_FLIGHT:
            return True  # the engine has refused it
        left_s = max(0.0, transfer.deadline_s - self._engine.now())
        try:
            return self._engine.order_after([transfer.ticket], min(left_s, LONGEST_WAIT_S))
        except Exception:  # an engine that cannot say what comes after what: as if the copy did not end
            return False

    # --- loads ------------------------------------------------------------------------------------

    def load(self, groups: Ids, hosts: Ids, blocks: Ids, keys: Words, superseded: npt.NDArray[np.bool_]) -> int:
        """Starts to load host blocks into device blocks that the caller holds; returns the ticket.

        Pins both ends; the keys are PENDING on the device until the bytes have landed. ``superseded``: bool [n], host
        copies that nobody else is known to want.
        """
        assert self._host is not None
        self._host.acquire(groups, hosts)
        if self._pools is not None:
            self._pools.acquire(groups, blocks)
            self._pools.publish(groups, blocks, keys, Mark.PENDING)
        num_bytes = int(self._block_bytes[groups].sum())
        transfer = self.ledger.open(Direction.LOAD, groups, blocks, hosts, keys, num_bytes, cold=False)
        transfer.superseded = superseded
        self._submit(transfer)
        return transfer.ticket

    def pin_host(self, groups: Ids, hosts: Ids) -> None:
        """These host blocks were matched: nobody may take them until ``unpin_host``."""
        if self._host is not None:
            self._host.acquire(groups, hosts)

    def unpin_host(self, groups: Ids, hosts: Ids) -> None:
        """Ends ``pin_host``; a load that was started meanwhile has pins of its own."""
        if self._host is not None:
            self._host.release(groups, hosts)

    # --- ends -------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Takes note of every transfer that has ended or is overdue; never waits."""
        self._refuses = False
        if self._wiper is None or not self.ledger.num_live:
            return
        for outcome in self._wiper.poll(self.ledger.find):
            self._end(outcome)
        for transfer in self._overdue():
            self._expire(transfer)

    def _end(self, outcome: Outcome, refused: bool = False) -> None:
        transfer = self.ledger.find(outcome.ticket)
        if transfer is None:
            raise TransferError(f"the copy engine reported transfer {outcome.ticket}, which is not under way")
        if transfer.state is TransferState.EXPIRED:
            self._settle_late(transfer, outcome)
            return
        if transfer.direction is Direction.STORE:
            self._queue.num_bytes -= transfer.num_bytes
            if not refused:  # which says nothing about the link
                self._last_ended = max(self._last_ended, transfer.ticket)
        transfer.move(TransferState.FAILED if outcome.error else TransferState.LANDED)
        good = np.ones(len(transfer.groups), bool)
        assert self._engine is not None
        now = self._engine.now()
        if outcome.error:
            good[slice(None) if outcome.bad is None else outcome.bad] = False
            self.news.failed(transfer, now, outcome.error, ~good)
        else:
            self.news.landed(transfer, now)
            self.latencies[transfer.direction].add(now - transfer.submitted_s)
        if transfer.direction is Direction.STORE:
            self._ends.store(transfer, good, self.ledger.is_current(transfer))
        else:
            self._ends.load(transfer, good, outcome, self.ledger.is_current(transfer))
        self._settle(transfer)

    def _expire(self, t: Transfer) -> None:
        """Gives up waiting."""
        self.ledger.expire(t)
        self._ends.give_up(t, why := f"not ended after {self.ledger.deadline_s:g} s")
        self.news.failed(t, t.deadline_s, why, np.ones(len(t.groups), bool))
        if t.direction is Direction.STORE:
            self._queue.num_bytes -= t.num_bytes
            self._fencing.pop(t.ticket, None)
            self._last_overdue = max(self._last_overdue, t.ticket)
            if self.stores_hang:
                self.counts.dropped_blocks += sum(len(other.groups) for other in self._queue.planned if not other.cold)
                self._cancel_planned()

    def _overdue(self) -> list[Transfer]:
        assert self._engine is not None
        return self.ledger.overdue(self._engine.now())

    def _cancel_planned(self) -> None:
        """What waits for the link will not be stored."""
        for transfer in self._queue.planned:
            self._ends.cancel(transfer)
            self._settle(transfer)
        self._queue.planned.clear()

    def _settle_late(self, t: Transfer, outcome: Outcome) -> None:
        self._ends.late(t, outcome, [other for other in self.ledger.given_up() if other is not t])
        if t.direction is Direction.STORE:
            self._last_ended = max(self._last_ended, t.ticket)
        self._settle(t)

    @property
    def has_failed_loads(self) -> bool:
        """Whether ``take_failed_loads`` would return something."""
        return bool(self._ends.failed_loads)

    def take_failed_loads(self) -> dict[int, str]:
        """Loads that ended badly since the last call: ticket -> what went wrong."""
        failed, self._ends.failed_loads = self._ends.failed_loads, {}
        return failed

    # --- life -------------------------------------------------------------------------------------

    @property
    def engine(self) -> CopyEngine | None:
        """The copy engine; None without a host tier."""
        return self._engine

    @property
    def stores_hang(self) -> bool:
        """Whether a store is overdue and none that was submitted later has ended: the next one would hang as well.

        Nothing is stored meanwhile. A store that is lost for good stops stores until ``reset``.
        """
        return self._last_overdue > self._last_ended

    @property
    def books(self) -> Books:
        """What is kept beside the transfers themselves; for auditing."""
        planned, fencing = tuple(transfer.ticket for transfer in self._queue.planned), tuple(self._fencing)
        corrupt, failed = tuple(self._ends.corrupt), frozenset(self._ends.failed_loads)
        return Books(planned, fencing, self._queue.num_bytes, self.ledger.deadline_s, corrupt, failed)

    def reset(self) -> None:
        """Nothing that is cached now, or under way, will ever be found again."""
        self.ledger.epoch += 1
        self._cancel_planned()
        self._last_ended = max(self._last_ended, self._last_overdue)
        self._ends.forget_all(self.ledger.given_up())

    def disown(self, groups: Ids, keys: Words) -> set[int]:
        """Invalidates these keys in every tier, and in copies under way, whose tickets it returns."""
        outdated = list(self.ledger.bringing(keys))
        for t in outdated:
            self._ends.outdate(t)
            self.ledger.outdate(t)
        self._ends.forget(groups, keys)
        return {t.ticket for t in outdated}

    def wait(self, timeout_s: float) -> None:
        """Until a transfer ends, ``wake`` is called, or the time is over; planned stores are submitted first."""
        if self._engine is None or not self.ledger.num_live:
            self._woken.wait(min(timeout_s, LONGEST_WAIT_S))
        elif not self._woken.is_set():
            settled = self.ledger.num_settled
            self.submit_planned()
            if self.ledger.num_settled == settled:  # else the engine has refused some, which is news
                left_s = self.ledger.next_deadline_s() - self._engine.now()
                self._engine.wait(min(timeout_s, max(0.0, left_s), LONGEST_WAIT_S))
        self._woken.clear()

    def wake(self) -> None:
        """Ends a ``wait``; the one call that may come from any thread."""
        self._woken.set()
        if self._engine is not None:
            self._engine.wake()

    def _submit(self, transfer: Transfer) -> None:
        assert self._engine is not None and self._wiper is not None
        self.ledger.submit(transfer, self._engine.now())
        if transfer.direction is Direction.STORE:
            self._queue.num_bytes += transfer.num_bytes
        if (failed := self._wiper.submit(transfer)) is not None:
            self._refuses |= transfer.direction is Direction.STORE
            self._end(failed, refused=True)

    def _settle(self, transfer: Transfer) -> None:
        self.ledger.settle(transfer)
        self._fencing.pop(transfer.ticket, None)
