"""The books of a host tier with copies that other processes make: an engine's scheduler has them.

Owns       what ``HostBooks`` owns.
Promises   what ``HostBooks`` promises, for several workers at once: a copy has ended once every worker has said so.
Does not   carry orders to workers, or reports back: the embedding engine does, once per step.

Each step of the engine: ``overwrite`` the blocks that it is about to write, ``take_orders``, and then say what it
computes (``HostText.computed``). Each worker gets the orders before it enqueues the step's forward pass
(``HostTierWorker.begin``, ``load``). Its report comes back with the step's output: ``report``, then ``poll``.
"""

from __future__ import annotations

from kvtier.geometry.options import check_identity, seconds
from kvtier.host_tier.books import HostBooks
from kvtier.host_tier.orders import Orders, RelayEngine, Report
from kvtier.host_tier.plan import MOST_WORKERS, HostPlan, check_plan
from kvtier.machine.arguments import check_type
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown
from kvtier.pools.block_pool import Ids
from kvtier.remote.backends.contract import Backend
from kvtier.remote.check import check_remote
from kvtier.remote.opening import open_relayed
from kvtier.remote.relay import RelayedBackend

CLOSE_S = 5.0
"""Time for the scheduler's own questions to the remote to end; they touch no memory of the tier."""


class HostTierScheduler(HostBooks):
    """Books for ``workers`` workers with the same plan. ``deadline_s``: seconds after which a copy is given up."""

    def __init__(self, plan: HostPlan, deadline_s: float = 30.0, workers: int = 1) -> None:
        number, limit = integer(workers), seconds(deadline_s, "deadline_s")
        check_plan(plan)
        if number is None or not 1 <= number <= MOST_WORKERS:
            raise ConfigError(f"workers must be an integer in 1..{MOST_WORKERS:,}, got {shown(workers)}")
        if plan.sharers not in (1, number):
            raise ConfigError(f"the plan is of {plan.sharers} workers that share host memory, and workers is {number}")
        self._copies = number // plan.sharers
        self._relay = RelayEngine(number)
        self._relayed: RelayedBackend | None = None
        super().__init__(plan, self._relay, limit)

    def use_remote(self, uri: str | Backend, model_id: str, key_secret: bytes) -> None:
        """Puts a remote behind the workers' host memory; each of them opens it, too. Once, before the first text.

        The arguments are as ``HostTier``'s. Raises ``ConfigError``.
        """
        if self._relayed is not None:
            raise ConfigError("there is a remote already")
        check_identity(model_id, key_secret)
        check_remote(uri, True, "cpu", model_id, key_secret)
        parts = self.spec, self._pools, self._connector, self._deadline_s, self._copies
        remote, self._relayed = open_relayed(uri, model_id, key_secret, *parts)
        self._parts.door.open(remote)

    def take_orders(self) -> Orders:
        """Everything to be done since the last call, with planned stores as far as the link may be busy with them."""
        self._parts.check_open()
        self._connector.submit_planned()
        orders = self._relay.take()
        return orders if self._relayed is None else orders._replace(parcels=self._relayed.take())

    def report(self, report: Report) -> None:
        """Takes what a worker, or several, have seen end; the next ``poll`` takes note."""
        check_type(report, Report, "report")
        self._relay.report(report)
        if self._relayed is not None:
            self._relayed.report(self._relay.take_receipts())

    def spoil(self, groups: Ids, blocks: Ids) -> None:
        """The engine writes these device blocks, int32 [n] each, and cannot order the writes after stores.

        What stores read there meanwhile is never found.
        """
        self._parts.spoil(groups, blocks)

    def close(self) -> None:
        """Nothing is found or stored any more. From any thread.

        Workers get no more orders: an engine whose steps go on calls ``flush_remote`` before.
        """
        self._parts.is_closed = True
        self._connector.wake()
        self._parts.door.close(CLOSE_S)
