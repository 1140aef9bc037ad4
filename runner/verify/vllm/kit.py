"""Starts the two engines' processes, and compares what they report.

Promises   this process imports no vLLM. A child that cannot run raises ``ConfigError`` with the engine's own reason.
           One that ends or falls silent amid a scenario makes that scenario unsound. No child is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtier.machine.errors import ConfigError
from kvtier.machine.reference_engine import as_main
from runner.errors import MissingPackage
from runner.verify.vllm.child import Order
from runner.verify.vllm.compare import LIMITS
from runner.verify.vllm.log import reason_in
from runner.verify.vllm.plan import Plan
from runner.verify.vllm.report import Report, report_of, result_of
from runner.verify.vllm.scenarios import RAISED, REFERENCE, SCENARIOS
from runner.verify.vllm.served import Answer, Facts, Happened

Progress = Callable[[str, int, int], None]
"""Called with (what begins, scenarios done, scenarios)."""
PATIENCE_S = 1_800.0
_POLL_S = 0.1
_GRACE_S = 10.0
_EVERY = 1 + len(REFERENCE) + len(SCENARIOS)


def kvtier_config(host_bytes: int) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for kvtier's connector."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_memory": host_bytes},
    }


def run(
    model: str,
    kv_transfer_config: Mapping[str, Any] | None = None,
    tokens: int | None = None,
    prompts: int = 3,
    new_tokens: int = 24,
    tolerance: float | None = None,
    blocks: int | None = None,
    chunk_tokens: int | None = None,
    engine_args: Mapping[str, Any] | None = None,
    patience_s: float = PATIENCE_S,
    progress: Progress | None = None,
) -> Report:
    """Runs the kit on ``model`` with the connector of ``kv_transfer_config``; None: kvtier's.

    ``blocks``: of the device pool; None: a prompt and a half. ``tolerance``: of a logprob; None: by dtype.
    ``engine_args``: more of vLLM's ``EngineArgs``, for both engines. ``patience_s``: a scenario that takes longer is
    given up. Raises ``ConfigError`` and ``MissingPackage``.
    """
    if find_spec("vllm") is None:
        raise MissingPackage("--engine vllm needs vLLM in this Python: run kvtier in vLLM's own environment")
    begun = time.monotonic()
    order = Order(model, prompts, new_tokens, tokens, chunk_tokens, engine_args=dict(engine_args or {}))
    with tempfile.TemporaryDirectory(prefix="kvtier-verify-") as folder:
        comparing = _Run(order, Path(folder), patience_s, progress)
        report = comparing.run(kv_transfer_config, blocks, tolerance)
    report.wall_s = time.monotonic() - begun
    return report


class _Run:
    """Both children, one after the other."""

    def __init__(self, order: Order, folder: Path, patience_s: float, progress: Progress | None) -> None:
        self._order = order
        self._folder = folder
        self._patience_s = patience_s
        self._progress = progress or (lambda *_: None)
        self._done = 0

    def run(self, config: Mapping[str, Any] | None, blocks: int | None, tolerance: float | None) -> Report:
        """The report of all scenarios."""
        made, facts, reference, without = self._reference()
        plan, limit = Plan(**made["plan"]), LIMITS.get(facts.dtype) if tolerance is None else tolerance
        if limit is None:
            raise ConfigError(f"no limit is known for {facts.dtype}; give one with --tolerance")
        config = kvtier_config(made["kv_bytes"]) if config is None else config
        order = replace(
            self._order,
            plan=plan.to_dict(),
            kv_bytes=made["kv_bytes"],
            blocks=blocks or made["blocks"],
            kv_transfer_config=dict(config),
        )
        report: Report | None = None
        for event in self._events(order, "the engine with the connector"):
            if "facts" in event:
                report = report_of(order.model, str(config.get("kv_connector")), Facts(**event["facts"]), plan, limit)
                report.results = [result_of(h, reference, facts.dtype, limit) for h in without]
            elif "happened" in event:
                assert report is not None
                happened = Happened.of(event["happened"])
                report.results.append(result_of(happened, reference, facts.dtype, limit))
        assert report is not None, "a child that has not started raises"
        seen = {result.name for result in report.results}
        for scenario in SCENARIOS:
            if scenario.name not in seen:
                lost = Happened(scenario.name, missing=["the engine had ended before"])
                report.results.append(result_of(lost, reference, facts.dtype, limit))
        return report

    def _reference(self) -> tuple[dict[str, Any], Facts, dict[str, Answer], list[Happened]]:
        """What the engine without a connector said, and made."""
        made: dict[str, Any] = {}
        facts: Facts | None = None
        happened = []
        for event in self._events(self._order, "the engine without a connector"):
            made |= {name: event[name] for name in ("plan", "kv_bytes", "blocks") if name in event}
            if "facts" in event:
                facts = Facts(**event["facts"])
            elif "happened" in event:
                happened.append(Happened.of(event["happened"]))
        problems = [v for h in happened for v in h.violations]
        if facts is None or not happened or happened[0].violations:
            raise ConfigError(f"the engine without a connector served nothing to compare with: {problems}")
        cold, without = happened[0], happened[1:]
        return made, facts, {a.name: a for s in cold.served for a in s.answers}, without

    def _events(self, order: Order, what: str) -> Iterator[dict[str, Any]]:
        """What a child reports, as it happens. A child that ends otherwise than it should is told as an event."""
        self._progress(f"starting {what}", self._done, _EVERY)
        begins = ""
        for event in _Child(self._folder, order, self._patience_s).events():
            if "refused" in event and not begins:
                raise ConfigError(f"{what} cannot run: {event['refused']}")
            if "refused" in event:
                problem = f"{RAISED} or ended: {event['refused']}"
                yield {"happened": Happened(begins, violations=[problem]).to_dict()}
                return
            if "begins" in event:
                begins = event["begins"]
                self._progress(begins, self._done, _EVERY)
            self._done += "happened" in event
            yield event


class _Child:
    """One process, its order, its report and its log."""

    def __init__(self, folder: Path, order: Order, patience_s: float) -> None:
        name = "reference" if order.plan is None else "connector"
        self._order, self._report, self._log = (folder / f"{name}.{end}" for end in ("order", "report", "log"))
        self._order.write_text(json.dumps(asdict(order)), encoding="utf-8")
        self._report.touch()
        self._patience_s = patience_s

    def events(self) -> Iterator[dict[str, Any]]:
        """Each as it is written. The last is "refused" if the process fails, ends early or falls silent."""
        command = [sys.executable, *as_main("runner.verify.vllm.child", str(self._order), str(self._report))]
        with self._log.open("wb") as log, self._report.open(encoding="utf-8") as report:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                heard, line = time.monotonic(), ""
                while True:
                    has_ended = process.poll() is not None
                    for part in report:
                        line += part
                        if line.endswith("\n"):
                            yield self._event(json.loads(line))
                            heard, line = time.monotonic(), ""
                    if has_ended:
                        break
                    if time.monotonic() - heard > self._patience_s:
                        yield {"refused": f"nothing was heard for {self._patience_s:g} s (--patience)"}
                        return
                    time.sleep(_POLL_S)
                if process.returncode not in (0, 2):
                    yield {"refused": self._reason(f"the process ended with status {process.returncode}")}
            finally:
                _end(process)

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        if "refused" in event:
            return {"refused": self._reason(event["refused"])}
        if "happened" in event and any(RAISED in v for v in event["happened"]["violations"]):
            event["happened"]["violations"].append(f"first in its log: {self._reason('nothing')}")
        return event

    def _reason(self, said: str) -> str:
        """An engine core in a process of its own tells its reason in the log only."""
        return reason_in(self._log.read_text(encoding="utf-8", errors="replace")) or said


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that this one has started, and what it has left in its session."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + _GRACE_S
        if not _signal(process, which):
            break
        while _signal(process, 0) and time.monotonic() < end:
            process.poll()
            time.sleep(_POLL_S)
    process.wait()


def _signal(process: subprocess.Popen[bytes], which: int) -> bool:
    """Signals the whole session (0: nobody); False if there is nobody any more."""
    try:
        os.killpg(process.pid, which)
    except ProcessLookupError:
        return False
    return True
