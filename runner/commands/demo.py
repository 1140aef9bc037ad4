"""``kvtier demo``: its options, and its progress bars."""

from __future__ import annotations

import argparse
from typing import Any

from runner.commands.arguments import add_attention, add_kv_options, positive, quiet_transformers, show_report
from runner.commands.checks import check_engine


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    demo = commands.add_parser(
        "demo",
        help="serve long requests back to back on a pool that is too small for two of them",
        description="Serves long prompts S0, S1, S0, ... back to back, on a device pool that holds about one and a "
        "half of them, and checks that S0's answer is the same when its prefix comes back from host memory.",
    )
    demo.add_argument(
        "--model", help="a folder, GGUF file or hub id of a transformers causal LM (default: the bundled tiny model)"
    )
    demo.add_argument("--device", default="cpu", help="cpu or cuda:N (default: cpu)")
    add_attention(demo)
    demo.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the checkpoint's)")
    demo.add_argument("--tokens", type=positive, default=90_112, help="prompt length (default: 90112)")
    demo.add_argument(
        "--requests", type=positive, default=3, help="requests, alternating between two prompts (default: 3)"
    )
    demo.add_argument("--device-memory", help="device pools, such as 8GiB (default: what one and a half requests need)")
    demo.add_argument(
        "--host-memory", help="host tier, such as 16GiB; 0 turns it off (default: enough for all prompts)"
    )
    add_kv_options(demo)
    demo.add_argument(
        "--shared",
        metavar="URI",
        nargs="?",
        const="",
        help="show instead what a remote tier does: an engine is killed and started again, another one "
        "shares its blocks, and one prefills what the other decodes; by default the remote tier is a new folder",
    )
    demo.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    check_engine(args)
    from rich.console import Console

    console = Console(stderr=True, quiet=args.json)
    if args.shared is not None:
        return _shared(args, console)
    with console.status("Importing torch and transformers"):
        from runner.demo import job as demo
        from runner.demo.show import show

        quiet_transformers()
    memory = {name: value for name in ("device_memory", "host_memory") if (value := getattr(args, name)) is not None}
    with _Bars(console, args.requests) as bars:
        report = demo.run(
            args.model,
            args.device,
            args.tokens,
            args.requests,
            progress=bars.update,
            on_loaded=bars.loaded,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_scales=args.kv_scales,
            attention=args.attention,
            dtype=args.dtype,
            **memory,
        )
    return show_report(report, show, args.json)


def _shared(args: argparse.Namespace, console: Any) -> int:

    with console.status("Importing torch and transformers") as status:
        from runner.demo import shared as demo_shared
        from runner.demo.show_shared import show

        report = demo_shared.run(args.tokens, args.shared or None, status.update)
    return show_report(report, show, args.json)


class _Bars:
    """A progress bar per request, and a spinner while the model loads."""

    def __init__(self, console: Any, requests: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._name = "request {} of " + str(requests) if console.width >= 60 else "{}/" + str(requests)
        self._tasks: dict[int, Any] = {}
        unit = [TextColumn("tokens")] if console.width >= 60 else []
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, *unit, TimeElapsedColumn(), console=console)

    def __enter__(self) -> _Bars:
        self._progress.start()
        self._loading = self._progress.add_task("loading the model", total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._loading in self._progress.task_ids:
            self._progress.remove_task(self._loading)
        if self._tasks:
            self._progress.stop()
        else:  # there are no bars to leave behind, and no empty line in place of them
            self._progress.live.transient = True
            self._progress.live.stop()

    def loaded(self, llm: Any) -> None:
        """The model is there; requests begin."""
        self._progress.remove_task(self._loading)

    def update(self, request: int, done: int, total: int) -> None:
        """Request ``request`` has the KV of ``done`` of its ``total`` prompt tokens; its time counts from the first
        call."""
        if request not in self._tasks:
            self._tasks[request] = self._progress.add_task(self._name.format(request + 1), total=total)
        self._progress.update(self._tasks[request], completed=done)
