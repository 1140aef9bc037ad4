"""Figures of a run: percentiles, rates, hits, errors, and how well the generator kept its own schedule.

Promises   latencies are of whole answers only; answers that failed are counted beside them. Names are vLLM's if they
           mean the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.bench.drive import Run
from runner.bench.goals import Goals
from runner.bench.plan import Plan
from runner.bench.record import Outcome, Record
from runner.bench.sharing import shareable_tokens

LATE_MS = 10.0
"""A schedule is kept if 99 % of the requests are sent no later than this."""
BUSY = 0.9
"""Above this part of a core the generator itself slows what it measures."""


class Schedule(Enum):
    """Whether the load was the open-loop load that was asked for."""

    KEPT = "kept"
    LATE = "late"
    HELD_BACK = "held back by --max-concurrency"
    CLOSED = "closed loop"


def samples_ms(records: Sequence[Record]) -> dict[str, NDArray[np.float64]]:
    """Milliseconds by latency, over whole answers."""
    whole = [record for record in records if record.is_ok]
    gaps = [np.diff(record.times) for record in whole]
    found: dict[str, Any] = {
        "ttft": [record.ttft_s for record in whole],
        "tpot": [record.tpot_s for record in whole if record.tpot_s is not None],
        "itl": np.concatenate(gaps) if gaps else [],
        "e2el": [record.end_s - record.sent_s for record in whole],
        "client_queue_time": [record.queued_s for record in whole],
        "e2el_including_client_queue": [record.end_s - record.due_s for record in whole],
    }
    return {name: np.asarray(values, np.float64) * 1e3 for name, values in found.items()}


def summary(values: NDArray[np.float64], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, spread, largest and percentiles (linear between two values); empty if there are no values."""
    if not len(values):
        return {}
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{p:g}": value for p, value in zip(percentiles, np.percentile(values, percentiles), strict=True)}
    return {name: round(float(value), 4) for name, value in (found | {"max": values.max()}).items()}


def throughput(run: Run, goals: Goals) -> dict[str, Any]:
    """Rates over the run's duration."""
    whole = [record for record in run.records if record.is_ok]
    seconds = run.duration_s or float("nan")
    prompt = sum(_prompt_tokens(record) for record in whole)
    output = sum(record.produced for record in whole)
    good = sum(goals.met_by(record) for record in run.records)
    rates = {
        "request_throughput": len(whole) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }
    found: dict[str, Any] = {"total_input_tokens": prompt, "total_output_tokens": output}
    found |= {name: round(value, 4) for name, value in rates.items()} if run.duration_s else dict.fromkeys(rates)
    found["goodput_limits_ms"] = dict(goals.limits_ms)
    if goals.limits_ms:
        found["request_goodput"] = round(good / seconds, 4) if run.duration_s else None
        found["good_requests"] = good
    return found


def counts(plan: Plan, run: Run) -> dict[str, Any]:
    """Requests by what became of them; errors by kind, the commonest first, each with its first message."""
    failed = [record for record in run.records if not record.is_ok and record.outcome is not Outcome.INTERRUPTED]
    first: dict[str, str] = {}
    for record in failed:
        first.setdefault(_kind(record), record.error)
    kinds = Counter(map(_kind, failed))
    completed = sum(record.is_ok for record in run.records)
    return {
        "num_prompts": plan.num_requests,
        "sent": len(run.records),
        "completed": completed,
        "failed": len(failed),
        "interrupted": len(run.records) - completed - len(failed),
        "not_sent": plan.num_requests - len(run.records),
        "errors": [{"kind": kind, "count": count, "first": first[kind]} for kind, count in kinds.most_common()],
    }


def _kind(record: Record) -> str:
    return f"HTTP {record.error[:3]}" if record.outcome is Outcome.STATUS else record.outcome.value


def _prompt_tokens(record: Record) -> int:
    return record.planned_prompt if record.prompt_tokens is None else record.prompt_tokens


def lengths(records: Sequence[Record]) -> dict[str, Any]:
    """Whether prompts and answers had the lengths of the plan, as the server counted them.

    The mean is over all prompts that it counted, least and most over those of another length.
    """
    whole = [record for record in records if record.is_ok]
    told = [record for record in whole if record.prompt_tokens is not None]
    pieces = sum(len(record.times) for record in whole)
    extra = [(record.prompt_tokens or 0) - record.planned_prompt for record in told]
    other = [n for n in extra if n]
    return {
        "prompts_counted_by_server": len(told),
        "prompts_of_other_length": len(other),
        "mean_extra_prompt_tokens": round(sum(extra) / len(extra), 2) if extra else None,
        "min_extra_prompt_tokens": min(other, default=None),
        "max_extra_prompt_tokens": max(other, default=None),
        "answers_shorter_than_planned": sum(record.produced < record.planned_output for record in whole),
        "tokens_per_piece": round(sum(record.produced for record in whole) / pieces, 4) if pieces else None,
    }


def cached(plan: Plan, records: Sequence[Record]) -> dict[str, Any]:
    """Prompt tokens that the server says it had already; None if it says nothing.

    ``shareable_share``: of all prompts of the plan, what a cache that forgets nothing could have had.
    """
    shareable, planned = shareable_tokens(plan), plan.prompt_tokens
    ideal = {"shareable_share": round(shareable / planned, 4) if planned else 0.0}
    told = [record for record in records if record.is_ok and record.cached_tokens is not None]
    if not told:
        return {"requests": 0, "cached_tokens": None, "share": None} | ideal
    hits = sum(record.cached_tokens or 0 for record in told)
    prompt = sum(_prompt_tokens(record) for record in told)
    return {"requests": len(told), "cached_tokens": hits, "share": round(hits / prompt, 4) if prompt else 0.0} | ideal


def schedule(plan: Plan, run: Run, percentiles: Sequence[float]) -> dict[str, Any]:
    """How late the generator was, whether its figures are those of an open loop, and how busy it was."""
    opened = [record for record in run.records if record.is_open]
    late = np.array([record.late_s for record in run.records]) * 1e3
    held = np.array([record.free_s - record.ready_s for record in run.records]) * 1e3
    state, p99 = Schedule.KEPT, float(np.percentile(late, 99)) if len(late) else 0.0
    if len(plan.sessions) == 1 < plan.num_requests:
        state = Schedule.CLOSED
    elif p99 > LATE_MS:
        state = Schedule.LATE
    elif len(held) and np.percentile(held, 99) > LATE_MS:
        state = Schedule.HELD_BACK
    busy = run.cpu_s / run.duration_s if run.duration_s else 0.0
    return {
        "schedule": state.value,
        "clock_sent": len(opened),
        "sent_late": int((late > LATE_MS).sum()),
        "lateness_ms": summary(late, percentiles),
        "max_concurrency_wait_ms": summary(held, percentiles),
        "loop_lag_ms": summary(np.array(run.loop_late_s) * 1e3, percentiles),
        "cpu_share": round(busy, 4),
        "is_saturated": busy > BUSY,
        "peak_concurrency": run.peak,
    }
