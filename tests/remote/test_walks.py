"""Random requests on caches that share a remote which fails, lies and comes late: every text right, nothing held."""

from __future__ import annotations

import random

import inside
import pytest
from breadth import sized
from core.driving import LOAD, STORE, Serving, check_text, prompt

from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from remote.fake_backend import FakeBackend, Shared

SHAPES = [
    {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)},
    {"full": (FullAttention(), 4)},
    {"win": (SlidingWindow(9), 4)},
    {"full": (FullAttention(), 8), "win": (SlidingWindow(5), 4)},
    {"full": (FullAttention(), 4), "more": (FullAttention(), 8), "chunk": (ChunkedLocal(8), 8)},
]
FAULTS = [{}, {"fail": 0.2, "miss": 0.1}, {"damage": 0.3, "tear": 0.2, "swap": 0.2}, {"refuse": 0.5, "fail": 0.1}]


class Walk:
    """Two servings, one after the other or side by side, over one remote."""

    def __init__(self, make_serving, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        groups, self.shared = pick(SHAPES), Shared()
        self.servings: list[Serving] = []
        for k in range(2):
            store = FakeBackend(self.shared, hold=self.random.random() < 0.7, seed=seed + k, **pick(FAULTS))
            serving = make_serving(
                groups,
                pick([24, 40]),
                pick([20, 60]),
                hold=pick([(), (LOAD,), (STORE,)]),
                store=pick(["eager", "eager", "eager", "off"]),
                remote_uri=store,
                model_id="m",
                key_secret=b"s",
                deadline_s=5.0,
                scheduler={"max_batched_tokens": pick([16, 48]), "max_running": 3},
                journal_events=100,
            )
            serving.store = store
            if self.random.random() < 0.3:
                inside.spill_at_eviction(serving.cache)
            self.servings.append(serving)
        self.count = 0
        self.doomed: dict[str, Serving] = {}  # requests that write garbage, and will fail
        self.wrong: list[tuple[Serving, str]] = []  # those that have failed

    def step(self, serving: Serving) -> None:
        """A step in which doomed requests write garbage; nobody reads it before they fail."""
        if not any(of is serving for of in self.doomed.values()):
            serving.step()
            return
        step, ids = serving.begin()
        for g, group in enumerate(serving.spec.groups):
            slots, bt = step.group(group.name).slot_mapping if step.num_tokens else [], group.block_tokens
            for r, name in enumerate(step.request_ids):
                mine = slots[int(step.query_start[r]) : int(step.query_start[r + 1])] if name in self.doomed else []
                for layer in range(group.num_layers):
                    for part in serving.cache.kv(group.name, layer):
                        for slot in mine:
                            part[int(slot) // bt, int(slot) % bt] = 7.0 + g
        for done in serving.scheduler.commit(step, ids):
            serving.finished[done.request_id] = done
            if done.request_id not in self.doomed:
                check_text(serving.cache, serving.requests[done.request_id], done)

    def doom(self, serving: Serving) -> None:
        """A request with a prompt of its own, or the end of one."""
        mine = [name for name, of in self.doomed.items() if of is serving and name not in serving.finished]
        if mine:
            name = self.random.choice(mine)
            if serving.known(name) and serving.scheduler.fail(name):
                self.wrong.append((serving, name))
        elif len(serving.scheduler.request_ids) < 6:
            self.count += 1
            self.doomed[f"bad{self.count}"] = serving
            serving.add(f"bad{self.count}", prompt(50 + self.count, self.random.randrange(20, 60)), 40)

    def a_prompt(self, serving: Serving) -> list[int]:
        """Other engines may read what is wrong until it is deleted; the engine itself does not."""
        sure = [
            list(of.requests[name].prompt_token_ids)
            for of, name in self.wrong
            if of is serving or (name in of.finished and not of.cache.core.coordinator.door.remote.num_disowned)
        ]
        if sure and self.random.random() < 0.3:
            return self.random.choice(sure)
        base = self.random.randrange(3)
        length = self.random.randrange(2, 50)
        ids = prompt(base, 60)[:length]
        if self.random.random() < 0.5:
            cut = self.random.randrange(1, length + 1)
            ids = [*ids[:cut], *prompt(self.random.randrange(3, 9), 12)[: self.random.randrange(0, 8)]]
        return ids

    def turn(self, serving: Serving) -> None:
        roll = self.random.random()
        if roll < 0.35 and len(serving.scheduler.request_ids) < 6:
            self.count += 1
            serving.add(f"r{self.count}", self.a_prompt(serving), self.random.randrange(1, 12))
        elif roll < 0.45:
            serving.store.end(self.random.choice(["look", "get", "put"]))
        elif roll < 0.5 and serving.engine.live:
            serving.engine.end(self.random.choice(list(serving.engine.live)))
        elif roll < 0.53:
            serving.engine.clock_s += self.random.choice([0.01, 0.05, 6.0])
        elif roll < 0.55 and serving.scheduler.request_ids:
            serving.scheduler.abort(self.random.choice(serving.scheduler.request_ids))
        elif roll < 0.6:
            self.doom(serving)
        elif roll < 0.602:
            serving.cache.reset_prefix_cache()
            serving.store.is_to_be_left_alone = True
        else:
            self.step(serving)

    def drain(self, serving: Serving) -> None:
        for _ in range(3000):
            serving.store.end()
            serving.engine.end()
            serving.engine.clock_s += 0.01
            for name in [name for name, of in self.doomed.items() if of is serving and name not in serving.finished]:
                serving.scheduler.fail(name)
            if not serving.scheduler.has_work() and not serving.cache.core.coordinator.door.remote.moves():
                break
            self.step(serving)
        serving.store.hold = False
        serving.engine.release()
        serving.run()


@pytest.mark.parametrize("seed", range(sized(8, 200)))
def test_random_requests_over_a_shared_store(make_serving, monkeypatch, seed):
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", random.Random(seed).choice([1, 300, 1000]))
    walk = Walk(make_serving, seed)
    for _ in range(sized(100, 400)):
        walk.turn(walk.random.choice(walk.servings))
    for serving in walk.servings:
        walk.drain(serving)
        for request_id in serving.requests:
            assert request_id in serving.finished
