"""A small world in which anything can happen to a cache: the rules that change it.

``World`` is driven by a Hypothesis state machine (test_machine.py) and by a long random walk (soak.py). Every rule
takes plain numbers and is harmless where it does not apply, so that a failing walk can be cut down and printed as a
script. What must hold after each rule is in ``ground.py``.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from core.driving import check_step

from kvtier import (
    CacheClosed,
    Request,
    RequestTooLarge,
)
from kvtier.coordinator.tracked import State
from kvtier.pools.block_pool import Col, Mark

from .elsewhere import another_engine_serves
from .ground import KINDS, SALTS, STEMS, Config, Counts, Ground
from .played_backend import FATES as CALL_FATES, ROTS, least_bytes
from .preemptions import Preemption, recorded
from .waits import recorded_waits

__all__ = ["KINDS", "Config", "Counts", "World"]

FATES = ("ok", "fail", "tear", "corrupt")


class World(Ground):
    """The rules. See the module's text."""

    def submit(
        self, stem: int, length: int, extra: int, new_tokens: int, salt: int = 0, priority: int = 0, eos: bool = False
    ) -> None:
        """A request: ``length`` tokens of a shared stem (or of nobody else's, if ``stem`` is out of range)."""
        if stem < len(STEMS):
            prompt = STEMS[stem][:length]
        else:
            self._unique += 1
            prompt = random.Random(self._unique).choices(range(97), k=length)
        prompt = prompt + [(5 * i + extra) % 97 for i in range(extra)] or [1]
        self._add(
            Request(
                f"r{self._number}",
                prompt,
                new_tokens,
                eos_token_ids=(3, 5, 7, 11) if eos else (),
                priority=priority,
                **SALTS[salt % len(SALTS)],
            )
        )

    def revisit(self, k: int, new_tokens: int) -> None:
        """Somebody asks again what was asked before, or goes on from there."""
        if self.past:
            old = self.past[k % len(self.past)]
            names = ("cache_salt", "adapter", "extra_keys")
            options = {name: getattr(old, name) for name in names}
            self._add(Request(f"r{self._number}", old.prompt_token_ids, new_tokens, **options))

    def crowd(self, stem: int, more: int, new_tokens: int) -> None:
        """Short prompts with long answers: they fit together, until they have grown."""
        for i in range(2 + more):
            self.submit(stem, 2, i, new_tokens, priority=-(i % 2))

    def urgent(self, stem: int, length: int) -> None:
        """A long prompt that comes before all others: several may have to give way to it."""
        self.submit(stem, length, 0, 2, priority=-2)

    def _add(self, request: Request) -> None:
        self._number += 1
        try:
            self.scheduler.add(request)
        except RequestTooLarge as refused:
            assert refused.needs
            assert all(refused.needs[name] > refused.have[name] for name in refused.needs)
            self.counts.add("refused")
            return
        self.counts.add("requests")
        self.canary.add(request)
        self.requests[request.request_id] = request
        self._limits[request.request_id] = len(request.prompt_token_ids) + request.max_new_tokens
        self._check()

    def schedule(self) -> None:
        """Makes the next step and runs its forward."""
        if self.step is not None:
            return
        before, under_way, gave_way = self._reported(), self._progressing(), list[Preemption]()
        begun_s, good_s = self._now(), list[float]()
        with recorded(gave_way), recorded_waits(self.cache.copy_engine, good_s):
            self.step = self.scheduler.schedule()
        self.counts.add("steps")
        self.counts.add("steps with stores that wait", bool(self.cache.core.coordinator.connector.books.planned))
        self._check_preemptions(gave_way)
        took_s = self._now() - begun_s
        vain_s = took_s - sum(good_s)  # what moves takes as long as the link does
        assert vain_s <= 2 * self.config.deadline_s + 1e-6, f"the engine stood still for {vain_s} s"
        self.counts.add("steps that waited for a copy", took_s > 0)
        check_step(self.cache, self.step)
        if self._reported() == before:
            self._check_progress(self.step, under_way or self._progressing(), begun_s)
        self.ids = self.canary.forward(self.step) if self.step.num_tokens else np.empty(0, np.int64)
        self._check(step=True)

    def commit(self) -> None:
        """Ends the step."""
        if self.step is None:
            return
        step, self.step = self.step, None
        done = self.scheduler.commit(step, self.ids)
        for each in done:
            self._report(each)
        self._check(step=True)

    def cancel(self) -> None:
        """The forward fails after it has written everything; what it sampled is forgotten."""
        if self.step is None:
            return
        step, self.step = self.step, None
        self.canary.take_back(step)
        self.scheduler.cancel(step)
        self._restarts += 1
        self.counts.add("cancelled steps")
        self._check(step=True)

    def abort(self, k: int) -> None:
        """Somebody aborts a request that goes on."""
        if self.requests:
            name = list(self.requests)[k % len(self.requests)]
            if self.scheduler.abort(name):
                self.counts.add("aborts")
                self.asked[name] = "abort"
            self._check()

    def finish(self, k: int) -> None:
        """The engine ends a request: a stop string was seen."""
        if self.requests:
            name = list(self.requests)[k % len(self.requests)]
            if self.scheduler.finish(name):
                self.asked[name] = "stop"
            self._check()

    def fail(self, k: int) -> None:
        """The engine ends a request whose forward went wrong."""
        if self.requests:
            name = list(self.requests)[k % len(self.requests)]
            if self.scheduler.fail(name):
                self.counts.add("failed requests")
                self.asked[name] = "error"
                self._restarts += 1  # whoever loads what it shares with this one starts over
            self._check()

    def end_copy(self, k: int, fate: int = 0) -> None:
        """Any copy under way ends, well or badly."""
        tickets = self._under_way()
        if not tickets:
            return
        ticket, name = tickets[k % len(tickets)], FATES[fate % len(FATES)]
        if name == "corrupt" and (self.config.verify == "off" or not self._is_load(ticket)):
            name = "ok"  # nobody could see it, or not until it is loaded
        self.counts.add(f"copies: {name}")
        self._note(ticket, name)
        if self.device is not None:
            self.device.finish(ticket, name)
        elif name == "corrupt":
            self._held.end(ticket, flip=True)
        elif name == "ok":
            self._held.end(ticket)
        else:
            self._held.end(ticket, error=name, bad=[0] if name == "tear" else None)
        self._check()

    def rot(self, k: int) -> None:
        """A bit flips in a block of host memory that can be found: nobody knows until it is loaded."""
        host = self.cache.core.host
        if host is None or self.config.verify == "off":
            return
        ready = np.flatnonzero(host.arrays.mark == Mark.READY)
        if len(ready):
            entry, bases = int(ready[k % len(ready)]), host.column(Col.BASE)
            g = int(np.searchsorted(bases, entry, side="right")) - 1
            self._bytes.flip_host_bit(g, entry - int(bases[g]))
            self._has_rotted = True
            self.counts.add("host blocks damaged")

    def end_call(self, k: int, fate: int = 0) -> None:
        """Any call of the store under way ends, well or not."""
        if self.calls is None or not self.calls.calls:
            return
        name = CALL_FATES[fate % len(CALL_FATES)]
        what = self.calls.finish(k, name)
        self.counts.add(f"store calls: {what}")
        self.counts.add("store calls that may go wrong", name != "ok")
        self._check()

    def rot_store(self, k: int, how: int) -> None:
        """Something happens to an object in the store: nobody knows until it is read."""
        if self.calls is not None and self._shelf.rot(k, ROTS[how % len(ROTS)]):
            self.counts.add("stored objects damaged")

    def elsewhere(self, stem: int, length: int, salt: int = 0) -> None:
        """Another engine, with the same store and nothing else, is asked the same."""
        if self.calls is None:
            return
        prompt = STEMS[stem % len(STEMS)][: max(1, length)]
        request = Request("elsewhere", prompt, 2, **SALTS[salt % len(SALTS)])
        with least_bytes(self.config.objects or 1):
            served = another_engine_serves(self.cache.spec, request, self._shelf)
        self.counts.seen.update(served)

    def pass_time(self, seconds: float) -> None:
        """The clock goes on; what runs on a simulated device gets further."""
        if self.device is not None:
            self.device.advance(seconds)
        elif self.config.host:
            self._held.clock_s += seconds
        self._check()

    def reset(self) -> None:
        """The weights have changed: nothing cached is valid any more."""
        loading = {seq.request.request_id for seq in self.scheduler.running if seq.state is State.LOADING}
        self._metrics.listen()
        self.cache.reset()
        if self.calls is not None:
            self.calls.is_to_be_left_alone = True
        self._metrics.listen()
        self._restarts += 1
        self.bad_loads -= loading  # those start over
        self.counts.add("resets")
        self._check(step=True)

    def fill_host(self, n: int) -> None:
        """Prompts that nobody else has: enough of them to push everything out of the host tier, or a part of it."""
        tiers = self.cache.stats().host.values()
        blocks = max((-(-pool.usable // max(1, 9 // pool.block_tokens)) for pool in tiers), default=0)
        for _ in range(1 + blocks // (1 + n % 4)):
            self.submit(len(STEMS), 9, 0, 1)

    def reopen(self) -> None:
        """The cache is closed with everything under way, and a new one takes its place."""
        step, self.step = self.step, None
        self.cache.close()
        self.cache.close()
        for call in (self.scheduler.schedule, self.cache.reset, self.cache.audit):
            with pytest.raises(CacheClosed):
                call()
        assert step is None or step.num_tokens >= 0
        assert not self.scheduler.has_work()
        self._check_order()
        self.counts.add("reopened")
        self._open()

    def drain(self, fate: int = 0, late: bool = False) -> None:
        """Nothing new comes and every copy ends: every request is reported within a bound, and nothing is held.

        ``late``: the engine is idle until copies are overdue, and none that is ends before all requests have.
        """
        self.commit()
        bound, steps, idle_steps = self._bound(), 0, 0
        while self.scheduler.has_work():
            seen = f"no end after {steps} steps, and {idle_steps} in which copies ended"
            assert steps <= bound, f"{seen}: {self.scheduler.why_waiting()}"
            assert idle_steps <= 10 * bound, f"{seen}: {self.scheduler.why_waiting()}"
            ended = self._ended()
            self.schedule()
            idle = self.step is not None and self.step.num_tokens == 0
            self.commit()
            if idle and late:
                self.pass_time(self.config.deadline_s + 1.0)
            elif idle:
                self._end_all(fate)
                fate += fate > 0
                remote = self.cache.core.coordinator.door.remote
                if remote is not None and remote.num_disowned and self._ended() == ended:
                    self.pass_time(1.1)  # a delete that has failed is tried again
            waited = idle and self._ended() > ended
            idle_steps += waited
            steps += not waited
        self.counts.add("drained")
        assert self.requests == {}, "a request was never reported"
        self._metrics.settle()
        self._add_totals()
        for _ in range(20):  # late ends of what was given up, and the copies that they make room for
            self._end_all()
            self.schedule()
            self.commit()
            if not self.cache.stats().transfers.live and not (self.calls is not None and self.calls.calls):
                break
        stats = self.cache.stats()
        for pool in (*stats.device.values(), *stats.host.values()):
            assert pool.empty + pool.cached + pool.quarantined + pool.lent == pool.usable, pool
        assert sum(pool.quarantined for pool in stats.device.values()) == 0
        assert sum(pool.quarantined for pool in stats.host.values()) <= stats.transfers.corrupt_blocks
        assert stats.transfers.live == 0
        assert stats.transfers.corrupt_blocks >= self.corrupted, "a damaged load went unnoticed"
        assert self.cache.audit() == []
        assert self._shelf.wrong() == []

    def _ended(self) -> int:
        """Copies and calls of the store that ended, as far as the cache knows."""
        coordinator = self.cache.core.coordinator
        calls = 0 if self.calls is None else self.calls.num_told + coordinator.door.remote.counts.expired
        return coordinator.connector.ledger.num_settled + calls

    def _end_all(self, fate: int = 0) -> None:
        """All copies that are under way end, one after the other."""
        if self.config.lag_s:
            self.pass_time(self.config.lag_s)  # those that no stream has been given yet
        for _ in self._under_way():
            self.end_copy(0, fate)
            fate += fate > 0
        while self.calls is not None and self.calls.calls:
            self.end_call(0, fate)
            fate += fate > 0

    def _add_totals(self) -> None:
        """What the cache has counted since the last drain."""
        stats = self.cache.stats()
        now = Counter(
            {
                "blocks moved": self.cache.core.coordinator.compactor.num_moved,
                "host blocks evicted": sum(pool.evicted for pool in stats.host.values()),
                "copies given up": stats.transfers.expired,
            }
        )
        if stats.remote is not None:
            names = ("spilled_objects", "fetched_objects", "missed_objects", "damaged_objects", "expired", "late_looks")
            now.update({f"store: {name}": getattr(stats.remote, name) for name in names})
        self.counts.seen.update(now - self._totals)
        self._totals = now
