"""``kvtier verify``: its options, and its progress bar."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from runner.commands.arguments import (
    add_attention,
    add_kv_options,
    json_object,
    not_negative,
    positive,
    quiet_transformers,
    show_report,
)
from runner.commands.checks import check_engine

TINY_BYTES = 64 << 20
"""Weights of fewer bytes are computed with one thread."""


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    from runner.model.tolerance import TOLERANCE

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
    add_attention(verify)
    verify.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the checkpoint's)")
    verify.add_argument("--tokens", type=positive, help="prompt length, at most (default: 2048, if the model takes it)")
    verify.add_argument("--prompts", type=positive, default=3, help="how many, 2 or more (default: 3)")
    verify.add_argument("--new-tokens", type=positive, default=24, help="generated for each, 2 or more (default: 24)")
    verify.add_argument(
        "--tolerance", type=not_negative, help="allowed where bits cannot be demanded (default: by dtype)"
    )
    verify.add_argument("--exact", action="store_true", help="load the model with exact=True, and let no bit differ in "
                        "any scenario (on a CPU)")  # fmt: skip
    add_kv_options(verify)
    _add_vllm(verify)
    verify.add_argument("--json", action="store_true", help="print the report as JSON and nothing else on stdout")
    verify.set_defaults(run=run)


def _add_vllm(verify: argparse.ArgumentParser) -> None:
    from runner.verify.vllm.compare import LIMITS

    group = verify.add_argument_group(
        "inside vLLM",
        "With --engine vllm, the prompts are served by vLLM without a KV connector, and by vLLM with one: cold, after "
        "hits on the device, by the connector and by both, in a batch, preempted and resumed, and after a reset. "
        "vLLM's own counts must say that each has happened: where the tokens came from, and that only the rest was "
        "computed. Any connector will do, since nothing but vLLM's public names is used. Run it in vLLM's own Python. "
        "What is allowed: other chunks and batches round otherwise, so logprobs may differ by "
        + ", ".join(f"{limit:g} in {dtype}" for dtype, limit in LIMITS.items())
        + ". In float32 the tokens must be the same; in half precision two may change places within that limit, and "
        "the text after them is not compared.",
    )
    group.add_argument("--engine", choices=("kvtier", "vllm"), default="kvtier", help="(default: kvtier)")
    group.add_argument(
        "--kv-transfer-config", type=json_object, help="as vLLM takes it, in JSON (default: kvtier's connector)"
    )
    group.add_argument("--blocks", type=positive, help="of the device pool (default: for a prompt and a half)")
    group.add_argument("--block-size", type=positive, help="tokens (default: vLLM's)")
    group.add_argument("--max-batched-tokens", type=positive, help="of a step (default: an eighth of a prompt)")
    group.add_argument("--engine-args", type=json_object, help="more of vLLM's EngineArgs for both engines, in JSON")
    group.add_argument("--patience", type=positive, help="seconds for a scenario (default: 1800)")


_VLLM_ONLY = ("kv_transfer_config", "blocks", "block_size", "max_batched_tokens", "engine_args", "patience")
_KVTIER_ONLY = {"device": "cpu", "attention": "auto", "exact": False, "kv_cache_dtype": None, "kv_scales": None}


def _check_engine(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for options of the other engine."""
    from kvtier.machine.errors import ConfigError

    if args.engine == "vllm":
        given = [name for name, default in _KVTIER_ONLY.items() if getattr(args, name) != default]
        hint = "vLLM's own settings go into --engine-args"
        if args.model is None:
            raise ConfigError("--engine vllm needs --model: a folder or hub id that vLLM can load")
    else:
        given = [name for name in _VLLM_ONLY if getattr(args, name) is not None]
        hint = "it goes with --engine vllm"
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is not for --engine {args.engine}: {hint}")


def _run_vllm(args: argparse.Namespace) -> int:
    from rich.console import Console

    from runner.verify.vllm import kit
    from runner.verify.vllm.show import show

    engine_args = {"dtype": args.dtype, "block_size": args.block_size}
    console = Console(stderr=True)
    with console.status("starting") as status:
        report = kit.run(
            args.model,
            args.kv_transfer_config,
            args.tokens,
            args.prompts,
            args.new_tokens,
            args.tolerance,
            args.blocks,
            args.max_batched_tokens,
            {k: v for k, v in engine_args.items() if v is not None} | (args.engine_args or {}),
            args.patience or kit.PATIENCE_S,
            progress=lambda name, done, total: status.update(f"{name} ({done} of {total})"),
        )
    return show_report(report, show, args.json)


def _is_tiny(model: str | None) -> bool:
    """Whether the weights are the bundled ones, or a folder's, of few bytes."""
    if model is None or not Path(model).is_dir():
        return model is None
    return sum(file.stat().st_size for file in Path(model).iterdir() if file.is_file()) < TINY_BYTES


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    _check_engine(args)
    if args.engine == "vllm":
        return _run_vllm(args)
    check_engine(args)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with console.status("Importing torch and transformers"):
        import torch

        from runner.verify import kit
        from runner.verify.show import show

        quiet_transformers()
    if _is_tiny(args.model):
        torch.set_num_threads(1)  # its steps are over before a second thread has woken up
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True)
    with bar.live:
        task = bar.add_task("loading the model", total=None)

        def tell(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)
            if not console.is_terminal:  # where there is no bar
                print(f"{name} ({done} of {total})", file=sys.stderr, flush=True)

        report = kit.run(
            args.model,
            args.device,
            args.tokens,
            args.prompts,
            args.new_tokens,
            args.dtype,
            args.tolerance,
            progress=tell,
            kv_cache_dtype=args.kv_cache_dtype,
            kv_scales=args.kv_scales,
            attention=args.attention,
            exact=args.exact,
        )
    return show_report(report, show, args.json)
