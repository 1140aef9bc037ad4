"""Traces in the formats that their publishers describe, written here."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.machine.errors import ConfigError
from runner.bench.names import TraceFormat
from runner.bench.plan import Plan
from runner.bench.sharing import shareable_tokens
from runner.bench.tokens import Alphabet
from runner.bench.traces import TraceOptions, read

INF = float("inf")
IDS = Alphabet(range(1000, 2000), "the test")

MOONCAKE = [
    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]},
    {"timestamp": 30535, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 2366]},
    {"timestamp": 30535, "input_length": 512, "output_length": 0, "hash_ids": [9]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
"""
SESSION = {
    "id": "s1",
    "models": ["x"],
    "block_size": 64,
    "tool_tokens": 10,
    "system_tokens": 5,
    "requests": [
        {"t": 0.0, "type": "s", "in": 130, "out": 8, "hash_ids": [1, 2], "api_time": 2.0, "think_time": 0.0},
        {"t": 3.0, "type": "subagent", "agent_id": "a", "requests": [
            {"t": 3.0, "type": "n", "in": 64, "out": 4, "hash_ids": [9], "api_time": 1.0},
            {"t": 6.5, "type": "n", "in": 129, "out": 4, "hash_ids": [9, 10], "api_time": 1.0},
        ]},
        {"t": 90.0, "type": "s", "in": 200, "out": 9, "hash_ids": [1, 2, 3], "api_time": 2.0, "think_time": 88.0},
    ],
}  # fmt: skip
COMPACT = {
    "id": "s1",
    "block_size": 64,
    "requests": [
        [0.0, 0.0, 2.0, 130, 8, 0, [[1, 2]]],
        {"sub": "a", "t": 3.0, "reqs": [[0.0, 0.0, 1.0, 64, 4, 0, [[9, 1]]], [3.5, 2.5, 1.0, 129, 4, 1, [[10, 1]]]]},
        [90.0, 88.0, 2.0, 200, 9, 2, [[3, 1]]],
    ],
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """Writes a trace and says where: rows as lines of JSON, or text."""

    def write(name: str, content: Any) -> str:
        path = tmp_path / name
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write


def plan_of(path: str, seed: int = 1, rate: float = INF, **options: Any) -> Plan:
    return read(TraceOptions(path, **options), rate, 1.0, seed)


def prompts(plan: Plan) -> list[list[int]]:
    return [IDS.draw(turn.prompt, plan.seed).tolist() for session in plan.sessions for turn in session.turns]


def shared(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_mooncake_s_blocks_become_shared_prefixes(written: Callable[..., str]) -> None:
    plan = plan_of(written("t.jsonl", MOONCAKE))
    first, second, third = prompts(plan)
    assert [len(one) for one in (first, second, third)] == [1100, 1030, 512]
    assert 1024 <= shared(first, second) < 1028 and shared(first, third) < 4
    assert [session.start_s for session in plan.sessions] == pytest.approx([0.0, 3.053, 3.053])
    assert [session.turns[0].output_tokens for session in plan.sessions] == [52, 26, 1]
    assert shareable_tokens(plan) == 1024
    assert plan.parameters["trace_format"] == "mooncake" and plan.parameters["self_timed"]


def test_a_trace_can_be_made_smaller_and_faster(written: Callable[..., str]) -> None:
    path = written("t.jsonl", MOONCAKE)
    plan = plan_of(path, length_scale=1 / 16, time_scale=0.5)
    first, second, third = prompts(plan)
    assert [len(one) for one in (first, second, third)] == [64 + 5, 64 + 1, 32]
    assert shared(first, second) >= 64
    assert plan.sessions[1].start_s == pytest.approx(1.5265)
    assert plan.sessions[0].turns[0].output_tokens == 3
    few = plan_of(path, max_input_len=1050, num_prompts=1)
    assert [len(one) for one in prompts(few)] == [1030] and few.parameters["left_out_as_too_long"] == 1
    other = plan_of(path, block_tokens=500, second_multiplier=1.0)
    assert other.sessions[1].start_s == 3053.0
    assert 1000 <= shared(*prompts(other)[:2]) < 1005


def test_azure_s_requests_share_nothing(written: Callable[..., str]) -> None:
    plan = plan_of(written("t.csv", AZURE))
    first, second = prompts(plan)
    assert (len(first), len(second)) == (4808, 110) and shared(first, second) < 4
    assert [session.start_s for session in plan.sessions] == pytest.approx([0.0, 0.052], abs=1e-6)
    assert shareable_tokens(plan) == 0 and plan.parameters["trace_format"] == "azure"


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "folder/s1.json"])
@pytest.mark.parametrize("session", [SESSION, COMPACT], ids=["published", "compact"])
def test_sessions_wait_for_answers_and_their_sub_agents_go_beside_them(
    written: Callable[..., str], name: str, session: dict[str, Any]
) -> None:
    path = written(name, [session])
    plan = plan_of(str(Path(path).parent) if name.endswith(".json") else path, max_think_s=10.0)
    main, sub = plan.sessions
    assert [turn.think_s for turn in main.turns] == [0.0, 10.0] and [turn.think_s for turn in sub.turns] == [0.0, 2.5]
    assert (main.start_s, sub.start_s) == (0.0, 3.0)
    first, last, inner, inner_last = prompts(plan)
    assert [len(one) for one in (first, last, inner, inner_last)] == [130, 200, 64, 129]
    assert 128 <= shared(first, last) < 130 and 64 <= shared(inner, inner_last) < 67 and shared(first, inner) < 3
    assert plan.parameters["trace_format"] == "kv-cache-tester" and not plan.parameters["self_timed"]


@pytest.mark.parametrize("is_compact", [True, False])
def test_times_that_a_session_does_not_tell_follow_from_the_others(
    written: Callable[..., str], is_compact: bool
) -> None:
    first, last = [0.0, 0.0, None, 130, 8, 0, [[1, 2]]], [90.0, None, None, 200, 9, 2, [[3, 1]]]
    as_objects = [
        {"t": one[0], "think_time": one[1], "api_time": one[2], "in": one[3], "out": one[4], "hash_ids": [1, 2, 3]}
        for one in (first, last)
    ]
    plan = plan_of(written("t.jsonl", [COMPACT | {"requests": [first, last] if is_compact else as_objects}]))
    assert [turn.think_s for turn in plan.sessions[0].turns] == [0.0, 90.0]


def test_ids_are_of_their_session_unless_they_are_of_all(written: Callable[..., str]) -> None:
    other = SESSION | {"id": "s2"}
    first, second = (one for one in prompts(plan_of(written("a.jsonl", [SESSION, other]))) if len(one) == 130)
    assert shared(first, second) < 3
    everywhere = [one | {"hash_id_scope": "global"} for one in (SESSION, other)]
    first, second = (one for one in prompts(plan_of(written("b.jsonl", everywhere))) if len(one) == 130)
    assert 128 <= shared(first, second) < 130


def test_a_rate_can_take_the_place_of_the_trace_s_times(written: Callable[..., str]) -> None:
    path = written("t.jsonl", MOONCAKE)
    with pytest.raises(ConfigError, match="--no-self-timed"):
        read(TraceOptions(path), 5.0, 1.0, 0, is_rate_given=True)
    plan = plan_of(path, rate=0.01, self_timed=False)
    assert plan.sessions[1].start_s != pytest.approx(3.053) and plan.parameters["request_rate"] == 0.01


def test_the_same_trace_is_the_same_requests(written: Callable[..., str]) -> None:
    path = written("t.jsonl", MOONCAKE)
    assert plan_of(path).digest() == plan_of(path).digest() and prompts(plan_of(path)) == prompts(plan_of(path))
    assert prompts(plan_of(path)) != prompts(plan_of(path, seed=2))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", [MOONCAKE[0], {"timestamp": 1, "input_length": 5}], "line 2 .* has no 'output_length'"),
        ("t.jsonl", json.dumps(MOONCAKE[0]) + "\n{not json}\n", "line 2 is not JSON"),
        ("t.jsonl", [MOONCAKE[0] | {"input_length": 0}], "line 1 .*input_length 0 is not within"),
        ("t.csv", AZURE + "yesterday,1,2\n", "line 4 is no request of Azure's format"),
        ("t.csv", "a,b\n1,2\n", "of none of the formats"),
        ("t.jsonl", [SESSION | {"requests": [[1, 2, 3]]}], "line 1 is no session"),
        ("t.jsonl", [{"block_size": 64, "requests": []}], "line 1 is no session .* has no 'id'"),
        ("t.jsonl", json.dumps(MOONCAKE[0]) + "\n" + "[" * 100_000 + "\n", "line 2 is not JSON: nested too deeply"),
        ("t.json", "[" * 100_000, "t.json is not JSON: nested too deeply"),
        *[
            ("t.jsonl", [MOONCAKE[0], MOONCAKE[0] | change], f"line 2 is no request .*{message}")
            for change, message in [
                ({"timestamp": float("nan")}, "timestamp nan"),
                ({"timestamp": INF}, "timestamp inf"),
                ({"timestamp": -1}, "timestamp -1"),
                ({"timestamp": 10**400}, "too large"),
                ({"hash_ids": [2**64]}, "hash_ids"),
                ({"hash_ids": [1e300]}, "hash_ids"),
                ({"hash_ids": "12"}, "hash_ids"),
                ({"input_length": 10**12}, "input_length"),
                ({"input_length": INF}, "input_length"),
                ({"input_length": 1.5}, "input_length"),
                ({"output_length": 2**60}, "output_length"),
            ]
        ],
        ("t.csv", AZURE + "2023-11-16 18:17:04,9999999999999,1\n", "line 4 is no request"),
        ("t.csv", AZURE + "\n2023-11-16 18:17:04,5,-1\n", "line 5 is no request .*GeneratedTokens"),
        ("t.csv", AZURE + "x" * 200_000 + ",1,2\n", "line 4 cannot be read: field larger"),
        *[
            ("t.jsonl", [SESSION, SESSION | change], f"line 2 is no session .*{message}")
            for change, message in [
                ({"block_size": 0}, "block_size"),
                ({"requests": {"in": 5}}, "requests"),
                ({"requests": [SESSION["requests"][0] | {"think_time": float("nan")}]}, "think_time"),
                ({"requests": [SESSION["requests"][0] | {"t": -INF}]}, "t "),
                ({"requests": [SESSION["requests"][0] | {"hash_ids": [2**70]}]}, "hash_ids"),
                ({"requests": [[0.0, 0.0, 2.0, 130, 8, 0, [[1, 10**12]]]]}, "hash_ids"),
                ({"requests": [[0.0, INF, 2.0, 130, 8, 0, [[1, 2]]]]}, "think_time"),
            ]
        ],
    ],
)
def test_what_is_not_of_the_format_is_refused_with_its_line(
    written: Callable[..., str], name: str, content: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(written(name, content))


def test_a_file_that_was_cut_off_is_refused_with_its_line(written: Callable[..., str], tmp_path: Path) -> None:
    whole = Path(written("t.jsonl.gz", MOONCAKE * 200)).read_bytes()
    for name, raw in (("a.jsonl.gz", whole[:100]), ("b.jsonl.gz", whole[:-9]), ("c.jsonl.gz", whole[:60] + b"?" * 60)):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(ConfigError, match=r"c?(, line \d+)? cannot be read: [^\n]*$"):
            plan_of(str(tmp_path / name), num_prompts=10_000)


def test_hashes_of_64_bits_are_ids(written: Callable[..., str]) -> None:
    path = written("t.jsonl", [MOONCAKE[0] | {"hash_ids": [2**64 - 1, 2**63, 5]}] * 2)
    first, second = prompts(plan_of(path))
    assert shared(first, second) >= 1024 and shareable_tokens(plan_of(path)) == 1100


def test_a_scale_that_leads_past_any_memory_is_refused(written: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="--length-scale"):
        plan_of(written("t.jsonl", MOONCAKE), length_scale=1e300)


def test_a_scale_that_leads_past_any_clock_is_refused(written: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="--time-scale"):
        plan_of(written("t.jsonl", [MOONCAKE[0], MOONCAKE[1] | {"timestamp": 1e300}]), time_scale=1e300)


def test_a_trace_that_is_not_there_or_has_nothing_to_send(written: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_of(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="no request of at most 10 tokens"):
        plan_of(written("t.jsonl", MOONCAKE), max_input_len=10)
    with pytest.raises(ConfigError, match="line 1 is no request of Mooncake"):
        plan_of(written("t.jsonl", [SESSION]), format=TraceFormat.MOONCAKE)
