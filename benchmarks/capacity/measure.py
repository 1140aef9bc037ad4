"""What is measured: how full an arena gets, what is wasted while requests come and go, which content stays findable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.capacity.serving import Books
from kvtier import CacheSpec, FinishedRequest, FullAttention, GroupSpec, KVCache, Request, Scheduler
from kvtier.geometry import capacity

LENGTHS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 90_112, 131_072)
NEW_TOKENS = (500, 2_000)
"""Tokens that a request of a churn generates: enough of them run at once for the arena to be full."""
EVERY = 16
"""Steps from one look at what is held to the next."""


def fill(spec: CacheSpec, num_bytes: int, num_tokens: int, static: bool = False) -> float:
    """Share of the arena that holds reachable tokens when requests of about ``num_tokens`` tokens no longer fit.

    As many as are let in run their prompts, then generate until one of them has to give way.
    """
    most = 0
    with Books(spec, num_bytes, static) as books:
        each = sum(capacity.bytes_of(spec, capacity.running_blocks(spec, num_tokens)))
        for _ in range(num_bytes // each + 1):
            books.add(num_tokens, num_tokens)
        for step in books.steps():
            if books.scheduler.reports.num_preemptions or books.scheduler.reports.num_finished:
                break
            if len(step.prefills) == 0:
                most = max(most, books.held().reachable)
    return most / num_bytes


@dataclass(frozen=True)
class Churn:
    """A run in which requests come and go. Shares are of the arena, averaged over steps at which some wait for room."""

    requests: int
    steps: int
    reachable: float
    wasted: float
    """Blocks of requests that hold no reachable token, and bytes that no pool can use."""
    preemptions: int
    moved_blocks: int


def churn(spec: CacheSpec, num_bytes: int, shortest: int, longest: int, count: int, seed: int = 0) -> Churn:
    """``count`` requests of ``shortest`` to ``longest`` tokens that each generate some; a few always wait."""
    rng, steps, full, reachable, wasted = np.random.default_rng(seed), 0, 0, 0.0, 0.0
    with Books(spec, num_bytes) as books:
        added = 0
        while added < 8 and added < count:
            added += 1
            books.add(int(rng.integers(shortest, longest + 1)), int(rng.integers(*NEW_TOKENS)))
        for _ in books.steps():
            steps += 1
            if steps % EVERY == 0 and any("needs" in why for why in books.scheduler.why_waiting().values()):
                held = books.held()
                full += 1
                reachable += held.reachable / held.total
                wasted += (_unreachable(books) + held.padding) / held.total
            while added < count and books.scheduler.num_waiting < 4:
                added += 1
                books.add(int(rng.integers(shortest, longest + 1)), int(rng.integers(*NEW_TOKENS)))
        reports, moved = books.scheduler.reports, books.cache.core.coordinator.compactor.num_moved
        return Churn(
            reports.num_finished, steps, reachable / max(1, full), wasted / max(1, full), reports.num_preemptions, moved
        )


def _unreachable(books: Books) -> int:
    """Bytes of blocks that running requests hold and in which no query of this step, nor the next, sees a token."""
    t = books.cache.core.coordinator.tables.arrays
    rows, total = np.flatnonzero(t.phase > 0), 0
    for g, group in enumerate(books.spec.groups):
        for row in rows:
            first = group.attention.first_visible(int(t.computed[row])) // group.block_tokens
            total += max(0, min(first, int(t.hi[g, row])) - int(t.lo[g, row])) * group.block_bytes
    return total


# --- what stays findable --------------------------------------------------------------------------


@dataclass(frozen=True)
class Talk:
    """Conversations: a turn is sent with all before it, adds ``turn_tokens`` and is answered by ``answer_tokens``."""

    conversations: int = 40
    turns: int = 6
    turn_tokens: int = 1_500
    answer_tokens: int = 1
    shared_tokens: int = 0
    """With which all of them begin: a system prompt."""
    probe_every: int = 0
    """After so many requests somebody sends the same 64 tokens; 0: nobody does."""
    shuffled: bool = False
    """In every round they come in another order, not in a circle."""


TALKS = {
    "in a circle": Talk(),
    "in any order": Talk(shuffled=True),
    "one system prompt": Talk(shared_tokens=1_008),
    "a probe every third": Talk(probe_every=3),
    "12 conversations": Talk(conversations=12, turns=4),
    "answers of 500": Talk(turns=4, turn_tokens=1_000, answer_tokens=500),
}


def hit_rate(
    spec: CacheSpec, occupancy: float, talk: Talk = TALKS["in a circle"], in_host: bool = False, store: str = "eager"
) -> float:
    """Share of the tokens of earlier turns that are found again.

    ``occupancy``: the most that what a next turn needs of all of them takes at any time, as a share of the arena; of
    the host's if ``in_host``, beside a device that holds three conversations.
    """
    per_turn = talk.turn_tokens + talk.answer_tokens
    each = max(
        sum(capacity.bytes_of(spec, capacity.stored_blocks(spec, n * per_turn))) for n in range(1, talk.turns + 1)
    )
    num_bytes = int(talk.conversations * each / occupancy)
    device, host = (3 * each, num_bytes) if in_host else (num_bytes, 0)
    rng, found, known, count = np.random.default_rng(1), 0, 0, 0
    shared, probe = (rng.integers(1, 100_000, n).astype(np.int32) for n in (talk.shared_tokens, 64))
    texts = [shared] * talk.conversations
    with KVCache(
        spec, device="meta", key_secret=b"capacity", device_bytes=device, host_bytes=host, store=store
    ) as cache:
        scheduler = Scheduler(cache, 2048, 64)
        for turn in range(talk.turns):
            for k in rng.permutation(talk.conversations) if talk.shuffled else range(talk.conversations):
                added = talk.turn_tokens - (0 if turn else talk.shared_tokens)
                prompt = np.concatenate([texts[k], rng.integers(1, 100_000, added).astype(np.int32)])
                done = _served(scheduler, Request(f"{turn} {k}", prompt, talk.answer_tokens))
                if turn:
                    found += sum(done.cached_tokens.values())
                    known += len(texts[k])
                texts[k] = np.concatenate([prompt, np.array(done.token_ids, np.int32)])
                count += 1
                if talk.probe_every and count % talk.probe_every == 0:
                    _served(scheduler, Request(f"probe {count}", probe, 1))
    return found / known


def _served(scheduler: Scheduler, request: Request) -> FinishedRequest:
    """What becomes of a request that is answered with zeros."""
    scheduler.add(request)
    while True:
        step = scheduler.schedule()
        for done in scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64)):
            return done


def full_only(spec: CacheSpec) -> CacheSpec:
    """The same layers, all with full attention."""
    return CacheSpec(
        [
            GroupSpec(g.name, FullAttention(), g.num_layers, g.num_kv_heads, g.head_dim, g.dtype, g.block_tokens)
            for g in spec.groups
        ]
    )
