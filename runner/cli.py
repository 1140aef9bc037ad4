"""The ``kvtier`` command."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; exit status 0 if all went well, 1 if a result is wrong, 2 for input that cannot work."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130
    except Exception as problem:
        from kvtier.errors import KVTierError  # late, since it takes seconds to import

        if not isinstance(problem, KVTierError):
            raise
        print(f"kvtier: {problem}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description="The KV cache for hybrid-attention language models.")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="serve long requests back to back on a pool that is too small for two of them",
        description="Serves long prompts S0, S1, S0, ... back to back, on a device pool that holds about one and a "
        "half of them, and checks that S0's answer is the same when its prefix comes back from host memory.",
    )
    demo.add_argument(
        "--model", help="a folder or hub id of a transformers causal LM (default: the bundled tiny model)"
    )
    demo.add_argument("--device", default="cpu", help="cpu, or cuda:N with --host-memory 0 (default: cpu)")
    _add_attention(demo)
    demo.add_argument("--tokens", type=_positive, default=90_112, help="prompt length (default: 90112)")
    demo.add_argument(
        "--requests", type=_positive, default=3, help="requests, alternating between two prompts (default: 3)"
    )
    demo.add_argument("--device-memory", help="device pools, such as 8GiB (default: what one and a half requests need)")
    demo.add_argument(
        "--host-memory", help="host tier, such as 16GiB; 0 turns it off (default: enough for all prompts)"
    )
    demo.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    demo.set_defaults(run=_demo)
    _add_verify(commands)
    return parser


def _add_verify(commands: Any) -> None:
    from runner.verify.compare import TOLERANCE

    verify = commands.add_parser(
        "verify",
        help="check that a model says the same whatever its cache went through",
        description="Serves one set of prompts cold and then with hits from either tier, preempted, through failing "
        "copies and more; compares the logits of every generated token with the cold run's, and checks that each "
        "scenario has really happened. A difference is traced to the first layer and block whose K or V is not what "
        "the cold run wrote.",
        epilog="What is allowed: no difference in a single bit where each step computes what a step of the cold run "
        "did (most hits: chunks are cut so that a hit ends where a chunk did) and the forward pass repeats itself bit "
        "by bit. Elsewhere other chunks and batches round otherwise: then "
        + ", ".join(f"{allowed:g} in {dtype}" for dtype, allowed in TOLERANCE.items())
        + ", times the largest logit of that token if above 1 (K and V likewise). The scenario 'other chunks' shows "
        "what rounding alone does.",
    )
    verify.add_argument(
        "--model", help="a folder or hub id of a transformers causal LM (default: the bundled tiny model)"
    )
    verify.add_argument("--device", default="cpu", help="cpu or cuda:N (default: cpu)")
    _add_attention(verify)
    verify.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the checkpoint's)")
    verify.add_argument(
        "--tokens", type=_positive, help="prompt length, at most (default: 2048, if the model takes it)"
    )
    verify.add_argument("--prompts", type=_positive, default=3, help="how many, 2 or more (default: 3)")
    verify.add_argument("--new-tokens", type=_positive, default=24, help="generated for each, 2 or more (default: 24)")
    verify.add_argument(
        "--tolerance", type=_not_negative, help="allowed where bits cannot be demanded (default: by dtype)"
    )
    verify.add_argument("--json", action="store_true", help="print the report as JSON and nothing else on stdout")
    verify.set_defaults(run=_verify)


def _add_attention(command: Any) -> None:
    command.add_argument(
        "--attention",
        default="auto",
        help="auto, flashinfer or reference; auto is FlashInfer where it can run the model (default: auto)",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def _demo(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(stderr=args.json, quiet=args.json)
    with console.status("Importing torch and transformers"):
        from runner import demo
        from runner.show import show

        _quiet()
    memory = {name: value for name in ("device_memory", "host_memory") if (value := getattr(args, name)) is not None}
    with _Bars(console, args.requests) as bars:
        report = demo.run(
            args.model,
            args.device,
            args.tokens,
            args.requests,
            progress=bars.update,
            on_loaded=bars.loaded,
            attention=args.attention,
            **memory,
        )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, console)
    return 0 if report.ok else 1


def _verify(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with console.status("Importing torch and transformers"):
        import torch

        from runner import verify
        from runner.verify.show import show

        _quiet()
    if args.model is None:
        torch.set_num_threads(1)  # a tiny model's steps are over before a second thread has woken up
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading the model", total=None)
        report = verify.run(
            args.model,
            args.device,
            args.tokens,
            args.prompts,
            args.new_tokens,
            args.dtype,
            args.tolerance,
            progress=lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
            attention=args.attention,
        )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, Console())
    return 0 if report.ok else 1


def _quiet() -> None:
    """No bars and notes of transformers between ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


class _Bars:
    """A progress bar per request, and a spinner while the model loads."""

    def __init__(self, console: Any, requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._requests = requests
        self._tasks: dict[int, Any] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> _Bars:
        self._progress.start()
        self._loading = self._progress.add_task("loading the model", total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._loading in self._progress.task_ids:
            self._progress.remove_task(self._loading)
        self._progress.stop()

    def loaded(self, llm: Any) -> None:
        """The model is there; requests begin."""
        self._progress.remove_task(self._loading)

    def update(self, request: int, done: int, total: int) -> None:
        """Request ``request`` has the KV of ``done`` of its ``total`` prompt tokens."""
        if request not in self._tasks:
            self._tasks[request] = self._progress.add_task(f"request {request + 1} of {self._requests}", total=total)
        self._progress.update(self._tasks[request], completed=done)


if __name__ == "__main__":
    sys.exit(main())
