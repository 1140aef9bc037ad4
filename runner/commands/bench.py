"""``kvtier bench serve``: its options, its progress bar, and where its results go."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from runner.bench.names import LATENCIES, History, PromptForm, Shape, WorkloadName
from runner.commands.arguments import json_object, not_negative, positive

KEY_VARIABLE = "OPENAI_API_KEY"


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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_server(serve)
    _add_workload(serve)
    _add_load(serve)
    _add_result(serve)
    serve.set_defaults(run=run)


def _add_server(serve: argparse.ArgumentParser) -> None:
    server = serve.add_argument_group("server")
    server.add_argument("--base-url", help="such as https://host:8000 (default: http://HOST:PORT)")
    server.add_argument("--host", default="127.0.0.1", help="of the server")
    server.add_argument("--port", type=positive, default=8000, help="of the server")
    server.add_argument("--endpoint", default="/v1/completions", help="what requests are sent to")
    server.add_argument("--model", help="the name that the server knows (default: its first)")
    server.add_argument("--api-key", help=f"sent as a bearer token; {KEY_VARIABLE} may hold it instead, where other "
                        "users of this machine do not see it")  # fmt: skip
    server.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="further headers of each request")
    server.add_argument("--ssl-ca-certs", help="a file of certificates to trust instead of the system's")
    server.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    server.add_argument("--timeout", type=not_negative, default=3600.0, help="seconds that a request may take in all")
    server.add_argument("--connect-timeout", type=not_negative, default=30.0, help="seconds that a connection may take")
    server.add_argument("--ready-check-timeout-sec", type=not_negative, default=0.0, help="seconds to wait for a "
                        "server that does not answer yet")  # fmt: skip


def _add_workload(serve: argparse.ArgumentParser) -> None:
    work = serve.add_argument_group("workload")
    work.add_argument("--dataset-name", choices=[one.value for one in WorkloadName], default=WorkloadName.RANDOM.value,
                      help="what is asked")  # fmt: skip
    for field in fields(Shape):
        kind = _whole if field.type == "int" else not_negative
        work.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=SIZES[field.name])
    work.add_argument("--seed", type=_whole, default=0, help="of lengths, tokens, order, arrivals and think times")
    form = serve.add_argument_group("requests")
    form.add_argument("--prompt-form", choices=[one.value for one in PromptForm], default=PromptForm.IDS.value,
                      help="token ids, or text of exactly as many tokens (needs /tokenize or --tokenizer)")  # fmt: skip
    form.add_argument("--history", choices=[one.value for one in History], default=History.ANSWERS.value, help="what "
                      "stands for the answers in later turns: the server's, or scripted tokens")  # fmt: skip
    form.add_argument("--token-ids", type=_id_range, metavar="FIRST:LAST", help="prompts are made of these (default: "
                      "those of English words, by --tokenizer or the server's /tokenize)")  # fmt: skip
    form.add_argument("--tokenizer", help="a tokenizer.json or a folder with one (default: the server's /tokenize)")
    form.add_argument("--ignore-eos", action="store_true", help="have answers go on to their planned length")
    form.add_argument("--temperature", type=not_negative, default=0.0, help="of sampling")
    form.add_argument("--extra-body", type=json_object, default={}, help="further fields of each request, in JSON")


def _add_load(serve: argparse.ArgumentParser) -> None:
    load = serve.add_argument_group("load")
    load.add_argument("--request-rate", type=_rate, default=float("inf"), help="sessions that start in a second, on "
                      "average; inf: all at once")  # fmt: skip
    load.add_argument("--burstiness", type=_rate, default=1.0, help="shape of the gamma distribution of gaps: 1 is "
                      "Poisson, less comes in bursts, inf is a clock's tick")  # fmt: skip
    load.add_argument("--max-concurrency", type=positive, help="requests under way at once (default: no limit)")
    load.add_argument("--num-warmups", type=_whole, default=0, help="small requests before the first that counts")


def _add_result(serve: argparse.ArgumentParser) -> None:
    result = serve.add_argument_group("results")
    result.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el,client_queue_time",
                        help=f"what the table shows, of {', '.join(LATENCIES)}")  # fmt: skip
    result.add_argument("--metric-percentiles", default="50,90,99", help="which percentiles")
    result.add_argument("--goodput", nargs="+", default=[], metavar="KEY:VALUE", help="limits in milliseconds that a "
                        "good answer keeps: ttft, tpot, itl, e2el")  # fmt: skip
    result.add_argument("--slo", help="the same in another spelling: ttft_ms=200,itl_ms=50")
    result.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    result.add_argument("--output", help="write the report to this JSON file")
    result.add_argument("--save-result", action="store_true", help="write it to --result-dir, named by the date")
    result.add_argument("--result-dir", help="folder for --save-result (default: the current one)")
    result.add_argument("--result-filename", help="name for --save-result")
    result.add_argument("--save-detailed", action="store_true", help="a row for each request too")
    result.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="what else the JSON should say")
    result.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


SIZES = {
    "num_prompts": "requests in all; of a trace, at most",
    "random_input_len": "random: tokens of a prompt",
    "random_output_len": "random: tokens of an answer",
    "random_range_ratio": "random: lengths differ by up to this part, each way",
    "prefix_repetition_prefix_len": "prefix_repetition: tokens of a shared prefix",
    "prefix_repetition_suffix_len": "prefix_repetition: tokens of a prompt's own",
    "prefix_repetition_num_prefixes": "prefix_repetition: different prefixes",
    "prefix_repetition_output_len": "prefix_repetition: tokens of an answer",
    "turns": "conversations: requests of each",
    "system_len": "conversations: tokens that all begin with",
    "first_turn_len": "conversations: further tokens of the first prompt",
    "turn_len": "conversations: new tokens of each later prompt",
    "turn_output_len": "conversations: tokens of an answer",
    "think_time": "conversations: mean seconds from an answer to the next prompt, exponential",
    "long_len": "back_to_back: tokens of a prompt",
    "long_output_len": "back_to_back: tokens of an answer",
    "long_distinct": "back_to_back: different prompts, sent in turn",
}


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def _rate(text: str) -> float:
    """Above 0; infinity counts."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of token ids, such as 1000:30000")
    return int(first), int(last)


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
    metadata = dict(_pairs("--metadata", args.metadata))
    target = _target_file(args)
    plan = _plan(args)
    bar = _Bar(Console(stderr=True), plan.num_requests, is_shown=not (args.json or args.disable_tqdm))
    with bar:
        finished = run.execute(plan, options, bar.stage, bar.update)
    found = report.to_dict(finished, metadata, detailed=args.save_detailed)
    if target is not None:
        target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found, metrics, percentiles, Console())
    if finished.run.ending is Ending.INTERRUPTED:
        return 130
    return 0 if found["ok"] else 1


def _plan(args: argparse.Namespace) -> Any:
    from runner.bench.workloads import make

    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    return make(WorkloadName(args.dataset_name), shape, args.request_rate, args.burstiness, args.seed)


def _options(args: argparse.Namespace, percentiles: tuple[float, ...]) -> Any:
    from kvtier import ConfigError
    from runner.bench.client import Target
    from runner.bench.goals import goals_of
    from runner.bench.run import Options

    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {base_url!r} is not an address such as http://127.0.0.1:8000")
    target = Target(
        base_url,
        args.endpoint,
        args.api_key or os.environ.get(KEY_VARIABLE),
        _pairs("--header", args.header),
        args.ssl_ca_certs,
        args.insecure,
        args.timeout,
        args.connect_timeout,
    )
    return Options(
        target,
        args.model,
        args.max_concurrency,
        args.ready_check_timeout_sec,
        args.num_warmups,
        PromptForm(args.prompt_form),
        History(args.history),
        args.token_ids,
        args.tokenizer,
        args.ignore_eos,
        args.temperature,
        args.extra_body,
        goals_of(args.goodput, args.slo),
        percentiles,
    )


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


def _target_file(args: argparse.Namespace) -> Path | None:
    """Where the JSON goes; raises ``ConfigError`` now, not after the run, if it cannot go there."""
    from datetime import datetime

    from kvtier import ConfigError

    if args.output is None and not args.save_result:
        return None
    name = args.result_filename or f"kvtier-{args.dataset_name}-{datetime.now():%Y%m%d-%H%M%S}.json"
    path = Path(args.output) if args.output is not None else Path(args.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as problem:
        raise ConfigError(f"{path} cannot be written: {problem.strerror or problem}") from problem
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
