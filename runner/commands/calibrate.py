"""``kvtier calibrate``: its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runner.commands.arguments import positive, quiet_transformers
from runner.commands.checks import check_engine, check_file


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    calibrate = commands.add_parser(
        "calibrate",
        help="find scales for K and V in fp8",
        description="Runs a model over a text, in its own dtype, and writes for every layer and KV head the scale with "
        "which nothing saturates: the largest magnitude of K and of V over 448.",
    )
    calibrate.add_argument("--model", required=True, help="a folder, GGUF file or hub id of a transformers causal LM")
    calibrate.add_argument("--text", required=True, help="a file of typical text")
    calibrate.add_argument("--out", required=True, help="the .json file to write, for --kv-scales")
    calibrate.add_argument("--tokens", type=positive, default=4096, help="of the text, at most (default: 4096)")
    calibrate.add_argument("--device", default="cpu", help="cpu or cuda:N (default: cpu)")
    calibrate.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    check_engine(args)
    check_file("--text", args.text)
    from runner.engine.calibrate import calibrate_on_text
    from runner.model.hybrid import HybridModel
    from runner.model.kv_scales import save_scales

    quiet_transformers()
    scales, tokens = calibrate_on_text(HybridModel.load(args.model, args.device), Path(args.text), args.tokens)
    save_scales(scales, args.out)
    print(f"{args.out}: scales of {len(scales)} layers, from {tokens:,} tokens")
    return 0
