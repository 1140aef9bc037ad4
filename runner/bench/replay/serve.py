"""Requests through a scheduler and pools of a given memory.

Promises   the same requests and memory find the same, on any machine.
Does not   wait: a request begins when there is room for it, whenever it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier import CacheSpec, FinishedRequest, KVCache, Request, RequestTooLarge, Scheduler
from runner.bench.replay.asked import Asked
from runner.bench.replay.order import Order


@dataclass
class Found:
    """Prompt tokens, and those of them that were found, by tier."""

    prompt_tokens: int = 0
    tiers: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})
    computed_tokens: int = 0
    """Tokens of prompts and of answers, by all steps. What a preempted request computes again counts again."""
    preemptions: int = 0
    too_large: int = 0
    """Requests that can never fit this memory; nothing of them is found."""
    failed: int = 0
    """Requests that ended before their answer did, since the memory was too small; nothing of them is found."""
    hits: dict[int, int] = field(default_factory=dict)
    """Tokens that were found of each other request, by its number."""

    @property
    def rate(self) -> float:
        """The share that all tiers found."""
        return sum(self.tiers.values()) / self.prompt_tokens if self.prompt_tokens else 0.0

    def count(self, done: FinishedRequest) -> None:
        """A request has ended."""
        self.preemptions += done.preemptions
        if done.finish_reason != "length":
            self.failed += 1
            return
        for tier, count in done.cached_tokens.items():
            self.tiers[tier] += count
        self.hits[int(done.request_id)] = sum(done.cached_tokens.values())


def serve(
    asked: Sequence[Asked],
    spec: CacheSpec,
    device_bytes: int,
    host_bytes: int = 0,
    at_once: int = 1,
    step_tokens: int = 2048,
    queued: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> Found:
    """``at_once``: requests that run at a time; of a session, one. ``queued``: others that wait in the engine
    meanwhile. ``progress`` is called when a request has ended.

    Raises ``MemoryUnavailable`` for a memory without room for one block of each group.
    """
    order, said, found = Order(asked, at_once + queued), dict[str, list[int]](), Found()
    with KVCache(spec, device="meta", device_bytes=device_bytes, host_bytes=host_bytes, key_secret=b"replay") as cache:
        scheduler = Scheduler(cache, max_batched_tokens=step_tokens, max_running=at_once)
        while order:
            for k in order.begin():
                request = asked[k]
                prompt, answer = request.prompt, request.answer
                found.prompt_tokens += len(prompt)
                try:
                    scheduler.add(Request(str(k), prompt, len(answer)))
                    said[str(k)] = answer.tolist()[::-1]
                except RequestTooLarge:
                    found.too_large += 1
                    order.end(k)
                    progress()
            step = scheduler.schedule()
            found.computed_tokens += step.num_tokens
            ids = np.array([said[step.request_ids[row]].pop() for row in step.sample_rows], np.int64)
            for done in scheduler.commit(step, ids):
                found.count(done)
                del said[done.request_id]
                order.end(int(done.request_id))
                progress()
            if not step.num_tokens and order:
                scheduler.wait(0.5)
    return found
