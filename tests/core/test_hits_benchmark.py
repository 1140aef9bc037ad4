"""``benchmarks.hits``: what its bound says, and that the engine reaches it where nothing is short.

Steps are not audited here: other tests do that, and these have thousands.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hits import traces
from benchmarks.hits.child import Sizes, digest_of
from benchmarks.hits.rows import below
from benchmarks.hits.serve import serve
from benchmarks.hits.shapes import SHAPES
from benchmarks.hits.workloads import PLAIN, WORKLOADS, Ask, Habit, chats
from runner.bench.replay.bound import measure
from runner.bench.replay.order import Order

BLOCK = 16
TALK = Habit(dropped=3, thought=40, edited=0.5, retrimmed=0.5)


def small() -> list[Ask]:
    """Conversations whose answers are kept, others of all habits, and a prompt of whole blocks, twice."""
    kept, others = (chats(seed, sessions=3, turns=3, habit=habit, first=200) for seed, habit in ((1, PLAIN), (2, TALK)))
    again = Ask(9, kept[-1].prompt[: 4 * BLOCK], kept[-1].answer)
    return [*kept, *(replace(ask, session=ask.session + 3) for ask in others), again, again]


def longest(prompt: Any, texts: list[Any]) -> int:
    """Tokens of the prompt's blocks that one of these texts begins with, but for its last token."""
    shared = 0
    for text in texts:
        n = min(len(prompt) - 1, len(text))
        same = np.flatnonzero(prompt[:n] != text[:n])
        shared = max(shared, int(same[0]) if len(same) else n)
    return shared // BLOCK * BLOCK


def test_the_bound_is_the_longest_beginning_that_was_there_before() -> None:
    asked = small()
    texts = [np.concatenate([ask.prompt, ask.answer[:-1]]) for ask in asked]
    found = sum(longest(ask.prompt, texts[:n]) for n, ask in enumerate(asked))
    whole = measure(asked, BLOCK)
    assert whole.found_tokens == found
    assert whole.prompt_tokens == sum(len(ask.prompt) for ask in asked)


@pytest.mark.parametrize("at_once", [1, 3])
def test_full_layers_without_shortage_find_the_bound(at_once: int, unaudited: None) -> None:
    asked, shape = small(), SHAPES["full"]
    whole = measure(asked, BLOCK)
    sizes = Sizes(4 * shape.working_set_bytes(whole.distinct_tokens, whole.sessions))
    found = serve(asked, shape, BLOCK, sizes, at_once)
    assert (found.prompt_tokens, found.failed) == (whole.prompt_tokens, 0)
    if at_once == 1:
        assert found.tiers == {"device": whole.found_tokens, "host": 0}
    assert found == serve(asked, shape, BLOCK, sizes, at_once)


def test_a_host_tier_brings_back_what_the_device_has_no_room_for(unaudited: None) -> None:
    asked, shape = small(), SHAPES["gemma3"]
    whole = measure(asked, BLOCK)
    size = shape.working_set_bytes(whole.distinct_tokens, whole.sessions)
    alone, both = (serve(asked, shape, BLOCK, Sizes(size // 3, host)) for host in (0, 2 * size))
    assert alone.rate < both.rate <= whole.rate
    assert both.tiers["host"] > 0
    assert both == serve(asked, shape, BLOCK, Sizes(size // 3, 2 * size))


def test_no_two_requests_of_a_session_run_at_once_and_none_is_left_behind() -> None:
    asked = small()
    order, running, seen = Order(asked, at_once=3), list[int](), list[int]()
    while order:
        running += order.begin()
        assert len({asked[k].session for k in running}) == len(running) <= 3
        seen.append(running.pop(0))
        order.end(seen[-1])
    assert sorted(seen) == list(range(len(asked)))
    assert [k for k in seen if asked[k].session == 0] == [k for k, ask in enumerate(asked) if ask.session == 0]


def test_texts_are_the_same_in_each_process() -> None:
    assert digest_of(WORKLOADS["chat"]()) == "3dea3c5c2f7712dd"


def test_a_row_is_below_by_more_than_half_a_point() -> None:
    assert below({"kvtier": {"rate": 0.8}, "vllm": {"rate": 0.806}})
    assert not below({"kvtier": {"rate": 0.8}, "vllm": {"rate": 0.804}})
    assert not below({"kvtier": {"rate": 0.8}})


def test_a_trace_of_prompts_has_equal_tokens_where_it_has_equal_ids(tmp_path: Path) -> None:
    path = tmp_path / "mooncake" / "conversation_trace.jsonl"
    path.parent.mkdir()
    lines = [(1100, [0, 1, 2]), (1200, [0, 1, 3]), (200_000, [0] * 400)]
    path.write_text("\n".join(json.dumps({"input_length": n, "hash_ids": ids}) for n, ids in lines))
    one, other = traces.mooncake(tmp_path, whole=False)  # the longest is left out
    assert (len(one.prompt), len(other.prompt), longest(one.prompt, [other.prompt])) == (1100, 1200, 1024)
    one, other = traces.mooncake(tmp_path, whole=True)
    assert len(one.prompt) == 1025 and np.array_equal(one.prompt, other.prompt)


def test_a_trace_of_sessions_goes_on_from_the_blocks_that_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "agentic_coding" / "some.jsonl.gz"
    path.parent.mkdir()
    asked = [[0, 0, 0, 300, 9, 0, [[1, 5]]], {"reqs": []}, [0, 0, 0, 500, 9, 4, [[7, 2], [10, 2]]]]
    with gzip.open(path, "wt") as lines:
        lines.write(json.dumps({"requests": asked}) + "\n")
    one, other = traces.agentic(tmp_path, least=2)
    assert (len(one.prompt), len(other.prompt), one.session) == (300, 500, other.session)
    assert longest(other.prompt, [one.prompt]) == 4 * traces.BLOCK_TOKENS
    assert traces.agentic(tmp_path, least=3) == []
