"""The audit as a whole: it changes nothing, reports everything, and does as much as it is asked to.

What it sees of each part of the state: ``test_pools``, ``test_transfers``, ``test_requests``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import inside
import numpy as np
import pytest

import kvtier.audit.run
from core.audit import test_pools, test_remote, test_requests, test_transfers
from core.audit.damage import GROUPS, assert_reported, busy, entry
from core.audit.test_pools import plant_counter, plant_reference_too_many
from core.audit.test_requests import plant_forgotten_row, plant_stale_tail
from core.audit.test_transfers import plant_fence_without_transfer
from core.driving import STORE, assert_same, prompt, snapshot
from kvtier import InvariantBroken
from kvtier.audit.run import AuditLevel, check_counts
from kvtier.pools.block_pool import Mark, Place


@pytest.fixture
def serving():
    with busy() as serving:
        yield serving


def test_the_audit_changes_nothing(serving):
    before = snapshot(serving.cache)
    serving.cache.audit()
    assert_same(before, snapshot(serving.cache))


@pytest.mark.usefixtures("damaged")
def test_the_audit_reports_all_violations_at_once(serving):
    plant_counter(serving)
    plant_stale_tail(serving)
    plant_fence_without_transfer(serving)
    assert {"I1", "I15", "I17"} <= {violation.invariant for violation in serving.cache.audit()}


def test_the_audit_of_a_cache_without_scheduler_or_host_is_empty(make_cache):
    assert make_cache(GROUPS, 8).audit() == []


def test_without_a_host_tier_no_key_waits_for_its_content(make_serving):
    serving = make_serving(GROUPS, 24)
    serving.serve("A", prompt(0, 13), 2)
    mark, at = inside.pools(serving.cache).arrays.mark, entry(serving, Place.CACHED)
    mark[at] = Mark.PENDING
    assert {v.invariant for v in serving.cache.audit()} == {"I1", "I19"}
    mark[at] = Mark.READY


def test_nothing_is_held_once_nothing_is_left_to_do(make_serving):
    serving = make_serving(GROUPS, 24, 24, hold=[])
    serving.serve("A", prompt(0, 13), 2)
    block = inside.pools(serving.cache).take(np.zeros(1, np.int32))
    assert {v.invariant for v in serving.cache.audit()} == {"I2", "I27"}
    assert_reported(serving.cache, "I27 blocks are held and nobody is left")
    inside.pools(serving.cache).release(np.zeros(1, np.int32), block)


def test_nobody_is_looked_after_once_nobody_is_left(make_serving):
    serving = make_serving(GROUPS, 24, 24, hold=[])
    serving.add("A", prompt(0, 13), 2)
    serving.step()
    roster = serving.scheduler.roster
    left = roster.running[0]
    serving.run()
    inside.loading(roster).append(left)
    assert_reported(serving.cache, "I27 are awaited and nobody is left")
    inside.loading(roster).clear()


# --- arrays of the step under way: (array, what is done to it, invariant) --------------------------

STEP_DAMAGE = {
    "entries that do not add up": (
        lambda view: inside.step_of(view).query_start.__setitem__(-1, 99),
        "I15 the step's entries do not add up",
    ),
    "a row that nobody has": (lambda view: inside.step_of(view).rows.__setitem__(0, 5), "I15 but nobody has it"),
    "other positions": (lambda view: inside.step_of(view).positions.__setitem__(0, 3), "I15 other positions"),
    "another token": (
        lambda view: inside.step_of(view).token_ids.__setitem__(0, 96),
        "I15 tokens that are not its own",
    ),
    "names in another order": (lambda view: inside.step_of(view).request_ids.reverse(), "I15 the step names"),
    "another entry sampled": (lambda view: inside.step_of(view).sample_rows.__setitem__(0, 1), "I15 are sampled"),
    "a prefill called a decode": (
        lambda view: setattr(inside.step_of(view), "prefills", inside.step_of(view).prefills[:0]),
        "I15 are called prefills",
    ),
    "table outside the pool": (
        lambda view: view.block_table.__setitem__((0, 0), 99),
        "I15 block_table names a block outside the pool",
    ),
    "table names a free block": (
        lambda view: view.block_table.__setitem__((0, 0), 24),
        "I15 block_table names a block that nobody holds",
    ),
    "null where the mask looks": (
        lambda view: view.block_table.__setitem__((0, 0), 0),
        "I15 block_table is not what the rows say",
    ),
    "a block of another request": (
        lambda view: view.block_table.__setitem__((0, 0), view.block_table[1, 0]),
        "I15 block_table is not what the rows say",
    ),
    "two tokens in one slot": (
        lambda view: view.slot_mapping.__setitem__(0, view.slot_mapping[1]),
        "I15 two tokens go to one slot",
    ),
    "token in the null block": (
        lambda view: view.slot_mapping.__setitem__(0, 2),
        "I16 a token goes to the null block",
    ),
    "the next slot but one": (
        lambda view: view.slot_mapping.__setitem__(-1, view.slot_mapping[-1] + 1),
        "I15 slot_mapping is not what the rows say",
    ),
    "indices outside the pool": (
        lambda view: view.paged()[2].__setitem__(0, 99),
        "I15 kv_indices names a block outside the pool",
    ),
    "a page of another request": (
        lambda view: view.paged()[2].__setitem__(0, view.paged()[2][-1]),
        "I15 kv_indices is not what the rows say",
    ),
    "last page too long": (lambda view: view.paged()[3].__setitem__(0, 5), "I15 contradict each other"),
    "pages that go backwards": (lambda view: view.paged()[1].__setitem__(1, 0), "I15 contradict each other"),
}


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("what", STEP_DAMAGE)
def test_the_audit_reads_the_arrays_of_the_step_under_way(make_serving, what):
    serving = make_serving(GROUPS, 24)
    serving.add("A", prompt(0, 7), 2)
    serving.add("B", prompt(1, 7), 2)
    step = serving.scheduler.schedule()
    damage, check = STEP_DAMAGE[what]
    damage(step.group("full"))
    assert_reported(serving.cache, check)
    for end in (lambda: serving.scheduler.commit(step, [1, 2]), lambda: serving.scheduler.cancel(step)):
        with pytest.raises(InvariantBroken, match="after the forward"):
            end()
    serving.cache.close()


@pytest.mark.parametrize(
    ("column", "check"),
    [
        ("refs", "I16 a token goes to a block that is shared or findable"),
        ("fence", "I17 a token goes to a block that a store still reads"),
    ],
)
def test_the_audit_sees_a_token_that_goes_where_others_read(make_serving, column, check):
    serving = make_serving(GROUPS, 24)
    serving.add("A", prompt(0, 7), 2)
    step = serving.scheduler.schedule()
    numbers, block = getattr(inside.pools(serving.cache).arrays, column), int(step.group("full").slot_mapping[0]) // 4
    numbers[block] += 1  # the first group's entries are its ids
    assert_reported(serving.cache, check)
    numbers[block] -= 1
    serving.scheduler.cancel(step)


# --- every check --------------------------------------------------------------------------------------

BY_THEMSELVES = [
    "I22 its blocks do not lie inside their slabs",
    "I1 but another pool has its slab",
    "I16 a token goes to a block that is shared or findable",
    "I17 a token goes to a block that a store still reads",
    "I27 blocks are held and nobody is left",
    "I27 are awaited and nobody is left",
]
"""Checks that a test of its own asks for."""


def checks_of_the_audit() -> Iterator[tuple[str, list[str]]]:
    """(invariant, the fixed words of what is said), of every literal in its sources that reports something."""
    for path in sorted(Path(kvtier.audit.run.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
            head = parts[0] if parts else None
            if isinstance(head, ast.Constant) and isinstance(head.value, str) and re.fullmatch(r"I\d+", head.value):
                said = [str(part.value).strip() for part in ast.walk(parts[1]) if isinstance(part, ast.Constant)]
                yield head.value, [words for words in said if len(words) > 3]


def test_every_check_of_the_audit_has_been_seen_to_find_something():
    tables = (test_pools.PLANTED, test_remote.PLANTED, test_requests.PLANTED, test_transfers.PLANTED)
    asked = [check for table in tables for checks in table.values() for check in checks]
    asked += [check for _, check in STEP_DAMAGE.values()] + BY_THEMSELVES
    checks, seen = list(checks_of_the_audit()), [check.split(" ", 1) for check in asked]
    assert len(checks) > 90
    for invariant, said in checks:
        found = [asked for number, asked in seen if number == invariant]
        assert any(asked in words or words in asked for asked in found for words in said), (invariant, said)


# --- levels ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("level", AuditLevel)
def test_levels(serving, level):
    """1 sees what counters can show, 2 sees everything, 0 nothing."""
    serving.cache.checks.level = level
    plant_reference_too_many(serving)
    for seen_at, plant in ((AuditLevel.FULL, None), (AuditLevel.COUNTS, plant_forgotten_row)):
        if plant is not None:
            plant(serving)
        if level >= seen_at:
            with pytest.raises(InvariantBroken, match="broken after commit") as caught:
                serving.cache.core.check("commit")
            assert caught.value.moment == "commit"
            assert "I2" in {violation.invariant for violation in caught.value.violations}
        else:
            serving.cache.core.check("commit")


LEFT = {
    "a request that waits": lambda serving: serving.add("A", prompt(0, 13)),
    "a step under way": lambda serving: serving.scheduler.schedule(),
    "a store under way": lambda serving: (
        serving.add("A", prompt(0, 13)),
        serving.steps_until(lambda: "A" in serving.finished),
    ),
}


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("what", LEFT)
def test_counters_show_that_something_is_forgotten(make_serving, monkeypatch, what):
    serving = make_serving(GROUPS, 24, 24, hold={STORE})
    LEFT[what](serving)
    assert serving.scheduler.num_running == 0
    assert check_counts(serving.cache.core) == []
    with monkeypatch.context() as patch:
        patch.setattr(serving.scheduler, "has_work", lambda: False)
        assert [violation.invariant for violation in check_counts(serving.cache.core)] == ["I30"]
    if what == "a step under way":
        serving.scheduler.cancel(serving.scheduler.step)


def test_a_long_list_of_violations_is_cut_in_the_message_and_whole_in_the_error():
    problem = InvariantBroken("schedule", list(range(50)))
    assert "... and 30 more" in str(problem)
    assert len(problem.violations) == 50
