"""What the remote allows: ``seek``, which asks it, and ``RemoteRule``, which has heard of it, give one answer."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from breadth import sized
from hypothesis import given, strategies as st

from kvtier import CacheSpec, ChunkedLocal, EventKind, FullAttention, GroupSpec, KVEvent, SlidingWindow
from kvtier.cache.kv_events.claims import Claims
from kvtier.cache.kv_events.stored import RemoteRule
from kvtier.cache.kv_events.texts import Run
from kvtier.coordinator.seek import Seeker
from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.moves import SeekState
from kvtier.remote.objects import Name, ObjectPlan

BT, BLOCKS = 4, 29
KEYS = np.random.default_rng(0).integers(1, 2**63, (BLOCKS, 2), np.uint64)
KINDS = [FullAttention(), SlidingWindow(5), SlidingWindow(8), SlidingWindow(14), ChunkedLocal(8), ChunkedLocal(16)]
LEAST = [1, 300, 1000, 2500, 100_000]


@st.composite
def plans(draw: st.DrawFn) -> ObjectPlan:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    heads = [draw(st.sampled_from([1, 4])) for _ in kinds]
    groups = [
        GroupSpec(f"g{k}", kind, 1, n, 8, dtype="float16", block_tokens=BT)
        for k, (kind, n) in enumerate(zip(kinds, heads, strict=True))
    ]
    return ObjectPlan(CacheSpec(groups), least_bytes=draw(st.sampled_from(LEAST)))


def told(plan: ObjectPlan, stored: set[Name]) -> set[int]:
    """The boundaries that ``RemoteRule`` allows; nothing is here."""
    rule = RemoteRule(plan)
    run = Run(KEYS[:, 0].tolist(), np.zeros((BLOCKS, BT), np.int32), None, 0, 0, rule.num_big_local)
    run.complete[:] = not plan.has_full
    bits = dict.fromkeys(run.keys, 0)
    for key, bit in map(rule.place, stored):
        bits[key] |= bit
    run.stored[:] = list(bits.values())
    rule.go_down(run, lambda run, g: np.zeros(len(run), bool))
    return {BT * (k + 1) for k in np.flatnonzero(run.by_remote).tolist()}


class Asked:
    """A remote that answers as often as it is asked."""

    is_on, patience, answer_s, breaker = True, 1.0, 0.0, SimpleNamespace(allows=lambda now: True)

    def __init__(self, plan: ObjectPlan, stored: set[Name]) -> None:
        self.plan, self._stored, self.questions = plan, stored, list[Any]()

    def now(self) -> float:
        return 0.0

    def ask(self, names: list[Name], answered: Any) -> int:
        self.questions.append((names, answered))
        return 1

    def answer(self) -> None:
        names, answered = self.questions.pop()
        answered(Answer(1, [Outcome.OK if name in self._stored else Outcome.MISS for name in names]))

    def end_look(self, seek: Any, state: SeekState) -> None:
        seek.state = state

    def learn(self, *_: Any, **__: Any) -> None: ...

    believe = forget = learn


def found(plan: ObjectPlan, stored: set[Name]) -> int:
    """The hit that ``Seeker`` would fetch; nothing is here."""
    remote: Any = Asked(plan, stored)
    nothing = SimpleNamespace(num_tokens=0, full_tokens=0, pending=False)
    asker: Any = SimpleNamespace(keys=KEYS, tokens=range(BLOCKS * BT + 1), seek=None)
    Seeker[Any](remote, SimpleNamespace(), lambda _: nothing).is_waiting(asker)  # type: ignore[arg-type]
    while remote.questions:
        remote.answer()
    return asker.seek.end if asker.seek.state is SeekState.FOUND else 0


@given(plans(), st.sets(st.integers(1, BLOCKS), max_size=4))
def test_seek_and_the_rule_allow_the_same_hits(plan: ObjectPlan, ends: set[int]) -> None:
    hits = {n: set(plan.of_hit(KEYS, n).names) for n in range(BT, BT * BLOCKS + 1, BT)}
    stored = {name for k in ends for name in hits[BT * k]}
    allowed = {n for n, names in hits.items() if names <= stored}
    assert told(plan, stored) == allowed
    seen = {n for n in hits if set(plan.signs_of_end(KEYS, n)) <= stored} | {0}
    if seen - {0} <= allowed or not plan.big_local:
        assert found(plan, stored) == max(allowed, default=0)
    assert found(plan, stored) >= max(allowed, default=0)


@given(plans(), st.integers(1, BLOCKS))
def test_signs_of_a_hit_are_of_its_objects(plan: ObjectPlan, k: int) -> None:
    names = plan.of_hit(KEYS, BT * k).names
    assert set(plan.signs_of_end(KEYS, BT * k)) <= set(names)
    assert plan.needs_end(BT * k) == any(kind == "e" for kind, _ in names)


def allowed_with(spec: CacheSpec, plan: ObjectPlan, stored: set[Name], here: set[tuple[int, int]]) -> set[int]:
    """Boundaries whose questions find all, and whose fetches find all that is not ``here``: (group, block)."""
    full = [g for g, group in enumerate(spec.groups) if isinstance(group.attention, FullAttention)]
    missing = (i for i in range(BLOCKS) if any((g, i) not in here for g in full))
    prefix, places = BT * next(missing, BLOCKS), {key.tobytes(): i for i, key in enumerate(KEYS)}
    found = set()
    for n in range(BT, BT * BLOCKS + 1, BT):
        tiles = range(prefix // plan.stride + 1, plan.tiles_of(n) // plan.stride + 1)
        asked = {*plan.signs_of_end(KEYS, n), *(name for i in tiles for name in plan.names_at(KEYS, i * plan.stride))}
        of = plan.of_hit(KEYS, n)
        blocks = zip(of.of.tolist(), of.groups.tolist(), of.keys, strict=True)
        read = {of.names[k] for k, g, key in blocks if (g, places[key.tobytes()]) not in here}
        if asked | read <= stored:
            found.add(n)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_claims_follow_what_the_remote_has_or_loses_of_blocks_that_are_here_or_are_not(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(sized(25, 250)):
        heads = {f"g{k}": (rnd.choice(KINDS), rnd.choice([1, 4])) for k in range(rnd.randrange(1, 5))}
        spec = CacheSpec([GroupSpec(k, of, 1, n, 8, dtype="float16", block_tokens=BT) for k, (of, n) in heads.items()])
        plan = ObjectPlan(spec, rnd.choice(LEAST))
        claims = Claims(spec, 1000, plan)
        for end in [*sorted(rnd.sample(range(1, BLOCKS), rnd.randrange(9))), BLOCKS]:  # a run for each, after the last
            claims.add_text(KEYS[:end, 0], np.zeros(end * BT, np.int32))
        names = plan.all_names(KEYS)
        stored = {name for name in names if rnd.random() > 0.02}
        claims.note_remote(dict.fromkeys(stored, True), True)
        share = rnd.choice([0.05, 0.95])
        here = {(g, i) for g in range(len(heads)) for i in range(BLOCKS) if rnd.random() < share}
        for g, i in here:
            claims.note([KVEvent(EventKind.STORED, "host", spec.names[g], KEYS[i : i + 1])])
        local = [name for name in names if name[0] in {f"b{g}" for g, _ in plan.big_local}]
        for changed in (set[Name](), *({*rnd.choices(local or names, k=rnd.randrange(5))} for _ in range(5))):
            stored ^= changed
            claims.note_remote({name: name in stored for name in changed}, True)
            claims.take()
            told = np.concatenate([run.by_remote for run in claims.texts.runs])
            assert {BT * (k + 1) for k in np.flatnonzero(told).tolist()} == allowed_with(spec, plan, stored, here)
