"""The workloads that need no file. Each makes the turns of all sessions; ``arrivals`` says when they start.

Promises   all lengths are in tokens, and are exact. What has no range has exactly the length that was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from kvtier.machine.errors import ConfigError
from runner.bench.arrivals import Offsets, offsets, stream
from runner.bench.names import USED, Shape, WorkloadName
from runner.bench.plan import Plan, Session, Turn
from runner.bench.tokens import Prompt, key_of, prompt_of
from runner.bench.told import LONGEST_PROMPT, finite_or_inf


def make(name: WorkloadName, shape: Shape, rate: float, burstiness: float, seed: int) -> Plan:
    """The plan of a workload. Raises ``ConfigError`` for sizes that cannot work."""
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name in USED[name] and not _LEAST.get(field.name, 1) <= value <= LONGEST_PROMPT:
            least = _LEAST.get(field.name, 1)
            raise ConfigError(f"--{field.name.replace('_', '-')} must be at least {least}, at most {LONGEST_PROMPT:,}")
    rows = _MAKERS[name](shape, seed)
    is_open = name is not WorkloadName.BACK_TO_BACK
    starts: Offsets = offsets(len(rows), rate, burstiness, seed) if is_open else np.zeros(len(rows))
    sessions = tuple(Session(float(start), tuple(turns)) for start, turns in zip(starts, rows, strict=True))
    used = {field: getattr(shape, field) for field in USED[name]}
    arrival: dict[str, Any] = (
        {"request_rate": finite_or_inf(rate), "burstiness": finite_or_inf(burstiness)} if is_open else {}
    )
    return Plan(name.value, used | arrival, seed, sessions)


_LEAST: dict[str, float] = {
    "random_range_ratio": 0,
    "prefix_repetition_suffix_len": 0,
    "system_len": 0,
    "think_time": 0,
}


def _random(shape: Shape, seed: int) -> list[list[Turn]]:
    """Prompts that share nothing; lengths within ``random_range_ratio`` of those given, each way."""
    ratio = shape.random_range_ratio
    if ratio >= 1:
        raise ConfigError(f"--random-range-ratio is a part of the length, from 0 up and below 1, got {ratio}")
    draw = stream(seed, "lengths")

    def lengths(middle: int) -> list[int]:
        low, high = max(1, int(middle * (1 - ratio))), int(middle * (1 + ratio))
        return [int(n) for n in draw.integers(low, high + 1, shape.num_prompts)]

    pairs = zip(lengths(shape.random_input_len), lengths(shape.random_output_len), strict=True)
    return [[Turn(prompt_of([(key_of("random", i), n)]), out)] for i, (n, out) in enumerate(pairs)]


def _shared_prefix(shape: Shape, seed: int) -> list[list[Turn]]:
    """Each prefix equally often, but for one; in random order, each with a suffix of its own."""
    prefixes = np.arange(shape.num_prompts) % shape.prefix_repetition_num_prefixes
    stream(seed, "order").shuffle(prefixes)
    length, suffix = shape.prefix_repetition_prefix_len, shape.prefix_repetition_suffix_len

    def turn(i: int, prefix: int) -> Turn:
        blocks = [(key_of("prefix", prefix), length), (key_of("suffix", i), suffix)]
        return Turn(prompt_of(blocks), shape.prefix_repetition_output_len)

    return [[turn(i, int(prefix))] for i, prefix in enumerate(prefixes)]


def _conversations(shape: Shape, seed: int) -> list[list[Turn]]:
    """``num_prompts`` requests in conversations of ``turns``; think times are exponential, with mean ``think_time``."""
    count = -(-shape.num_prompts // shape.turns)
    thinks = stream(seed, "think").exponential(1.0, (count, shape.turns)) * shape.think_time

    def first(c: int) -> Prompt:
        return prompt_of([(key_of("system"), shape.system_len), (key_of("user", c, 0), shape.first_turn_len)])

    def conversation(c: int) -> list[Turn]:
        turns = [Turn(first(c), shape.turn_output_len)]
        for t in range(1, min(shape.turns, shape.num_prompts - c * shape.turns)):
            said = prompt_of([(key_of("user", c, t), shape.turn_len)])
            turns.append(Turn(said, shape.turn_output_len, float(thinks[c, t]), continues=True))
        return turns

    return [conversation(c) for c in range(count)]


def _back_to_back(shape: Shape, seed: int) -> list[list[Turn]]:
    """One session: ``long_distinct`` long prompts in turn, each sent as soon as the former one is answered."""
    prompts = [prompt_of([(key_of("long", i), shape.long_len)]) for i in range(shape.long_distinct)]
    return [[Turn(prompts[i % shape.long_distinct], shape.long_output_len) for i in range(shape.num_prompts)]]


_MAKERS: dict[WorkloadName, Callable[[Shape, int], list[list[Turn]]]] = {
    WorkloadName.RANDOM: _random,
    WorkloadName.SHARED_PREFIX: _shared_prefix,
    WorkloadName.CONVERSATIONS: _conversations,
    WorkloadName.BACK_TO_BACK: _back_to_back,
}
