"""``kvtier bench serve``: its options, its progress bar, and where its results go."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from runner.bench.names import LATENCIES, History, PromptForm, Shape, TraceFormat, WorkloadName
from runner.commands.bench_arguments import KEY_VARIABLE, Defaults, add_serve


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    bench = commands.add_parser("bench", help="measure a server under load", description="Load generators.")
    kinds = bench.add_subparsers(required=True, metavar="what")
    serve = kinds.add_parser(
        "serve",
        help="send requests to an OpenAI-compatible server on schedule, and measure its answers",
        description="An open-loop load generator: requests are sent when the schedule says so, however slow the "
        "server is. Names are those of `vllm bench serve` if the meaning is the same. More: docs/BENCHMARKING.md.",
        epilog="Status 0: every request was answered. 1: some were not, or the server died. 2: bad input, or no "
        "server. 130: Ctrl-C, with the report of what has been measured so far.",
        formatter_class=Defaults,
    )
    add_serve(serve)
    serve.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as problem:
        from runner.errors import MissingPackage

        raise MissingPackage(f"kvtier bench needs {problem.name}; pip install 'kvtier[bench]'") from problem
    from rich.console import Console

    from runner.bench import report, run
    from runner.bench.drive import Ending
    from runner.bench.show import show

    metrics, percentiles = _metrics(args.percentile_metrics), _percentiles(args.metric_percentiles)
    options = _options(args, percentiles)
    metadata, picture = dict(_pairs("--metadata", args.metadata)), None
    if args.plot is not None:
        from runner.display.pictures import check_target, pyplot

        picture = check_target(args.plot)
        pyplot()  # if it is missing, say so before anything else
    plan = _plan(args)
    target = _target_file(args, plan.workload)
    bar = _Bar(Console(stderr=True), plan.num_requests, is_shown=not (args.json or args.disable_tqdm))
    with bar:
        finished = run.execute(plan, options, bar.stage, bar.update)
    found = report.to_dict(finished, metadata, detailed=args.save_detailed)
    text = json.dumps(found, indent=2, allow_nan=False)
    try:
        if target is not None:
            _write(target, text)
    finally:  # what was measured is told, whether or not it could be kept
        if args.json:
            print(text)
        else:
            show(found, metrics, percentiles, Console())
    if picture is not None:
        from runner.bench.plot import draw

        draw(finished, picture)
    if finished.run.ending is Ending.INTERRUPTED:
        return 130
    return 0 if found["ok"] else 1


def _plan(args: argparse.Namespace) -> Any:
    from kvtier import ConfigError
    from runner.bench.traces import TraceOptions, read
    from runner.bench.workloads import make

    name = WorkloadName(args.dataset_name or (WorkloadName.TRACE if args.trace else WorkloadName.RANDOM).value)
    rate = float("inf") if args.request_rate is None else args.request_rate
    if (name is WorkloadName.TRACE) != (args.trace is not None):
        raise ConfigError(f"--dataset-name {name.value} with --trace {args.trace}: one goes with the other")
    if args.trace is None:
        shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
        return make(name, shape, rate, args.burstiness, args.seed)
    options = TraceOptions(
        args.trace,
        TraceFormat(args.trace_format) if args.trace_format else None,
        args.num_prompts,
        args.self_timed,
        args.time_scale,
        args.length_scale,
        args.max_input_len,
        args.timed_trace_chunk_hash_size,
        args.timed_trace_sec_multiplier,
        args.max_think_time,
    )
    return read(options, rate, args.burstiness, args.seed, is_rate_given=args.request_rate is not None)


def _options(args: argparse.Namespace, percentiles: tuple[float, ...]) -> Any:
    from kvtier import ConfigError
    from runner.bench.client import Target
    from runner.bench.goals import goals_of
    from runner.bench.run import Options

    headers = _pairs("--header", args.header)
    base_url, basic_auth = _address(args.base_url or f"http://{args.host}:{args.port}")
    if basic_auth and (args.api_key or any(name.lower() == "authorization" for name, _ in headers)):
        raise ConfigError("--base-url has a user, and there is a key too: both are Authorization, use one of them")
    api_key = args.api_key or ("" if basic_auth else os.environ.get(KEY_VARIABLE, ""))
    target = Target(
        base_url,
        args.endpoint,
        api_key.strip() or None,
        headers,
        args.ssl_ca_certs,
        args.insecure,
        args.timeout,
        args.connect_timeout,
        basic_auth,
    )
    return Options(
        target,
        model=args.model,
        max_concurrency=args.max_concurrency,
        ready_s=args.ready_check_timeout_sec,
        warmups=args.num_warmups,
        prompt_form=PromptForm(args.prompt_form or ("text" if "chat" in args.endpoint else "ids")),
        history=History(args.history),
        token_ids=args.token_ids,
        tokenizer=args.tokenizer,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra_body=args.extra_body,
        goals=goals_of(args.goodput, args.slo),
        percentiles=percentiles,
    )


def _address(given: str) -> tuple[str, str | None]:
    """(The address without a user, ``user:password`` if there is one); no error tells the password."""
    from kvtier import ConfigError

    wrong = f"--base-url {given.rpartition('@')[2]!r} is not an address such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(given)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of its port, or of brackets
        is_usable = False
    if not is_usable:
        raise ConfigError(wrong)
    user, is_there, host = parts.netloc.rpartition("@")
    address = parts._replace(netloc=host).geturl().rstrip("/")
    if "@" in address:
        raise ConfigError(f"{wrong}: an @, / or ? in a password is written as %40, %2F or %3F")
    return address, unquote(user) if is_there else None


def _write(target: Path, text: str) -> None:
    from kvtier import ConfigError

    try:
        target.write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"{target} cannot be written: {problem.strerror or problem}") from problem


def _pairs(flag: str, given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    for one in given:
        if "=" not in one[1:]:
            from kvtier import ConfigError

            raise ConfigError(f"{flag} {one!r} is not KEY=VALUE")
    return tuple((key, value) for key, _, value in (one.partition("=") for one in given))


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in LATENCIES:
            from kvtier import ConfigError

            raise ConfigError(f"--percentile-metrics: there is no {name!r}, but {', '.join(LATENCIES)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= one <= 100 for one in found):
        from kvtier import ConfigError

        raise ConfigError(f"--metric-percentiles {text!r} is not a list such as 50,90,99")
    return found


def _target_file(args: argparse.Namespace, workload: str) -> Path | None:
    """Where the JSON goes; raises ``ConfigError`` now, not after the run, if it cannot go there."""
    from datetime import datetime

    from kvtier import ConfigError

    if args.output is None and not args.save_result:
        return None
    name = args.result_filename or f"kvtier-{workload}-{datetime.now():%Y%m%d-%H%M%S}.json"
    path = Path(args.output) if args.output is not None else Path(args.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"{path} cannot be written: {problem.strerror or problem}") from problem
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written")
    return path


class _Bar:
    """A line that says what goes on; nothing if nobody watches."""

    def __init__(self, console: Any, requests: int, *, is_shown: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}")
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,  # its thread would make the generator late
            disable=not (is_shown and console.is_terminal),
        )
        self._task = self._bar.add_task("starting", total=requests, said="")
        self._left = 0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        """Something other than requests goes on."""
        self._bar.update(self._task, description=name or "answered", refresh=True)

    def update(self, sent: int, done: int, failed: int) -> None:
        """Called 20 times a second; draws twice a second."""
        self._left -= 1
        if self._left > 0:
            return
        self._left = 10
        said = f"{sent - done - failed} under way" + (f", {failed} failed" if failed else "")
        self._bar.update(self._task, completed=done, said=said, refresh=True)
