"""``kvtier plan``: its options."""

from __future__ import annotations

import argparse
import json
from typing import Any

from runner.commands.arguments import quiet_transformers
from runner.commands.checks import check_engine, check_file


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    plan = commands.add_parser(
        "plan",
        help="say what a model's KV cache takes and what fits, from its config alone",
        description="Reads a transformers config, no weights: the groups of layers and their bytes, how many requests "
        "and tokens of given lengths fit into device and host memory, what is saved by forgetting what windows and "
        "chunks no longer show, what loading a request from the host or the remote tier costs against computing it, "
        "the largest context, and with --trace the hit rates of your own requests. Counted as start-up and admission "
        "count, for pools that share one arena a tier.",
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
    plan.add_argument("--remote", default="0", help="bytes of a remote tier, such as 10TiB (default: none)")
    plan.add_argument(
        "--remote-gbps", type=float, help="GB/s (gigabytes, not gigabits) of the remote tier; goes with --remote"
    )
    plan.add_argument(
        "--trace",
        help="JSON lines of requests, by token ids or by blocks as in Mooncake's traces: add the hit rates that these "
        "memories would give, and twice and four times as much",
    )
    plan.add_argument("--trace-requests", type=int, help="take the trace's first requests (default: all)")
    plan.add_argument(
        "--trace-block-tokens", type=int, help="tokens of its blocks, in Mooncake's format (default: 512)"
    )
    plan.add_argument(
        "--trace-whole-blocks",
        action="store_true",
        help="cut its prompts to whole blocks: in Mooncake's own traces a last, partial block never equals a full one",
    )
    plan.add_argument("--at-once", type=int, default=16, help="requests of the trace that run at a time (default: 16)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON and nothing else")
    plan.add_argument("--plot", help="write a picture of bytes against context to this file (needs matplotlib)")
    plan.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    if args.plot is not None:
        from runner.display.pictures import check_target

        check_target(args.plot)
    check_engine(args, config_alone=True)
    if args.trace is not None:
        check_file("--trace", args.trace)
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("Importing torch and transformers"):
        from runner import plan
        from runner.display.pictures import check_target, pyplot
        from runner.plan.plot import draw
        from runner.plan.show import show

        quiet_transformers()
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
        remote=args.remote,
        remote_gb_per_s=args.remote_gbps,
        trace=None if args.trace is None else _trace(args),
    )
    with console.status("Planning") as status:
        found = plan.run(args.model, options, status.update)
    if picture is not None:
        draw(found, picture)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, Console())
    return 0


def _trace(args: argparse.Namespace) -> Any:
    from runner.plan import TraceOptions

    rest = args.trace_block_tokens, args.trace_requests, args.trace_whole_blocks, args.at_once
    return TraceOptions(args.trace, *rest)
