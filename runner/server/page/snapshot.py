"""What the page is told of a server: once what does not change, then a snapshot a second.

Promises   reads what other threads write without a lock, on the event loop; a moment's numbers may lie a little apart.
           A snapshot is bounded, however many requests there are. With several keys it names to each holder its own,
           and to the admin's alone what the engine has died of.
Does not   tell any text of a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvtier import CacheStats
from kvtier.coordinator.tracked import State, Tracked, Wait
from kvtier.cpu_offload.transfer import Direction, TransferState
from kvtier.geometry.kinds import Kind
from kvtier.machine.stats import PoolStats, RemoteStats
from runner.server.page.finished import Finished
from runner.server.page.names import Names
from runner.server.page.pressure import Pressure
from runner.server.served import Served

PLACES = ("held", "loading", "fenced", "cached", "quarantined", "lent", "empty")
"""Places of blocks. ``loading``: a load writes them (device) or reads them (host); ``held``: the others, not free."""
MOST_ROWS = 100
"""Running requests, and waiting ones, that a snapshot names."""
_REMOTE = ("live", "spilled_bytes", "fetched_bytes", "spilled_objects", "fetched_objects", "looks", "late_looks",
          "missed_objects", "damaged_objects", "refused_objects", "failed_spills", "failed_fetches", "expired",
          "not_worth")  # fmt: skip
"""Fields of ``RemoteStats``, if there is a remote tier."""
_OF_ENDS = ("hits", "missed", "pays")
"""Fields of ``EndStats``, for models with windows or chunks."""
_COUNTERS = ("tokens.device", "tokens.host", "tokens.computed", "prefilled", "generated", "stored_bytes",
             "loaded_bytes", "failed_stores", "failed_loads", "dropped_blocks", "preemptions", "finished",
             "refused")  # fmt: skip
"""``refused``: since too much was there already (429)."""
_LONGEST_REASON = 200
_WHY = {
    Wait.QUEUE: "not looked at yet: it has just come or come back, or stands behind one that waits",
    Wait.TOKENS: "the step has no tokens left for it",
    Wait.ROWS: "as many requests run as may run at once",
}


class Snapshots:
    """Snapshots of one server."""

    def __init__(self, served: Served, finished: Finished) -> None:
        self._served, self._finished, self._pressure = served, finished, Pressure()
        stats = served.llm.cache.stats()
        self._groups = tuple(stats.device)
        self._tiers = ("device", "host") if stats.host else ("device",)
        pools = [f"{tier}.{group}.{place}" for tier in self._tiers for group in self._groups for place in PLACES]
        waits = [f"waiting.{wait.value}" for wait in Wait]
        self._ends = (
            () if all(g.attention.kind is Kind.FULL for g in served.llm.cache.spec.groups) else tuple(stats.ends)
        )
        ends = [f"ends.{name}.{of}" for name in self._ends for of in _OF_ENDS]
        remote = () if stats.remote is None else ("tokens.remote", *(f"remote.{name}" for name in _REMOTE))
        self.columns = ("time", "running", *waits, "transfers", *_COUNTERS, *pools, *ends, *remote)
        """Names of a snapshot's ``numbers``. ``time``: milliseconds since 1970."""

    def facts(self) -> dict[str, Any]:
        """What does not change while the server runs."""
        llm, stats = self._served.llm, self._served.llm.cache.stats()
        tiers = {"device": stats.device, "host": stats.host}
        return {
            "models": list(self._served.settings.names),
            "device": str(llm.model.device),
            "attention": llm.model.attention.name,
            "longest": self._served.longest,
            "tiers": {tier: self._tier(stats, tier, tiers[tier]) for tier in self._tiers},
            "groups": {
                name: {"block_tokens": pool.block_tokens, "block_bytes": pool.block_bytes}
                for name, pool in stats.device.items()
            },
            "ends": list(self._ends),
            "remote": None if stats.remote is None else {"kind": stats.remote.kind},
        }

    def _tier(self, stats: CacheStats, tier: str, pools: Any) -> dict[str, Any]:
        is_device = tier == "device"
        return {
            "bytes": stats.device_bytes if is_device else stats.host_bytes,
            "capacity_tokens": stats.device_capacity_tokens if is_device else stats.host_capacity_tokens,
            "usable": {name: pool.usable for name, pool in pools.items()},
        }

    def take(self, now_ms: int) -> dict[str, Any]:
        """How it is now: ``numbers`` by ``columns``, and what else all may see."""
        stats = self._served.llm.cache.stats()
        return {
            "state": self._state(now_ms),
            "numbers": self._numbers(stats, now_ms),
            "times": self._finished.times(),
            "stores_hang": stats.stores_hang,
            "remote": None if stats.remote is None else _state_of(stats.remote),
        }

    def rest(self, owner: str | None = "") -> dict[str, Any]:
        """What ``owner`` may see (None: all): why the engine has died, if it has, and requests by name; the others are
        counted."""
        llm, names = self._served.llm, Names(self._served.admission.tickets, owner)
        run, wait, num_waiting = llm.scheduler.running, llm.scheduler.waiting, llm.scheduler.num_waiting
        running = [seq for seq in run if names.shows(seq.request.request_id)][:MOST_ROWS]
        waiting = [seq for seq in wait if names.shows(seq.request.request_id)][:MOST_ROWS]
        return {
            "death": None if owner else _reason(llm.death),  # for all but one of several: it may quote others' requests
            "running": [self._running(seq, names) for seq in running],
            "waiting": [self._waiting(seq, names) for seq in waiting],
            "unnamed": max(0, len(run) - len(running)) + max(0, num_waiting - len(waiting)),
            "finished": self._finished.of(owner),
        }

    def _state(self, now_ms: int) -> str:
        metrics = self._served.metrics
        is_too_high = self._pressure.is_too_high(now_ms, metrics.arrived, metrics.refused("overloaded"))
        if not self._served.llm.is_running:
            return "dead"
        if self._served.admission.is_draining:
            return "draining"
        return "overloaded" if is_too_high else "serving"

    # --- numbers ----------------------------------------------------------------------------------

    def _numbers(self, stats: CacheStats, now_ms: int) -> list[int]:
        prefix, moved = stats.prefix_tokens, stats.transfers
        from_remote = prefix.get("remote", 0)
        computed = prefix["queried"] - prefix["device"] - prefix["host"] - from_remote
        counters = (
            *(prefix["device"], prefix["host"], computed),
            max(0, stats.computed_tokens - stats.generated_tokens),
            stats.generated_tokens,
            *(moved.stored_bytes, moved.loaded_bytes, moved.failed_stores, moved.failed_loads, moved.dropped_blocks),
            *(stats.requests["preemptions"], stats.requests["finished"], self._served.metrics.refused("overloaded")),
        )
        found = [now_ms, stats.requests["running"], *(stats.waiting[wait.value] for wait in Wait), moved.live]
        found += counters
        loading = self._loading() if stats.host else [0] * len(self._groups)
        for pools in (stats.device, stats.host)[: len(self._tiers)]:
            for pool, loads in zip(pools.values(), loading, strict=True):
                found += _places(pool, loads)
        found += [int(getattr(stats.ends[name], of)) for name in self._ends for of in _OF_ENDS]
        if stats.remote is not None:
            found += [from_remote, *(getattr(stats.remote, name) for name in _REMOTE)]
        return found

    def _loading(self) -> list[int]:
        """Blocks by group that loads are bringing."""
        ledger = self._served.llm.cache.core.coordinator.connector.ledger
        loads = [t.groups for t in ledger.live() if t.direction is Direction.LOAD and t.state in _UNDER_WAY]
        if not loads:
            return [0] * len(self._groups)
        counted: list[int] = np.bincount(np.concatenate(loads), minlength=len(self._groups)).tolist()
        return counted

    # --- requests ---------------------------------------------------------------------------------

    def _running(self, seq: Tracked, names: Names) -> dict[str, Any]:
        request, there = seq.request, self._served.llm.scheduler.progress(seq.request.request_id)
        computed, known = there or (0, len(seq.tokens))
        prompt, found = len(request.tokens), seq.cached_tokens
        state = "loading" if seq.state is State.LOADING else "prefill" if known - computed > 1 else "decode"
        return {
            **names.row(request.request_id),
            "state": state,
            "prompt": prompt,
            "computed": computed,
            "known": known,
            "generated": max(0, known - prompt),
            "most": request.max_new_tokens,
            **({"device": None, "host": None} if found is None else found),
            "preemptions": seq.preemptions,
        }

    def _waiting(self, seq: Tracked, names: Names) -> dict[str, Any]:
        request, wait = seq.request, seq.wait
        why = seq.wait_reason or _WHY.get(wait, wait.value)
        if wait is Wait.QUEUE and seq.wait_reason:
            why = f"back in the queue: {why}"
        elif wait is Wait.BLOCKS:
            why = f"it needs more blocks than are free: {why}"
        return {
            **names.row(request.request_id),
            "wait": wait.value,
            "why": names.told(why),
            "prompt": len(request.tokens),
            "generated": seq.num_generated,
            "preemptions": seq.preemptions,
        }


def _reason(death: BaseException | None) -> str | None:
    """The reason that the engine has died of, in a line."""
    if death is None:
        return None
    return f"{type(death).__name__}: {death}".partition("\n")[0][:_LONGEST_REASON]


def _state_of(remote: RemoteStats) -> str:
    if not remote.is_on:
        return "off"
    return "alone" if remote.breaker_open else "on"


_UNDER_WAY = {TransferState.PLANNED, TransferState.IN_FLIGHT, TransferState.LANDED}


def _places(pool: PoolStats, loads: int) -> Iterable[int]:
    """Blocks in the order of ``PLACES``."""
    loading = min(loads, pool.held)
    return (pool.held - loading, loading, pool.fenced, pool.cached, pool.quarantined, pool.lent, pool.empty)
