"""The choices that a user has, with their defaults. Its import takes no time: help and usage errors need it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class WorkloadName(Enum):
    """The values of ``--dataset-name``; those that vLLM has too are vLLM's."""

    RANDOM = "random"
    SHARED_PREFIX = "prefix_repetition"
    CONVERSATIONS = "conversations"
    BACK_TO_BACK = "back_to_back"
    TRACE = "timed_trace"


class TraceFormat(Enum):
    """The values of ``--trace-format``."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    SESSIONS = "kv-cache-tester"


class PromptForm(Enum):
    """The values of ``--prompt-form``."""

    IDS = "ids"
    TEXT = "text"


class History(Enum):
    """What stands between two turns of a conversation: the values of ``--history``."""

    ANSWERS = "answers"
    """What the server has answered."""
    SCRIPTED = "scripted"
    """Tokens of the plan, as many as the answer was to have. They are the same for each server."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the workloads, in tokens and seconds; each workload uses those that ``USED`` names for it."""

    num_prompts: int = 100
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    prefix_repetition_prefix_len: int = 4096
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    turns: int = 5
    system_len: int = 0
    first_turn_len: int = 1024
    turn_len: int = 128
    turn_output_len: int = 128
    think_time: float = 1.0
    long_len: int = 90_112
    long_output_len: int = 16
    long_distinct: int = 2


USED: dict[WorkloadName, tuple[str, ...]] = {
    WorkloadName.RANDOM: ("num_prompts", "random_input_len", "random_output_len", "random_range_ratio"),
    WorkloadName.SHARED_PREFIX: (
        "num_prompts",
        "prefix_repetition_prefix_len",
        "prefix_repetition_suffix_len",
        "prefix_repetition_num_prefixes",
        "prefix_repetition_output_len",
    ),
    WorkloadName.CONVERSATIONS: (
        "num_prompts",
        "turns",
        "system_len",
        "first_turn_len",
        "turn_len",
        "turn_output_len",
        "think_time",
    ),
    WorkloadName.BACK_TO_BACK: ("num_prompts", "long_len", "long_output_len", "long_distinct"),
}

LATENCIES = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
"""What ``--percentile-metrics`` takes."""
