"""Random requests, pools, copies and faults; every step audited, every text compared, everything ends.

``KVTIER_FUZZ_SEEDS=a:b`` runs other seeds than those of the suite.
"""

from __future__ import annotations

import math
import os
import random

import inside
import numpy as np
import pytest
from breadth import sample

from core.driving import Serving
from kvtier import ChunkedLocal, FullAttention, KVCache, RequestTooLarge, SlidingWindow
from kvtier.coordinator.tracked import State
from kvtier.testing import Faults, SimulatedEngine, canary_spec
from kvtier.testing.oracle import STATE

ASKED = os.environ.get("KVTIER_FUZZ_SEEDS")
SEEDS = range(*map(int, (ASKED or "0:36").split(":")))


def build(rnd: random.Random, seed: int) -> Serving:
    """A cache and scheduler of random shape; nearly every bug needs fewer than 15 blocks and 4 requests."""
    kinds = {
        "full": (FullAttention(), rnd.choice([1, 2, 4])),
        "win": (SlidingWindow(rnd.choice([1, 3, 5, 8])), rnd.choice([1, 2, 4])),
        "chunk": (ChunkedLocal(8), rnd.choice([2, 4, 8])),
        "full 2": (FullAttention(), rnd.choice([2, 4])),
        "entries": (FullAttention(), rnd.choice([4, 8]), {"entry_tokens": rnd.choice([2, 4]), "head_dim_v": 0}),
    }
    if rnd.random() < 0.15:  # blocks that do not divide each other: links of 1 token, hits of 6
        kinds = {
            "full": (FullAttention(), 3),
            "win": (SlidingWindow(rnd.choice([2, 5, 7])), 2),
            "chunk": (ChunkedLocal(rnd.choice([6, 12])), rnd.choice([2, 3, 6])),
            "full 2": (FullAttention(), 6),
            "entries": (FullAttention(), 6, {"entry_tokens": 3, "head_dim_v": 0}),
        }
    more = [["full"], ["win"], ["chunk", "win"], list(kinds), ["win", "entries", "chunk"]]
    names = rnd.choice([["full", "win", "chunk"]] * 5 + more)
    groups = {name: kinds[name] for name in names}
    if rnd.random() < 0.25:
        groups["state"] = STATE, math.lcm(*(group[1] for group in groups.values()))
    room = dict.fromkeys(kinds, (24, 60)) | {"win": (12, 30), "chunk": (12, 30), "state": (16, 60)}
    device = {n: max(2, rnd.randint(*room[n]) // group[1]) for n, group in groups.items()}
    host = {n: rnd.randint(1, 30) for n in groups} if rnd.random() < 0.8 else None
    faults = Faults(
        fail=rnd.choice([0, 0, 0.1]),
        tear=rnd.choice([0, 0, 0.1]),
        corrupt=rnd.choice([0, 0, 0.2]),
        lose=rnd.choice([0, 0, 0.1]),
        max_delay_s=rnd.choice([0, 2, 6, 25]),
    )
    engine = (lambda memory: SimulatedEngine(memory, seed, faults)) if rnd.random() < 0.85 else None
    cache = KVCache(
        canary_spec(groups, num_layers=1),
        device_blocks=device,
        host_blocks=host,
        store=rnd.choice(["eager", "lazy"]),
        verify="full",
        deadline_s=rnd.choice([5.0, 30.0]),
        copy_engine=engine,
        key_secret=b"fuzz",
    )
    return Serving(cache, rnd.choice([1, 3, 8, 64]), rnd.choice([1, 2, 4, 8]))


def random_request(rnd: random.Random, serving: Serving, stems: list[list[int]], n: int) -> None:
    tokens = rnd.choice(stems)[: rnd.randint(1, 24)] + [rnd.randrange(97) for _ in range(rnd.choice([0, 0, 1, 3]))]
    options = {
        "eos_token_ids": rnd.choice([(), (5, 6)]),
        "priority": rnd.choice([0, 0, 0, 1, -1]),
        "cache_salt": rnd.choice([None, None, None, "s"]),
    }
    try:
        serving.add(f"r{n}", tokens, rnd.randint(1, 10), **options)
    except RequestTooLarge as refused:
        assert all(refused.needs[name] > refused.have[name] for name in refused.needs)


def disturb(rnd: random.Random, serving: Serving) -> None:
    """Somebody aborts or finishes a request, resets the cache, or a lost copy ends."""
    names = list(serving.requests)
    if names and rnd.random() < 0.05:
        (serving.scheduler.abort if rnd.random() < 0.6 else serving.scheduler.finish)(rnd.choice(names))
    if rnd.random() < 0.02:
        serving.cache.reset()
    if rnd.random() < 0.05 and isinstance(serving.engine, SimulatedEngine):
        serving.engine.end_lost()


def one_step(rnd: random.Random, serving: Serving) -> None:
    """Schedules, disturbs in between, and commits or cancels; checks what must hold of any step."""
    if rnd.random() < 0.05:
        serving.cancelled()
        return
    reported = serving.scheduler.reports.num_finished
    step, ids = serving.begin()
    scheduler = serving.scheduler
    open_requests = scheduler.num_running + scheduler.num_waiting
    if step.num_tokens == 0 and open_requests and scheduler.reports.num_finished == reported:
        assert serving.cache.stats().transfers.live, f"nothing is under way: {scheduler.why_waiting()}"
    able = [s.request.request_id for s in scheduler.running if s.state is State.RUNNING]
    if able and able[0] == scheduler.running[0].request.request_id:
        copies = (
            any(s.state is State.LOADING for s in scheduler.running)
            or inside.connector(serving.cache).ledger.num_progressing
        )
        assert step.num_tokens or copies, "the first in service order can run, and nothing does"
    disturb(rnd, serving)
    serving.end(step, ids)


@pytest.mark.parametrize("seed", sample(SEEDS, SEEDS if ASKED else SEEDS[::4]))
def test_whatever_happens_texts_are_right_and_everything_ends(seed):
    rnd = random.Random(seed)
    serving = build(rnd, seed)
    stems = [[rnd.randrange(97) for _ in range(40)] for _ in range(3)]
    with serving.cache:
        for n in range(110):
            if rnd.random() < 0.35 and len(serving.requests) - len(serving.finished) < 6:
                random_request(rnd, serving, stems, n)
            disturb(rnd, serving)
            one_step(rnd, serving)
        for n in range(3000):
            if not serving.scheduler.has_work():
                break
            if n % 40 == 0 and isinstance(serving.engine, SimulatedEngine):
                serving.engine.end_lost()
            if not serving.step().num_tokens:
                serving.scheduler.wait(0.02)
        assert not serving.scheduler.has_work(), serving.scheduler.why_waiting()
        serving.run()
        assert set(serving.finished) == set(serving.requests)
        allowed = {"stop", "length", "abort", "capacity"}
        assert {done.finish_reason for done in serving.finished.values()} <= allowed
        stats = serving.cache.stats()
        admitted = sum(stats.prompt_tokens.values())
        assert admitted <= sum(len(r.prompt_token_ids) for r in serving.requests.values())
        assert np.all(np.array([p.usable - p.empty - p.cached for p in stats.device.values()]) == 0)
