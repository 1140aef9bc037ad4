"""Figures against NumPy, and against what a hand counts."""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np
import pytest

from kvtier.machine.errors import ConfigError
from runner.bench import figures
from runner.bench.drive import Run
from runner.bench.goals import Goals, goals_of
from runner.bench.plan import Plan, Session, Turn
from runner.bench.record import Outcome, Record
from runner.bench.tokens import prompt_of


def record(due_s: float = 0.0, times: tuple[float, ...] = (0.3, 0.4, 0.6), **more: Any) -> Record:
    """Sent 0.1 s after it was due, ended 0.1 s after its last piece."""
    found = Record(0, 0, 100, 3, due_s, is_open=True)
    found.ready_s, found.free_s, found.sent_s = due_s + 0.004, due_s + 0.099, due_s + 0.1
    found.times = array("d", [due_s + one for one in times])
    found.end_s = due_s + times[-1] + 0.1 if times else due_s + 0.2
    found.outcome, found.output_tokens, found.prompt_tokens = Outcome.OK, len(times), 100
    for name, value in more.items():
        setattr(found, name, value)
    return found


def failed(outcome: Outcome, error: str, due_s: float = 0.0) -> Record:
    return record(due_s, (), outcome=outcome, error=error)


def run_of(*records: Record, duration_s: float = 2.0) -> Run:
    return Run(list(records), duration_s=duration_s)


def plan_of(count: int) -> Plan:
    turn = Turn(prompt_of([(1, 100)]), 3)
    return Plan("test", {}, 0, tuple(Session(float(i), (turn,)) for i in range(count)))


def test_latencies_of_one_answer() -> None:
    found = {name: values.tolist() for name, values in figures.samples_ms([record(5.0)]).items()}
    assert found == {
        "ttft": pytest.approx([200.0]),
        "tpot": pytest.approx([150.0]),
        "itl": pytest.approx([100.0, 200.0]),
        "e2el": pytest.approx([600.0]),
        "client_queue_time": pytest.approx([100.0]),
        "e2el_including_client_queue": pytest.approx([700.0]),
    }


@pytest.mark.parametrize("told", [0, 1, None])
def test_a_server_that_counts_fewer_tokens_than_it_sent_ends_no_report(told: int | None) -> None:
    odd = record(output_tokens=told)
    assert figures.samples_ms([odd])["tpot"].tolist() == ([] if told is not None else [pytest.approx(150.0)])
    assert Goals((("tpot", 1.0), ("itl", 200.0))).met_by(odd) == (told is not None)


def test_percentiles_are_numpy_s() -> None:
    values = np.random.default_rng(1).lognormal(size=501)
    found = figures.summary(values, [50, 90, 99.9])
    ordered = np.sort(values)
    assert found["p50"] == pytest.approx(ordered[250], abs=1e-4) == found["median"]
    assert found["p90"] == pytest.approx(ordered[450], abs=1e-4)
    assert found["p99.9"] == pytest.approx(ordered[499] / 2 + ordered[500] / 2, abs=1e-4)  # between the last two
    assert (found["mean"], found["max"]) == pytest.approx((ordered.mean(), ordered[-1]), abs=1e-4)
    assert figures.summary(np.array([]), [50]) == {}


def test_failed_answers_are_in_no_latency_and_in_every_count() -> None:
    bad = failed(Outcome.STATUS, "503: busy"), failed(Outcome.STATUS, "429: later"), failed(Outcome.STATUS, "503: no")
    run = run_of(record(), *bad, failed(Outcome.TIMEOUT, "took too long"), failed(Outcome.INTERRUPTED, ""))
    assert {len(values) for name, values in figures.samples_ms(run.records).items() if name != "itl"} == {1}
    assert figures.counts(plan_of(9), run) == {
        "num_prompts": 9,
        "sent": 6,
        "completed": 1,
        "failed": 4,
        "interrupted": 1,
        "not_sent": 3,
        "errors": [
            {"kind": "HTTP 503", "count": 2, "first": "503: busy"},
            {"kind": "HTTP 429", "count": 1, "first": "429: later"},
            {"kind": "timeout", "count": 1, "first": "took too long"},
        ],
    }
    rates = figures.throughput(run, Goals((("ttft", 1e9),)))
    assert (rates["request_throughput"], rates["output_throughput"]) == (0.5, 1.5)
    assert (rates["total_token_throughput"], rates["request_goodput"], rates["good_requests"]) == (51.5, 0.5, 1)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 201}, True),
        ({"ttft": 199}, False),
        ({"tpot": 151, "e2el": 601}, True),
        ({"tpot": 149, "e2el": 601}, False),
        ({"e2el": 599}, False),
        ({"itl": 199.1}, True),  # the 99th percentile of gaps of 100 and 200
        ({"itl": 198.9}, False),
    ],
)
def test_goals(limits: dict[str, float], good: bool) -> None:
    assert Goals(tuple(limits.items())).met_by(record(3.0)) == good
    assert not Goals(tuple(limits.items())).met_by(failed(Outcome.BROKEN, ""))


def test_goals_in_both_spellings() -> None:
    assert goals_of(["ttft:200", "tpot:50"], None) == Goals((("ttft", 200.0), ("tpot", 50.0)))
    assert goals_of([], "ttft_ms=200, itl_ms=40.5") == Goals((("ttft", 200.0), ("itl", 40.5)))
    for wrong in (["ttft"], ["speed:3"], ["ttft:-1"], ["ttft:x"], ["ttft=200"]):
        with pytest.raises(ConfigError, match="no service level objective"):
            goals_of(wrong, None)


def test_a_request_that_is_held_back_is_not_a_generator_that_is_late() -> None:
    plan = plan_of(20)
    state = figures.schedule(plan, run_of(*(record(i) for i in range(20))), [50])
    assert state["schedule"] == "held back by --max-concurrency" and state["sent_late"] == 0
    assert state["lateness_ms"]["p50"] == pytest.approx(5.0) and state["max_concurrency_wait_ms"]["p50"] == 95.0
    free = [record(i, free_s=i + 0.0041, sent_s=i + 0.0042) for i in range(20)]
    assert figures.schedule(plan, run_of(*free), [50])["schedule"] == "kept"
    late = [record(i, ready_s=i + 0.099) for i in range(2)]
    state = figures.schedule(plan, run_of(*free[2:], *late), [50])
    assert (state["schedule"], state["sent_late"]) == ("late", 2)
    closed = Plan("test", {}, 0, (Session(0.0, plan.sessions[0].turns * 2),))
    assert figures.schedule(closed, run_of(record()), [50])["schedule"] == "closed loop"
    busy = run_of(*free)
    busy.cpu_s = 1.9
    assert (
        figures.schedule(plan, busy, [50])["is_saturated"]
        and not figures.schedule(plan, run_of(*free), [50])["is_saturated"]
    )


def test_lengths_and_hits_are_the_server_s() -> None:
    told = record(cached_tokens=60), record(cached_tokens=20, prompt_tokens=103, output_tokens=2)
    found = figures.lengths(told)
    assert found["prompts_of_other_length"] == 1 and found["mean_extra_prompt_tokens"] == 1.5
    assert found["answers_shorter_than_planned"] == 1 and found["tokens_per_piece"] == pytest.approx(5 / 6, abs=1e-4)
    assert figures.cached(plan_of(4), told) == {
        "requests": 2,
        "cached_tokens": 80,
        "share": pytest.approx(80 / 203, abs=1e-4),
        "shareable_share": 0.75,
    }
    assert figures.cached(plan_of(1), [record()])["cached_tokens"] is None


def test_nothing_measured_is_still_a_report() -> None:
    run = run_of(duration_s=0.0)
    found = [figures.throughput(run, Goals()), figures.schedule(plan_of(2), run, [50]), figures.lengths([])]
    assert "NaN" not in json.dumps([*found, figures.counts(plan_of(2), run)])
