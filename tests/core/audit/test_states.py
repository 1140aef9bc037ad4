"""Planted damage to states: each shows that a check of theirs can fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from core.folding import Engine, spec_of
from kvtier import KVCache, Request, Scheduler, Step
from kvtier.audit.pools import Violation
from kvtier.pools.block_pool import Col, Mark

G = 1
"""The group of states."""
Damage = Callable[[KVCache, Step], None]


def found(damage: Damage, computed: int = 20) -> list[Violation]:
    """What the audit says of a damaged step, whose one row has ``computed`` tokens and computes 28 more."""
    spec, prompt = spec_of(8), np.random.default_rng(0).integers(1, 90, 48).tolist()
    with KVCache(spec, device_blocks={"full": 20, "state": 20}) as cache:
        cache.checks.level = 0  # type: ignore[assignment]
        scheduler = Scheduler(cache, max_batched_tokens=64, max_running=2)
        engine = Engine(cache, scheduler)
        scheduler.add(Request("a", prompt[:computed], 40))
        step = scheduler.schedule()
        scheduler.commit(step, engine.forward(step))
        scheduler.add(Request("b", prompt, 4, cache_salt="other"))
        step = scheduler.schedule()
        _ = step.group("state").states(), step.group("full").slot_mapping
        assert cache.audit() == []
        damage(cache, step)
        seen = cache.audit()
        assert seen, "the audit sees nothing"
        return seen


def tables(cache: KVCache) -> np.ndarray:
    return cache.core.coordinator.tables.table(G)


def block(cache: KVCache, b: int) -> np.record:
    pools = cache.core.coordinator.pools.arrays
    return pools.blocks[int(pools.meta[G, Col.BASE]) + b : int(pools.meta[G, Col.BASE]) + b + 1]


def other_source(cache: KVCache, step: Step) -> None:
    step.group("state").states().source[0] = 9


def lost_segment(cache: KVCache, step: Step) -> None:
    step.group("state").states().end[-2] -= 1


def shared_target(cache: KVCache, step: Step) -> None:
    block(cache, int(step.group("state").states().target[-1]))["refs"] += 1


def findable_target(cache: KVCache, step: Step) -> None:
    block(cache, int(step.group("state").states().target[-1]))["mark"] = int(Mark.READY)


def fenced_target(cache: KVCache, step: Step) -> None:
    block(cache, int(step.group("state").states().target[-1]))["fence"] = 77


def null_target(cache: KVCache, step: Step) -> None:
    step.group("state").states().target[-1] = 0


def two_to_one(cache: KVCache, step: Step) -> None:
    step.group("state").states().target[-1] = step.group("state").states().target[-2]


def gap_at_the_source(cache: KVCache, step: Step) -> None:
    tables(cache)[int(step.rows[0]), 2] = 0


def gap_at_the_end(cache: KVCache, step: Step) -> None:
    row = int(step.rows[1])
    tables(cache)[row, int(cache.core.coordinator.tables.arrays.hi[G, row]) - 1] = 0


def block_in_two_places(cache: KVCache, step: Step) -> None:
    row = int(step.rows[1])
    tables(cache)[row, 2] = tables(cache)[row, 0]


EXPECTED: dict[Damage, str] = {
    other_source: "S1 state of the step: entry 0 goes on from another state than the one after 20 tokens",
    lost_segment: "S2 state of the step: entry 1 does not leave a state in each of its blocks",
    shared_target: "S3 state of the step: a state goes to a block that is shared or findable",
    findable_target: "S3 state of the step: a state goes to a block that is shared or findable",
    fenced_target: "S3 state of the step: a state goes to a block that a store still reads",
    null_target: "S3 state of the step: a state goes to the null block, or two go to one",
    two_to_one: "S3 state of the step: a state goes to the null block, or two go to one",
    gap_at_the_source: "S5 state row 0: no state where block 2 should be, after 20 tokens",
    gap_at_the_end: "S5 state row 1: no state where block 5 should be, after 0 tokens",
    block_in_two_places: "I16 state row 1: a block holds two places of one request",
}


@pytest.mark.usefixtures("damaged", "unaudited")
@pytest.mark.parametrize("damage", EXPECTED, ids=lambda damage: damage.__name__)
def test_damage_is_seen_and_named(damage: Damage) -> None:
    assert EXPECTED[damage] in [str(violation) for violation in found(damage)]


@pytest.mark.usefixtures("damaged", "unaudited")
def test_a_gap_between_states_is_no_damage() -> None:
    def look(cache: KVCache, step: Step) -> None:
        assert (tables(cache)[int(step.rows[1]), :6] == 0).tolist() == [False, True, True, True, False, False]
        step.group("state").states().source[0] = 9  # so that there is something to see

    found(look)
