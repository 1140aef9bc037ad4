"""The kit inside vLLM, on a played vLLM: it passes, it sees faults, and nothing passes that did not happen."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.cli import main
from runner.verify.report import Status
from runner.verify.vllm import child, kit, plan, scenarios
from runner.verify.vllm.compare import Comparing
from runner.verify.vllm.log import reason_in
from runner.verify.vllm.report import Report
from runner.verify.vllm.served import Answer, Counts, Served
from served import played_vllm

SMALL = {"model": "played", "tokens": 300, "prompts": 2, "new_tokens": 4}
VOCAB = played_vllm.VOCAB
NAMES = ["bare device hit", "bare batch", *(scenario.name for scenario in scenarios.SCENARIOS)]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are calls in this process."""

    class Called:
        pid = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            self.returncode = child.main(*command[-2:])

        def poll(self) -> int:
            return self.returncode

    for name, module in played_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kit, "find_spec", lambda name: True)
    monkeypatch.setattr(kit.subprocess, "Popen", Called)
    monkeypatch.setattr(kit, "_end", lambda process: None)
    monkeypatch.setattr(scenarios, "_SETTLE_S", 0.0)
    monkeypatch.setattr(scenarios, "_RESET_S", 0.0)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Children are processes of the played vLLM."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, played_vllm.__file__, *command[-2:]], **options))
        return started[-1]

    monkeypatch.setattr(kit, "find_spec", lambda name: True)
    monkeypatch.setattr(kit.subprocess, "Popen", start)
    return started


def connector(fault: str | None = None) -> dict[str, Any]:
    extra = {} if fault is None else {"fault": fault}
    return {"kv_connector": "Played", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def statuses(report: Report) -> dict[str, str]:
    return {r.name: r.status.value for r in report.results if r.status is not Status.EQUAL}


# --- it passes ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("played")
def test_a_connector_that_works_passes_with_what_vllm_has_counted() -> None:
    report = kit.run(**SMALL, kv_transfer_config=connector())
    assert statuses(report) == {} and report.ok
    assert [r.name for r in report.results] == NAMES
    by_name = {r.name: r for r in report.results}
    hit = sum((n - 1) // played_vllm.BLOCK * played_vllm.BLOCK for n in report.prompt_tokens)
    left = sum(report.prompt_tokens) + 2 * (4 - 1) - hit
    assert (by_name["device hit"].counts.device, by_name["device hit"].counts.computed) == (hit, left)
    assert (by_name["host hit"].counts.host, by_name["host hit"].counts.computed) == (hit, left)
    mixed = by_name["mixed hit"].counts
    assert mixed.device > 0 < mixed.host and mixed.device + mixed.host == hit
    assert by_name["preempted"].counts.preemptions and by_name["preempted"].counts.resumed_host
    assert all(r.compared >= 2 * 4 and r.largest_difference == 0 for r in report.results)


def test_in_processes_of_their_own_it_prints_the_table_or_json(
    processes: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", "--engine", "vllm", "--model", "played", "--tokens", "300", "--new-tokens", "4"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "All 9 scenarios happened, and none made a difference" in " ".join(out.split())
    assert all(name in out for name in NAMES) and "KvtierConnector" in out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out and "scenario: " not in out
    assert main([*arguments, "--json", "--kv-transfer-config", json.dumps(connector("noise"))]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["connector"] == "Played"
    assert len(processes) == 4 and all(p.returncode == 0 for p in processes)


# --- it fails -----------------------------------------------------------------------------------------

HITS = ("host hit", "mixed hit")
SEEN = [
    ("noise", dict.fromkeys((*HITS, "device hit", "batch", "preempted"), "differs")),
    ("wrong logprobs", dict.fromkeys((*HITS, "device hit", "batch", "preempted"), "differs")),
    ("near tie", dict.fromkeys((*HITS, "device hit", "batch", "preempted"), "differs")),
    ("nothing stored", dict.fromkeys((*HITS, "preempted"), "not exercised")),
    ("loads fail", dict.fromkeys(HITS, "not exercised")),
    ("no reset", {"reset": "not exercised"}),
    ("remembers", {"reset": "unsound"}),
    ("never preempts", {"preempted": "not exercised"}),
]


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(("fault", "expected"), SEEN, ids=[fault for fault, _ in SEEN])
def test_a_fault_of_a_connector_is_seen_where_it_shows(fault: str, expected: dict[str, str]) -> None:
    report = kit.run(**SMALL, kv_transfer_config=connector(fault))
    found = statuses(report)
    assert not report.ok
    assert {name: found.get(name) for name in expected} == expected
    assert not any(name.startswith("bare") for name in found) and "cold" not in found


@pytest.mark.usefixtures("played")
def test_what_did_not_happen_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--engine", "vllm", "--model", "played", "--tokens", "300", "--new-tokens", "4"]
    assert main([*arguments, "--kv-transfer-config", json.dumps(connector("nothing stored"))]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "host hit: not exercised: the connector brought at least half of each prompt" in out
    assert main([*arguments, "--kv-transfer-config", json.dumps(connector("loads fail"))]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "host hit: not exercised: 288 tokens of hits were used: vLLM computed them" in out


@pytest.mark.usefixtures("played")
def test_in_half_precision_near_tokens_may_change_places() -> None:
    report = kit.run(**SMALL, kv_transfer_config=connector("near tie"), engine_args={"dtype": "bfloat16"})
    assert report.ok
    host = next(r for r in report.results if r.name == "host hit")
    assert host.swapped == 2 and host.compared == 2 * 2, "nothing is compared after a token that differs"
    strict = kit.run(
        **SMALL, kv_transfer_config=connector("wrong logprobs"), engine_args={"dtype": "bfloat16"}, tolerance=0.4
    )
    assert statuses(strict)["host hit"] == "differs"


@pytest.mark.usefixtures("played")
def test_requests_that_end_otherwise_are_unsound() -> None:
    report = kit.run(**SMALL, kv_transfer_config=connector("ends early"))
    assert statuses(report)["host hit"] == "unsound"
    host = next(r for r in report.results if r.name == "host hit")
    assert host.violations[0] == "prompt 0 ended by 'error'"


@pytest.mark.usefixtures("played")
def test_an_engine_that_raises_serves_no_more() -> None:
    report = kit.run(**SMALL, kv_transfer_config=connector("raises"))
    assert [r.name for r in report.results] == NAMES
    found = statuses(report)
    assert found["device hit"] == "unsound" and found["reset"] == "not exercised"
    assert "EngineCore encountered an issue" in report.results[3].violations[0]


def test_a_process_that_ends_is_told(processes: list[subprocess.Popen[bytes]]) -> None:
    the_unsound_one(kit.run(**SMALL, kv_transfer_config=connector("dies")), "ended with status 7")
    assert [p.returncode for p in processes] == [0, 7]


def test_a_process_that_falls_silent_is_given_up(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, marker = connector("falls silent"), tmp_path / "silent"
    config["kv_connector_extra_config"]["marker"] = str(marker)
    hours = itertools.count()  # each look at the clock, from then on
    later = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 3_600 * (next(hours) if marker.exists() else 0), sleep=time.sleep
    )
    monkeypatch.setattr(kit, "time", later)
    report = kit.run(**SMALL, kv_transfer_config=config, patience_s=3_000)
    the_unsound_one(report, "nothing was heard for 3000 s (--patience)")
    assert processes[0].returncode == 0 and processes[1].returncode in (-signal.SIGTERM, -signal.SIGKILL)


def the_unsound_one(report: Report, reason: str) -> None:
    """And all others are told of."""
    assert [r.name for r in report.results] == NAMES
    unsound = [r for r in report.results if r.status is Status.UNSOUND]
    assert len(unsound) == 1 and reason in unsound[0].violations[0]


CLAIMS = [
    (scenarios.NOTHING_FOUND, Counts(), 1, True),
    (scenarios.NOTHING_FOUND, Counts(device=16), 1, False),
    (scenarios.NOTHING_FOUND, Counts(host=16), 1, False),
    (scenarios.FROM_DEVICE, Counts(device=84), 1, True),
    (scenarios.FROM_DEVICE, Counts(device=68), 1, False),
    (scenarios.FROM_HOST, Counts(host=50), 1, True),
    (scenarios.FROM_HOST, Counts(host=49), 1, False),
    (scenarios.FROM_HOST, Counts(device=16, host=68), 1, False),
    (scenarios.FROM_BOTH, Counts(device=16, host=68), 1, True),
    (scenarios.FROM_BOTH, Counts(device=84), 1, False),
    (scenarios.FROM_BOTH, Counts(host=84), 1, False),
    (scenarios.SHARED, Counts(), 2, True),
    (scenarios.SHARED, Counts(), 1, False),
    (scenarios.RESUMED, Counts(preemptions=1, resumed_host=16), 2, True),
    (scenarios.RESUMED, Counts(preemptions=0, resumed_host=16), 2, False),
    (scenarios.RESUMED, Counts(preemptions=1, resumed_host=0), 2, False),
    (scenarios.RESUMED, Counts(preemptions=1, resumed_device=16), 2, False),  # this vLLM does not tell
]


@pytest.mark.parametrize(("claims", "counts", "together", "happened"), CLAIMS)
def test_a_claim_holds_if_it_has_happened(
    claims: dict[str, scenarios.Holds], counts: Counts, together: int, happened: bool
) -> None:
    """Of a prompt of 100 tokens in blocks of 16."""
    served = Served([Answer("a", 100, [1], [])], counts, together)
    assert all(holds(scenarios.Evidence([served], 16, False)) for holds in claims.values()) is happened
    assert not any(holds(scenarios.Evidence([], 16, False)) for holds in claims.values()), "nothing was served"


# --- what is equal ------------------------------------------------------------------------------------


def answer(ids: list[int], rows: list[list[tuple[int, float]]]) -> Answer:
    return Answer("a", 10, ids, rows)


ROWS = [[(1, -0.5), (2, -0.6)], [(3, -0.1), (4, -2.0)]]


@pytest.mark.parametrize(
    ("ids", "rows", "dtype", "equal"),
    [
        ([1, 3], ROWS, "float32", True),
        ([1], ROWS[:1], "float32", True),
        ([1, 3], [ROWS[0], [(3, -0.1 - 2e-4), (4, -2.0)]], "float32", False),
        ([1, 3], [ROWS[0], [(3, float("nan")), (4, -2.0)]], "float32", False),
        ([2, 3], [[(1, -0.5), (2, -0.5)], ROWS[1]], "bfloat16", True),
        ([2, 9], [[(1, -0.5), (2, -0.5)], [(9, -9.0)]], "bfloat16", True),  # after a swap nothing is compared
        ([2, 3], ROWS, "float32", False),
        ([7, 3], [[(7, -0.4), (1, -0.5)], ROWS[1]], "bfloat16", False),  # 7 is none of the likeliest
        ([1, 4], [ROWS[0], [(3, -1.5), (4, -0.3)]], "bfloat16", False),
    ],
)
def test_what_is_equal(ids: list[int], rows: list[Any], dtype: str, equal: bool) -> None:
    comparing = Comparing({"a": answer([1, 3], ROWS)}, dtype, {"float32": 1e-4, "bfloat16": 0.5}[dtype])
    comparing.add(answer(ids, rows))
    assert (comparing.first is None) is equal


# --- input --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100"], "too short; use 256 or more"),
        (["--tokens", "20000"], "the model takes 8,192 tokens; use --tokens 8168 or fewer"),
        (["--prompts", "1"], "at least 2"),
        (["--kv-transfer-config", json.dumps(connector("refuses"))], "this connector needs another GPU"),
        (["--kv-transfer-config", '{"kv_connecter": "X"}'], "kv_connecter"),
        (["--engine-args", '{"tensor_paralel_size": 2}'], "tensor_paralel_size"),
        (["--device", "cuda:0"], "--device is not for --engine vllm: vLLM's own settings go into --engine-args"),
        (["--dtype", "float64"], "no limit is known for float64; give one with --tolerance"),
    ],
)
def test_what_cannot_run_ends_with_status_2_and_the_fix(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--engine", "vllm", "--model", "played", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("played")
def test_with_states_the_prompts_of_preempted_requests_have_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    """Of generated text there are no states to come back to."""
    few = ["verify", "--engine", "vllm", "--prompts", "8", "--tokens"]
    assert main([*few, "311", "--model", "played"]) == 0
    assert main([*few, "311", "--model", played_vllm.HYBRID]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "too short for blocks of 16 with recurrent states: use --tokens 312 or more" in said
    assert main([*few, "312", "--model", played_vllm.HYBRID]) == 0


@pytest.mark.parametrize("text", ["{", "[]", '"KvtierConnector"'])
def test_what_is_no_json_object_ends_with_status_2(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--engine", "vllm", "--model", "played", "--kv-transfer-config", text])
    assert ended.value.code == 2
    assert "JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "needs --model"),
        (["--blocks", "9"], "--blocks is not for --engine kvtier: it goes with --engine vllm"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config is not for --engine kvtier"),
    ],
)
def test_options_of_the_other_engine_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_vllm_the_command_says_where_to_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    assert main(["verify", "--engine", "vllm", "--model", "played"]) == 2
    assert "run kvtier in vLLM's own environment" in capsys.readouterr().err


def test_the_reason_of_an_engine_core_is_found_in_its_log() -> None:
    log = """INFO 11-26 03:20:59 [core.py:100] Initializing
(EngineCore pid=123) ERROR 11-26 03:20:59 [core.py:1043] EngineCore failed to start.
(EngineCore pid=123) ERROR 11-26 03:20:59 [core.py:1043] Traceback (most recent call last):
(EngineCore pid=123) ERROR 11-26 03:20:59 [core.py:1043]   File "core.py", line 1, in f
(EngineCore pid=123) ERROR 11-26 03:20:59 [core.py:1043]     raise ConfigError("no")
(EngineCore pid=123) ERROR 11-26 03:20:59 [core.py:1043] kvtier.machine.errors.ConfigError: host_memory is too small
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert reason_in(log) == "ConfigError: host_memory is too small"
    assert reason_in("nothing of the kind") is None


def test_the_children_import_nothing_that_vllm_must_import_first() -> None:
    """numba before vLLM's worker ends the worker."""
    code = "import sys, runner.verify.vllm.child, runner.verify.vllm.engine; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"numba", "torch", "vllm", "rich", "transformers"} & set(out.stdout.split()) == set()


def test_one_module_alone_knows_vllm() -> None:
    """And imports it when it is called, so that ``kvtier verify`` never does otherwise."""
    folder = Path(child.__file__).parents[2]
    imports = re.compile(r"^( *)(?:from|import) vllm\b", re.MULTILINE)
    found = {p.name: imports.findall(p.read_text(encoding="utf-8")) for p in folder.rglob("*.py")}
    assert {name for name, lines in found.items() if lines} == {"engine.py"}
    assert "" not in found["engine.py"]


@pytest.mark.parametrize("prompts", [2, 3, 5])
def test_a_plan_is_of_prompts_that_differ(prompts: int) -> None:
    made = plan.make(VOCAB, 8_192, None, prompts, 24, None)
    texts = [*made.prompts.values(), *made.crowd.values(), made.flood(0), made.flood(1)]
    assert len({repr(text) for text in texts}) == len(texts) and len(made.crowd) >= 8
    assert len({*map(len, made.crowd.values())}) == 1
    assert made.longest + 24 <= made.max_model_len <= 8_192
    assert plan.Plan(**json.loads(json.dumps(made.to_dict()))) == made
