"""The parts that several subcommands share: options, types of arguments, reports, and silence of transformers.

Promises   a type of argument raises ``ArgumentTypeError`` with the text that was given.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from typing import Any


def add_kv_options(parser: argparse.ArgumentParser) -> None:
    """--kv-cache-dtype and --kv-scales."""
    parser.add_argument("--kv-cache-dtype", help="of K and V: fp8, or any that --dtype takes (default: the weights')")
    parser.add_argument(
        "--kv-scales",
        help="scales for fp8: a .json file of `kvtier calibrate`, a .safetensors file or a checkpoint's folder "
        "(default: the model's own k_scale and v_scale, else 1)",
    )


def add_attention(parser: argparse.ArgumentParser) -> None:
    """--attention."""
    parser.add_argument(
        "--attention",
        default="auto",
        help="auto, flashinfer or reference; auto is FlashInfer where it can run the model (default: auto)",
    )


def positive(text: str) -> int:
    """1, 2, 3 ..."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def not_negative(text: str) -> float:
    """A finite number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = not_negative(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """``{...}``."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"kv_connector": ...}}')
    return value


def quiet_transformers() -> None:
    """No bars and notes of transformers between ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def show_report(report: Any, show: Callable[..., None], as_json: bool) -> int:
    """Prints a report, and returns the command's exit status."""
    from rich.console import Console

    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(report, Console())
    return 0 if report.ok else 1
