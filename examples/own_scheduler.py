"""An engine with a scheduler of its own over kvtier's pools: ``python examples/own_scheduler.py``.

First come, first served; the youngest gives way. The "model" is kvtier's canary: its text is right only if every slot
that it reads is, which ``expected_tokens`` knows without any cache.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvtier import CacheManager, FullAttention, KVCache, Request, Shortage, SlidingWindow
from kvtier.testing import CanaryEngine, canary_spec, expected_tokens

CHUNK = 32  # tokens of a prompt that a step computes


class Engine:
    """Serves requests; ``waiting`` hold nothing, ``running`` hold blocks, oldest first."""

    def __init__(self, cache: KVCache) -> None:
        self.manager = CacheManager(cache, max_batched_tokens=256, max_running=8)
        self.model = CanaryEngine(cache)
        self.waiting, self.running, self.done = deque(), [], {}
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.model.add(request)
        self.waiting.append(self.manager.open(request))

    def run(self) -> None:
        """Steps until all are done."""
        while self.waiting or self.running:
            self.settle()
            self.admit()
            step = self.plan()
            if step is None or step.num_tokens == 0:
                self.manager.wait(1.0)
            if step is not None:
                for report in self.manager.commit(step, self.model.forward(step)):
                    self.done[report.request_id] = report
                    self.model.forget(report.request_id)
                self.running = [sequence for sequence in self.running if not sequence.is_finished]

    def settle(self) -> None:
        """Loads that have ended: those that failed begin again, without the host tier."""
        for sequence in self.manager.poll():
            if sequence.is_idle:
                self.running.remove(sequence)
                self.waiting.appendleft(sequence)

    def admit(self) -> None:
        """Starts those that wait, as long as there is room for what they take to begin with."""
        while self.waiting:
            short = self.manager.start(self.waiting[0])
            if short is not None:
                return
            self.running.append(self.waiting.popleft())

    def plan(self):
        """A chunk for each that runs; where blocks are short, the youngest gives all of its own up."""
        while True:
            able = [s for s in self.running if s.is_running]
            budget, wants = 256, []
            for sequence in able:
                n = min(CHUNK, budget, sequence.num_tokens - sequence.num_computed)
                wants += [(sequence, n)] if n else []
                budget -= n
            step = self.manager.plan(wants)
            if not isinstance(step, Shortage):
                return step
            if not step.groups:  # copies hold the blocks
                return None
            victim = able[-1]
            if len(able) == 1:
                raise SystemExit(f"{victim.request.request_id} alone needs more blocks than there are: {step}")
            report = self.manager.stop(victim)
            self.preemptions += 1
            self.running.remove(victim)
            if report is None:
                self.waiting.appendleft(victim)
            else:  # its text has outgrown the pools
                self.done[report.request_id] = report


def main() -> None:
    spec = canary_spec({"full": (FullAttention(), 4), "sliding": (SlidingWindow(24), 4)})
    cache = KVCache(spec, device_blocks={"full": 60, "sliding": 60}, host_blocks={"full": 200, "sliding": 200})
    engine, rng = Engine(cache), np.random.default_rng(0)
    shared = rng.integers(0, 90, 50).tolist()
    for round_ in range(3):
        requests = [
            Request(f"{round_}.{k}", [*shared, *rng.integers(0, 90, 10 * k).tolist()], max_new_tokens=20)
            for k in range(6)
        ]
        for request in requests:
            engine.add(request)
        engine.run()
        for request in requests:
            text = engine.done[request.request_id].token_ids
            assert text == expected_tokens(spec, request.tokens.tolist(), 20), request.request_id
        cached = [sum(engine.done[r.request_id].cached_tokens.values()) for r in requests]
        print(f"round {round_}: six texts are right; tokens found in the cache: {cached}")
    assert cache.audit() == []
    print(f"{engine.preemptions} preemptions, {cache.stats().transfers.loaded_blocks} blocks loaded from the host")
    cache.close()


if __name__ == "__main__":
    main()
