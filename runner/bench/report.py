"""A finished run as JSON, with all that its figures depend on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import aiohttp
import numpy as np

from runner.bench import figures
from runner.bench.drive import Ending
from runner.bench.record import Record
from runner.bench.run import Finished


def to_dict(finished: Finished, metadata: Mapping[str, str], *, detailed: bool = False) -> dict[str, Any]:
    """Everything; with ``detailed`` a row for each request too."""
    run, options = finished.run, finished.options
    found: dict[str, Any] = {
        "date": finished.date.isoformat(timespec="seconds"),
        "ok": is_ok(finished),
        "ending": run.ending.value,
        "duration": round(run.duration_s, 4),
        "server": finished.server.to_dict(),
        "workload": finished.plan.describe(),
        "requests": _requests(finished),
        "counts": figures.counts(finished.plan, run),
        "generator": figures.schedule(finished.plan, run, options.percentiles),
        "lengths": figures.lengths(run.records),
        "cache": figures.cached(finished.plan, run.records),
        **figures.throughput(run, options.goals),
    }
    for name, values in figures.samples_ms(run.records).items():
        found |= {f"{stat}_{name}_ms": value for stat, value in figures.summary(values, options.percentiles).items()}
    found["client"] = _client()
    found["metadata"] = dict(metadata)
    if detailed:
        found["records"] = [_row(record) for record in run.records]
    return found


def is_ok(finished: Finished) -> bool:
    """Whether every request of the plan was sent and got a whole answer."""
    run = finished.run
    whole = all(record.is_ok for record in run.records)
    return run.ending is Ending.COMPLETE and whole and len(run.records) == finished.plan.num_requests


def _requests(finished: Finished) -> dict[str, Any]:
    """How they were sent. No key, and of other headers the names alone."""
    options, target = finished.options, finished.options.target
    return {
        "endpoint": target.endpoint,
        "prompt_form": options.prompt_form.value,
        "history": options.history.value,
        "token_ids": {"source": finished.alphabet.source, "count": len(finished.alphabet.ids),
                      "first": int(finished.alphabet.ids[0]), "last": int(finished.alphabet.ids[-1])},
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "extra_body": dict(options.extra_body),
        "headers": [name for name, _ in target.headers],
        "api_key": target.api_key is not None,
        "basic_auth": target.basic_auth is not None,
        "max_concurrency": options.max_concurrency,
        "num_warmups": options.warmups,
        "timeout_s": target.timeout_s,
        "connect_timeout_s": target.connect_timeout_s,
    }  # fmt: skip


def _client() -> dict[str, str]:
    try:
        own = version("kvtier")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "kvtier": own,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "aiohttp": aiohttp.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _row(record: Record) -> dict[str, Any]:
    """One request; times in seconds since the first one was due."""
    return {
        "session": record.session,
        "turn": record.turn,
        "outcome": record.outcome.value,
        "error": record.error,
        "due": record.due_s,
        "sent": record.sent_s,
        "end": record.end_s,
        "ttft": record.ttft_s if record.times else None,
        "itls": np.diff(record.times).round(6).tolist(),
        "planned_input_len": record.planned_prompt,
        "input_len": record.prompt_tokens,
        "output_len": record.produced,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
    }
