"""Plans: their lengths, what their prompts share, and that a seed decides all of it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from kvtier.machine.errors import ConfigError
from runner.bench.names import USED, Shape, WorkloadName
from runner.bench.plan import Plan
from runner.bench.sharing import shareable_tokens
from runner.bench.tokens import Alphabet, prompt_of
from runner.bench.workloads import make

INF = float("inf")
IDS = Alphabet(range(50, 150), "the test")
SMALL = Shape(
    num_prompts=12,
    random_input_len=40,
    random_output_len=9,
    prefix_repetition_prefix_len=64,
    prefix_repetition_suffix_len=8,
    prefix_repetition_num_prefixes=3,
    turns=5,
    system_len=20,
    first_turn_len=30,
    turn_len=7,
    turn_output_len=11,
    long_len=300,
)
NAMES = [name for name in WorkloadName if name is not WorkloadName.TRACE]


def plan_of(name: WorkloadName, seed: int = 3, rate: float = 5.0, **changes: object) -> Plan:
    return make(name, dataclasses.replace(SMALL, **changes), rate, 1.0, seed)


def prompts(plan: Plan) -> list[list[int]]:
    return [IDS.draw(turn.prompt, plan.seed).tolist() for session in plan.sessions for turn in session.turns]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_is_the_same_requests_at_the_same_offsets(name: WorkloadName) -> None:
    one, two, other = plan_of(name), plan_of(name), plan_of(name, seed=4)
    assert (one.digest(), prompts(one)) == (two.digest(), prompts(two))
    assert [s.start_s for s in one.sessions] == [s.start_s for s in two.sessions]
    assert one.digest() != other.digest() and prompts(one) != prompts(other)
    assert one.num_requests == 12
    assert set(one.parameters) >= set(USED[name]) and json.dumps(one.describe())


def test_random_prompts_share_nothing_and_keep_to_their_range() -> None:
    plan = plan_of(WorkloadName.RANDOM, num_prompts=200, random_range_ratio=0.5)
    lengths = np.array([length for session in plan.sessions for length in session.lengths()])
    assert set(lengths[:, 0]) <= set(range(20, 61)) and len(set(lengths[:, 0])) > 20
    assert set(lengths[:, 1]) <= set(range(4, 14))
    assert shareable_tokens(plan) == 0
    assert len({tuple(prompt[:16]) for prompt in prompts(plan)}) == 200


def test_prefixes_are_repeated_evenly_and_suffixes_are_not() -> None:
    plan = plan_of(WorkloadName.SHARED_PREFIX)
    said = prompts(plan)
    heads = [tuple(prompt[:64]) for prompt in said]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({tuple(prompt[64:]) for prompt in said}) == 12 and {len(prompt) for prompt in said} == {72}
    assert heads != [heads[0], heads[1], heads[2]] * 4  # in random order
    assert shareable_tokens(plan) == 9 * 64


def test_conversations_grow_by_their_answers_and_share_the_system_prompt() -> None:
    plan = plan_of(WorkloadName.CONVERSATIONS, think_time=2.0)
    assert [len(session.turns) for session in plan.sessions] == [5, 5, 2]
    assert list(plan.sessions[0].lengths()) == [(50, 11), (68, 11), (86, 11), (104, 11), (122, 11)]
    heads = {tuple(IDS.draw(session.turns[0].prompt, 3)[:20]) for session in plan.sessions}
    assert len(heads) == 1
    assert not plan.sessions[0].turns[0].continues and all(t.continues for t in plan.sessions[0].turns[1:])
    history = sum(a + b for session in plan.sessions for a, b in list(session.lengths())[:-1])
    assert shareable_tokens(plan) == 2 * 20 + history
    many = plan_of(WorkloadName.CONVERSATIONS, num_prompts=5000, think_time=2.0)
    thinks = [turn.think_s for session in many.sessions for turn in session.turns[1:]]
    assert np.mean(thinks) == pytest.approx(2.0, rel=0.05)


def test_back_to_back_is_one_session_of_prompts_in_turn() -> None:
    plan = plan_of(WorkloadName.BACK_TO_BACK)
    said = prompts(plan)
    assert len(plan.sessions) == 1 and said[0] == said[2] != said[1] == said[3]
    assert {len(prompt) for prompt in said} == {300} and not any(t.continues for t in plan.sessions[0].turns)
    assert shareable_tokens(plan) == 10 * 300
    assert "request_rate" not in plan.parameters


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (WorkloadName.RANDOM, {"num_prompts": 0}, "--num-prompts must be at least 1"),
        (WorkloadName.RANDOM, {"random_range_ratio": 1.0}, "--random-range-ratio is a part"),
        (WorkloadName.SHARED_PREFIX, {"prefix_repetition_num_prefixes": 0}, "--prefix-repetition-num-prefixes"),
        (WorkloadName.CONVERSATIONS, {"turns": 0}, "--turns must be at least 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(name: WorkloadName, changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(name, **changes)


def test_equal_keys_are_equal_tokens_wherever_they_stand() -> None:
    long, short = prompt_of([(7, 100), (8, 5)]), prompt_of([(9, 3), (7, 40), (1, 0)])
    assert IDS.draw(long, 1)[:40].tolist() == IDS.draw(short, 1)[3:].tolist() and short.tokens == 43
    assert IDS.draw(long, 1)[:100].tolist() != IDS.draw(long, 2)[:100].tolist()
    assert json.loads(b"[" + IDS.as_json(long, 1) + b"]") == IDS.draw(long, 1).tolist()
    spread = np.bincount(IDS.draw(prompt_of([(1, 100_000)]), 5), minlength=150)[50:]
    assert spread.min() > 850 and spread.max() < 1150  # 1,000 each, within 5 standard deviations


def test_these_tokens_are_for_ever() -> None:
    """Reports of other days are of the same requests."""
    assert IDS.draw(prompt_of([(1, 4), (2, 4)]), 0).tolist() == [51, 137, 122, 112, 56, 62, 102, 95]


def test_too_few_token_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="--token-ids"):
        Alphabet([1, 2, 2, 3], "the test")
