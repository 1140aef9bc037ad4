"""Traces that are replayed: how they are read, what nothing exceeds, and what memories find of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks import models
from kvtier import CacheSpec, ConfigError, FullAttention, GroupSpec, SlidingWindow
from runner.bench.replay.asked import Tokens
from runner.bench.replay.bound import measure
from runner.bench.replay.order import Order
from runner.bench.replay.serve import serve
from runner.bench.replay.trace import read
from runner.cli import main

FULL = CacheSpec([GroupSpec("full", FullAttention(), 2, 1, 16, block_tokens=4, dtype="bfloat16")])
NEAR = CacheSpec(
    [
        GroupSpec("full", FullAttention(), 1, 1, 16, block_tokens=4, dtype="bfloat16"),
        GroupSpec("near", SlidingWindow(8), 3, 1, 16, block_tokens=4, dtype="bfloat16"),
    ]
)
BLOCKS = {"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [46, 47, 2353]}
IDS = {"prompt_token_ids": [1, 2, 3], "token_ids": [4]}


@dataclass(frozen=True)
class Known:
    session: int
    prompt: Tokens
    answer: Tokens


def known(session: int, prompt: Sequence[int], answer: Sequence[int] = (9,)) -> Known:
    return Known(session, np.array(prompt, np.int32), np.array(answer, np.int32))


def some(number: int, tokens: int) -> list[int]:
    """Text that no other number begins with."""
    return [1000 * number + k % 900 for k in range(tokens)]


def talks(sessions: int, turns: int) -> list[Known]:
    """Conversations whose answers stay as they were, one turn of each after the other."""
    histories: list[list[int]] = [[] for _ in range(sessions)]
    asked = []
    for turn in range(turns):
        for k, history in enumerate(histories):
            history += some(1 + turn * sessions + k, 30)
            asked.append(known(k, history, answer := some(500 + turn * sessions + k, 5)))
            history += answer
    return asked


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Sequence[Any]) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return path

    return write


# --- the bound ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 5)), max_size=8))
def test_the_bound_is_the_longest_beginning_that_an_earlier_text_has(asked: list[tuple[list[int], int]]) -> None:
    texts, found, blocks = list[list[int]](), 0, set[tuple[int, ...]]()
    for prompt, new in asked:
        text = prompt + [1] * (new - 1)
        common = [next((i for i in range(min(map(len, (a, prompt)))) if a[i] != prompt[i]), min(len(a), len(prompt)))
                  for a in texts]  # fmt: skip
        found += min(max(common, default=0), len(prompt) - 1) // 2 * 2
        texts.append(text)
        blocks |= {tuple(text[:end]) for end in range(2, len(text) + 1, 2)}
    whole = measure([known(k % 3, prompt, [1] * new) for k, (prompt, new) in enumerate(asked)], 2)
    assert whole.found_tokens == found and whole.distinct_tokens == 2 * len(blocks)
    assert whole.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
    assert (whole.requests, whole.sessions) == (len(asked), min(3, len(asked)))


# --- what memories find -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FULL, NEAR], ids=["full", "window"])
def test_with_room_for_all_conversations_find_what_the_bound_says(spec: CacheSpec) -> None:
    asked = talks(3, 4)
    whole, found = measure(asked, 4), serve(asked, spec, 2**20)
    assert sum(found.tiers.values()) == whole.found_tokens > 0 and found.rate == whole.rate
    assert found.prompt_tokens == whole.prompt_tokens and not found.failed and not found.too_large


def test_less_memory_finds_less_and_a_host_tier_brings_it_back() -> None:
    asked = talks(6, 4)
    large, small = serve(asked, FULL, 2**18), serve(asked, FULL, 2**15)
    both = serve(asked, FULL, 2**15, 2**18)
    assert 0 < small.rate < large.rate and not small.failed
    assert both.rate == large.rate and both.tiers["host"] > 0
    assert serve(asked, FULL, 2**15, 2**18) == both, "the same every time"


@pytest.mark.parametrize("at_once", [1, 3])
def test_requests_run_at_once_and_each_is_told_of(at_once: int) -> None:
    asked, told = talks(4, 2), list[int]()
    found = serve(asked, FULL, 2**18, at_once=at_once, progress=lambda: told.append(1))
    assert len(told) == len(asked) and sum(found.tiers.values()) == measure(asked, 4).found_tokens


def test_what_can_never_fit_is_counted_and_finds_nothing() -> None:
    asked = [known(0, some(1, 40)), known(1, some(2, 4000)), known(0, some(1, 40)), known(1, some(2, 4000))]
    found = serve(asked, FULL, 2**15)
    assert found.too_large == 2 and found.tiers["device"] == 36 and found.prompt_tokens == 8080


def test_a_session_has_one_request_at_a_time() -> None:
    order = Order([known(0, [1]), known(0, [2]), known(1, [3]), known(2, [4])], 2)
    assert list(order.begin()) == [0, 2] and list(order.begin()) == []
    order.end(0)
    assert list(order.begin()) == [1]
    order.end(1)
    order.end(2)
    assert list(order.begin()) == [3] and order
    order.end(3)
    assert not order


# --- reading ------------------------------------------------------------------------------------------


def test_token_ids_are_what_they_were(written: Callable[..., Path]) -> None:
    path = written([IDS | {"session": "a"}, {"prompt_token_ids": [7], "output_length": 0}, IDS])
    first, second, third = read(path)
    assert first.prompt.tolist() == [1, 2, 3] and first.answer.tolist() == [4] and first.session == "a"
    assert second.prompt.tolist() == [7] and len(second.answer) == 1
    assert len({first.session, second.session, third.session}) == 3
    assert len(read(path, requests=2)) == 2


def test_equal_blocks_are_equal_tokens(written: Callable[..., Path]) -> None:
    path = written([BLOCKS, BLOCKS | {"hash_ids": [46, 47, 9], "input_length": 1030, "session": 3}])
    first, second = read(path)
    assert [len(first.prompt), len(second.prompt), len(first.answer)] == [1100, 1030, 2]
    same = first.prompt[:1030] == second.prompt
    assert same[:1024].all() and not same[1024:].all() and second.session == 3
    assert first.prompt.dtype == np.int32 and (first.prompt == first.prompt).all()
    assert not np.array_equal(first.answer, second.answer)
    short = read(path, block_tokens=100)
    assert (short[0].prompt[:200] == short[1].prompt[:200]).all() and short[0].prompt[200] != short[1].prompt[200]
    assert [len(one.prompt) for one in read(path, whole=True)] == [1024, 1024]


def test_sessions_take_turns_by_the_time_that_they_think(written: Callable[..., Path]) -> None:
    def session(name: str, think_s: float, turns: int) -> dict[str, Any]:
        asked = [{"t": 0, "in": 64 * (n + 1), "out": 1, "hash_ids": list(range(n + 1)), "think_time": n * think_s}
                 for n in range(turns)]  # fmt: skip
        return {"id": name, "block_size": 64, "requests": asked}

    found = read(written([session("slow", 10.0, 2), session("quick", 1.0, 3), session("empty", 1.0, 0)]))
    assert [len(one.prompt) // 64 for one in found] == [1, 1, 2, 3, 2]
    assert [one.session for one in found] == [(0,), (1,), (1,), (1,), (0,)]
    many = read(written([session(f"{k}", 1.0, 2) for k in range(20)]))
    begun = [one.session for one in many if len(one.prompt) == 64]
    assert begun == [(k,) for k in range(20)] and many[16].session == (0,), "sixteen are open, and no more"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([IDS, {"prompt_token_ids": [1]}], "line 2 is no request of token ids: it has no 'output_length'"),
        ([IDS, {"token_ids": [1]}], "line 2 is no request of token ids: it has no 'prompt_token_ids'"),
        ([IDS, IDS | {"prompt_token_ids": []}], "line 2 is no .* prompt_token_ids is no list of token ids"),
        ([IDS, IDS | {"prompt_token_ids": [2**31]}], "line 2 is no .* prompt_token_ids is no list"),
        ([IDS, IDS | {"token_ids": "yes"}], "line 2 is no .* token_ids is no list"),
        ([IDS, IDS | {"session": [1]}], "line 2 is no .* session .* is neither text nor a whole number"),
        ([IDS, "\n", "{not json}\n"], "line 3 is not JSON"),
        ([IDS, "[1]\n"], "line 2 is not a JSON object"),
        ([BLOCKS, BLOCKS | {"session": 1.5}], "line 2 is no request of Mooncake's .* session 1.5 is neither"),
        ([BLOCKS, BLOCKS | {"input_length": 0}], "line 2 is no request of Mooncake's"),
        ([{"prompt": "text"}], "its first line is of none of the formats .* and has no prompt_token_ids"),
    ],
)
def test_a_line_that_is_not_of_the_format_is_named(written: Callable[..., Path], rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(written(rows))


def test_what_cannot_be_read_or_chosen_is_refused(written: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="--trace-requests must be in 1"):
        read(written([IDS]), requests=0)
    with pytest.raises(ConfigError, match="--trace-block-tokens must be in 1"):
        read(written([BLOCKS]), block_tokens=0)
    with pytest.raises(ConfigError, match="has no request"):
        read(written([{"id": "s", "block_size": 64, "requests": []}]))


# --- the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gemma")
    models.gemma_3_27b().save_pretrained(path)
    return str(path)


def test_plan_says_what_its_memories_and_larger_ones_find(
    folder: str, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written([{"prompt_token_ids": some(k % 6, 2000), "output_length": 1, "session": k % 6} for k in range(12)])
    arguments = ["plan", folder, "--device-memory", "1GiB", "--host-memory", "5GiB", "--trace", str(path)]
    assert main([*arguments, "--at-once", "1", "--json"]) == 0
    trace = json.loads(capsys.readouterr().out)["trace"]
    assert (trace["requests"], trace["sessions"], trace["bound_tokens"]) == (12, 6, 6 * 1984)
    sizes = [(one["device_bytes"] >> 30, one["host_bytes"] >> 30) for one in trace["memories"]]
    assert sizes == [(1, 0), (1, 5), (2, 10), (4, 20)]
    alone, *_, most = trace["memories"]
    assert alone["rate"] < most["rate"] == sum(most["tokens"].values()) / trace["prompt_tokens"]
    assert most["of_bound"] == 1.0 and trace["memories"][1]["tokens"]["host"] > 0
    assert main([*arguments, "--trace-requests", "7"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "Hits on trace.jsonl, 7 requests" in out
        and "Prompts: 14.0 k tokens, of 6 sessions" in out
        and "no limit" in out
    )
    assert "16 requests at a time" in out


def test_a_trace_that_shares_nothing_has_no_share_of_a_bound(
    folder: str, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", folder, "--device-memory", "1GiB", "--trace", str(written([IDS, IDS]))]
    assert main([*arguments, "--json"]) == 0
    assert [one["of_bound"] for one in json.loads(capsys.readouterr().out)["trace"]["memories"]] == [None] * 3
    assert main([*arguments]) == 0
    assert "0.0 % -" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [([IDS, {}], [], "line 2 is no request"), ([IDS], ["--at-once", "0"], "--at-once must be in 1..4,096, got 0")],
)
def test_what_plan_cannot_replay_is_refused(
    folder: str,
    written: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    rows: list[Any],
    more: list[str],
    message: str,
) -> None:
    assert main(["plan", folder, "--device-memory", "1GiB", "--trace", str(written(rows)), *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and len(captured.err.strip().splitlines()) == 1
