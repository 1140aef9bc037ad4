"""Flags of vLLM that ``kvtier serve`` has not: taken if they change nothing, else refused with what to use here.

Owns       the words of ``engine.foreign`` as a command line says them, and flags that only a server has.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from runner.engine.foreign import FOREIGN
from runner.sampling.foreign import Foreign

OPTIONS = {
    "device": "device",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_scales": "kv_scales",
    "device_memory": "device_memory",
    "host_memory": "host_memory",
    "block_size": "block_tokens",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_num_seqs": "max_running",
    "attention": "attention",
    "batch_invariant": "batch_invariant",
    "exact": "exact",
    "kv_events_config": "kv_events_config",
    "verify": "verify",
    "grammar_compile_limit": "grammar_limit_s",
    "max_waiting_requests": "max_waiting_requests",
    "max_waiting_tokens": "max_waiting_tokens",
}
"""Options of ``kvtier serve``, and the arguments of ``AsyncLLM`` that they are."""
_ADAPTERS = Foreign("adapters are not served")
_CALLS = Foreign("tools are written into the prompt; calls are not parsed out of answers")
_UNLOGGED = Foreign("requests are not logged", (True,))
SERVERS = {
    "model": Foreign("give it without --model"),
    "num_gpu_blocks_override": Foreign("use --device-memory"),
    "seed": Foreign("give it with each request"),
    "max_batched_tokens": Foreign("use --max-num-batched-tokens"),
    "max_running": Foreign("use --max-num-seqs"),
    "block_tokens": Foreign("use --block-size"),
    "tool_call_parser": _CALLS,
    "enable_auto_tool_choice": Foreign(_CALLS.said, (False,)),
    "reasoning_parser": Foreign("answers are given as the model writes them"),
    "lora_modules": _ADAPTERS,
    "api_server_count": Foreign("one process serves", (1,)),
    "root_path": Foreign("let the proxy take the prefix away"),
    "hf_token": Foreign("log in with `hf auth login`"),
    "scheduling_policy": Foreign("requests go by their priority, then in order", ("priority", "fcfs")),
    "enable_log_requests": Foreign("requests are not logged", (False,)),
    "disable_log_requests": _UNLOGGED,
}
"""Flags that ``LLM`` has no argument for, or that a command line answers otherwise."""
_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}
_FLAGS = {ours: f"--{flag.replace('_', '-')}" for flag, ours in OPTIONS.items() if "_" in ours} | {
    "remote_uri": "--kv-remote",
    "use attention": "use --attention",
    "as dtype": "as --dtype",
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds those that the parser has no option for; help does not list them."""
    for name, row in {**FOREIGN, **SERVERS}.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in parser._option_string_actions:
            continue
        names, short = [flag], [_SHORT[name]] if name in _SHORT else []
        is_switch = any(isinstance(value, bool) for value in row.harmless)
        if is_switch:
            names.append(f"--no-{name.replace('_', '-')}")
        kind: Mapping[str, Any] = {"nargs": 0} if is_switch else {}
        parser.add_argument(*names, *short, action=_Foreign, row=row, help=argparse.SUPPRESS, **kind)


def translated(said: str) -> str:
    """What is said of an argument, with the names of options."""
    said = re.sub(r"(\w+)='(\w+)'", r"\1 \2", said)
    for ours, flag in _FLAGS.items():
        said = re.sub(rf"\b{ours}\b", flag, said)
    return said


class _Foreign(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, row: Foreign, **more: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, **more)
        self._row = row

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, given: Any, flag: str | None = None
    ) -> None:
        value = not str(flag).startswith("--no-") if self.nargs == 0 else given
        whole = int(given) if isinstance(given, str) and given.isdigit() else value
        if not self._row.allows(value) and not self._row.allows(whole):
            parser.error(f"{flag}: {translated(self._row.said)}")
