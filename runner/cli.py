"""The ``kvtier`` command."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import warmup
from runner.server import command as serve


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


class _Version(argparse.Action):
    """Asks the installation for its version; kvtier itself, which takes a second to import, if there is none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("kvtier")
        except PackageNotFoundError:
            from kvtier import __version__ as found

        print(f"{parser.prog} {found}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description="The KV cache for hybrid-attention language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="command")
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
    _add_attention(demo)
    demo.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the checkpoint's)")
    demo.add_argument("--tokens", type=_positive, default=90_112, help="prompt length (default: 90112)")
    demo.add_argument(
        "--requests", type=_positive, default=3, help="requests, alternating between two prompts (default: 3)"
    )
    demo.add_argument("--device-memory", help="device pools, such as 8GiB (default: what one and a half requests need)")
    demo.add_argument(
        "--host-memory", help="host tier, such as 16GiB; 0 turns it off (default: enough for all prompts)"
    )
    _add_kv_options(demo)
    demo.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    demo.set_defaults(run=_demo)
    _add_verify(commands)
    _add_plan(commands)
    _add_calibrate(commands)
    warmup.add_to(commands)
    serve.add_to(commands)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what a model's KV cache takes and what fits, from its config alone",
        description="Reads a transformers config, no weights: the groups of layers and their bytes, how many requests "
        "and tokens of given lengths fit into device and host memory, what is saved by forgetting what windows and "
        "chunks no longer show, what loading a request from the host costs against computing it again, and the largest "
        "context. Counted as start-up and admission count, for pools that share one arena a tier.",
    )
    plan.add_argument("model", help="a hub id, a folder with config.json, a config.json, or a GGUF file")
    plan.add_argument(
        "--device-memory",
        required=True,
        help="for KV on the device, beside weights and FlashInfer's workspaces, such as 80GiB",
    )
    plan.add_argument("--host-memory", default="0", help="for KV in host memory, such as 200GiB (default: none)")
    plan.add_argument("--context", type=int, help="a length in tokens to add to the tables")
    plan.add_argument("--dtype", help="of the KV: bfloat16, float16, float32, float8_e4m3fn (default: the config's)")
    plan.add_argument("--block-tokens", type=int, default=16, help="tokens per block (default: 16)")
    plan.add_argument(
        "--max-batched-tokens", type=int, default=8192, help="tokens of prompts in one step (default: 8192)"
    )
    plan.add_argument("--link-gbps", type=float, default=55.0, help="assumed GB/s from host to device (default: 55)")
    plan.add_argument(
        "--tflops", type=float, default=989.0, help="assumed dense peak of the device, in TFLOP/s (default: 989)"
    )
    plan.add_argument(
        "--utilisation", type=float, default=0.4, help="part of the peak that is assumed reached (default: 0.4)"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON and nothing else")
    plan.add_argument("--plot", help="write a picture of bytes against context to this file (needs matplotlib)")
    plan.set_defaults(run=_plan)


def _add_verify(commands: Any) -> None:
    from runner.tolerance import TOLERANCE

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
        "--model", help="a folder, GGUF file or hub id of a transformers causal LM (default: the bundled tiny model)"
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
    _add_kv_options(verify)
    verify.add_argument("--json", action="store_true", help="print the report as JSON and nothing else on stdout")
    verify.set_defaults(run=_verify)


def _add_calibrate(commands: Any) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="find scales for K and V in fp8",
        description="Runs a model over a text, in its own dtype, and writes for every layer and KV head the scale with "
        "which nothing saturates: the largest magnitude of K and of V over 448.",
    )
    calibrate.add_argument("--model", required=True, help="a folder, GGUF file or hub id of a transformers causal LM")
    calibrate.add_argument("--text", required=True, help="a file of typical text")
    calibrate.add_argument("--out", required=True, help="the .json file to write, for --kv-scales")
    calibrate.add_argument("--tokens", type=_positive, default=4096, help="of the text, at most (default: 4096)")
    calibrate.add_argument("--device", default="cpu", help="cpu or cuda:N (default: cpu)")
    calibrate.set_defaults(run=_calibrate)


def _add_kv_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-cache-dtype", help="of K and V: fp8, or any that --dtype takes (default: the weights')")
    parser.add_argument(
        "--kv-scales",
        help="scales for fp8: a .json file of `kvtier calibrate`, a .safetensors file or a checkpoint's folder "
        "(default: the model's own k_scale and v_scale, else 1)",
    )


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

    console = Console(stderr=True, quiet=args.json)
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
            kv_cache_dtype=args.kv_cache_dtype,
            kv_scales=args.kv_scales,
            attention=args.attention,
            dtype=args.dtype,
            **memory,
        )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, Console())
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
    bar = Progress(*columns, console=console, transient=True)
    with bar.live:
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
            kv_cache_dtype=args.kv_cache_dtype,
            kv_scales=args.kv_scales,
            attention=args.attention,
        )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, Console())
    return 0 if report.ok else 1


def _plan(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("Importing torch and transformers"):
        from runner import plan
        from runner.plan.plot import check_target, draw, pyplot
        from runner.plan.show import show

        _quiet()
    picture = None if args.plot is None else check_target(args.plot)
    if picture is not None:
        pyplot()  # if it is missing, say so before anything else
    options = plan.Options(
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        context=args.context,
        dtype=args.dtype,
        block_tokens=args.block_tokens,
        max_batched_tokens=args.max_batched_tokens,
        link_gb_per_s=args.link_gbps,
        peak_tflops=args.tflops,
        utilisation=args.utilisation,
    )
    found = plan.run(args.model, options)
    if picture is not None:
        draw(found, picture)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, Console())
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from runner.calibrate import calibrate_on_text
    from runner.kv_scales import save_scales
    from runner.model import HybridModel

    _quiet()
    scales, tokens = calibrate_on_text(HybridModel.load(args.model, args.device), Path(args.text), args.tokens)
    save_scales(scales, args.out)
    print(f"{args.out}: scales of {len(scales)} layers, from {tokens:,} tokens")
    return 0


def _quiet() -> None:
    """No bars and notes of transformers between ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


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


if __name__ == "__main__":
    sys.exit(main())
