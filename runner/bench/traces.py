"""Published traces as plans: who asked when, with how many tokens, and which blocks of prompts were the same.

| format | files | blocks |
|---|---|---|
| mooncake | ``.jsonl`` of Mooncake's FAST'25 release | 512 tokens, ids of the whole trace |
| azure | ``.csv`` of AzurePublicDataset's LLM inference traces | none: prompts share nothing |
| kv-cache-tester | a folder of ``.json``, or ``.jsonl``, one session a file or line | 64 tokens, ids of a session |

Promises   equal ids become equal tokens. A line that is not of the format is an error with its number. What is left out
           for its length is counted.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvtier.errors import ConfigError
from runner.bench.arrivals import offsets
from runner.bench.names import TraceFormat
from runner.bench.plan import Plan, Session, Turn
from runner.bench.tokens import Prompt, key_of, prompt_of
from runner.bench.trace_sessions import Asked, Conversation, read_session

MOONCAKE_BLOCK, MOONCAKE_SECONDS = 512, 0.001
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceOptions:
    """Which trace, and what is made of it."""

    path: str
    format: TraceFormat | None = None
    """None: as its first line says."""
    num_prompts: int = 100
    self_timed: bool = True
    """By the trace's own times, not by a rate."""
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_input_len: int | None = None
    block_tokens: int | None = None
    second_multiplier: float | None = None
    max_think_s: float = math.inf


@dataclass
class _Kept:
    """Conversations until there are enough requests."""

    options: TraceOptions
    conversations: list[Conversation] = field(default_factory=list)
    requests: int = 0
    too_long: int = 0

    def take(self, conversation: Conversation) -> bool:
        """Whether more are wanted."""
        most = self.options.max_input_len
        short = [one for one in conversation.asked if most is None or one.prompt_tokens * self._scale <= most]
        self.too_long += len(conversation.asked) - len(short)
        short = short[: self.options.num_prompts - self.requests]
        self.requests += len(short)
        if short:
            self.conversations.append(replace(conversation, asked=tuple(short)))
        return self.requests < self.options.num_prompts

    @property
    def _scale(self) -> float:
        return self.options.length_scale


def read(options: TraceOptions, rate: float, burstiness: float, seed: int, *, is_rate_given: bool = False) -> Plan:
    """The plan of a trace. Raises ``ConfigError`` if it cannot be read, or has no request that is short enough."""
    if options.num_prompts < 1:
        raise ConfigError("--num-prompts must be at least 1")
    path = Path(options.path)
    kind, kept = options.format or _format_of(path), _Kept(options)
    try:
        for conversation in _conversations(path, kind, options):
            if not kept.take(conversation):
                break
    except (OSError, UnicodeDecodeError, EOFError) as problem:
        raise ConfigError(f"--trace {path} cannot be read: {problem}") from problem
    if not kept.conversations:
        raise ConfigError(f"--trace {path} has no request of at most {options.max_input_len} tokens")
    timed = options.self_timed and kind is not TraceFormat.SESSIONS
    if timed and is_rate_given:
        raise ConfigError("a trace has its own times: leave --request-rate out, or add --no-self-timed")
    first_s = min(one.start_s for one in kept.conversations)
    roots = sum(not one.is_nested for one in kept.conversations)
    starts = iter(offsets(roots, rate, burstiness, seed).tolist())
    sessions: list[Session] = []
    start_s = 0.0
    for number, one in enumerate(kept.conversations):
        if timed:
            start_s = (one.start_s - first_s) * options.time_scale
        elif not one.is_nested:
            start_s = next(starts)
        nested_s = one.start_s * options.time_scale if one.is_nested else 0.0
        sessions.append(Session(start_s + nested_s, _turns(one, number, options)))
    sessions.sort(key=lambda session: session.start_s)
    parameters = _parameters(options, kind, timed, rate, burstiness, kept.too_long)
    return Plan("timed_trace", parameters, seed, tuple(sessions))


def _parameters(options: TraceOptions, kind: TraceFormat, timed: bool, rate: float, burstiness: float,
                too_long: int) -> dict[str, Any]:  # fmt: skip
    arrival = {} if timed else {"request_rate": "inf" if math.isinf(rate) else rate, "burstiness": burstiness}
    return {
        "trace": Path(options.path).name,
        "trace_sha256": _hash(Path(options.path)),
        "trace_format": kind.value,
        "num_prompts": options.num_prompts,
        "self_timed": timed,
        "time_scale": options.time_scale,
        "length_scale": options.length_scale,
        "max_think_time": None if math.isinf(options.max_think_s) else options.max_think_s,
        "max_input_len": options.max_input_len,
        "left_out_as_too_long": too_long,
        **arrival,
    }


def _turns(conversation: Conversation, number: int, options: TraceOptions) -> tuple[Turn, ...]:
    scale = options.length_scale
    turns = []
    for index, asked in enumerate(conversation.asked):
        prompt = _prompt(conversation, asked, scale, (number, index))
        turns.append(Turn(prompt, max(1, round(asked.output_tokens * scale)), asked.think_s * options.time_scale))
    return tuple(turns)


def _prompt(conversation: Conversation, asked: Asked, scale: float, own: tuple[int, int]) -> Prompt:
    """Blocks by their ids; what no id covers is the request's own."""
    block, ids = conversation.block_tokens, np.asarray(asked.block_ids, np.int64)
    covered = min(len(ids), -(-asked.prompt_tokens // block))
    counts = np.full(covered, block)
    rest = asked.prompt_tokens - covered * block
    if rest < 0:  # the last block is not full
        counts[-1] += rest
    scaled = np.maximum(1, np.rint(counts * scale)).astype(np.int64)
    keys = ids[:covered].astype(np.uint64) + np.uint64(key_of("trace", conversation.scope))
    if rest <= 0:
        return Prompt(keys, scaled)
    tail = prompt_of([(key_of("own", *own), max(1, round(rest * scale)))])
    return Prompt(np.concatenate([keys, tail.keys]), np.concatenate([scaled, tail.counts]))


def _hash(path: Path) -> str:
    """Of the file, or of all files of a folder."""
    found = hashlib.sha256()
    for one in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        found.update(one.read_bytes())
    return found.hexdigest()


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _format_of(path: Path) -> TraceFormat:
    if path.is_dir():
        return TraceFormat.SESSIONS
    try:
        with _open(path) as file:
            first = file.readline(2**20)
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"--trace {path} cannot be read: {problem}") from problem
    if tuple(name.strip() for name in first.removeprefix("\ufeff").split(",")) == _AZURE:
        return TraceFormat.AZURE
    if '"input_length"' in first:
        return TraceFormat.MOONCAKE
    if '"block_size"' in first or path.suffix == ".json":
        return TraceFormat.SESSIONS
    raise ConfigError(
        f"--trace {path}: its first line is of none of the formats {', '.join(one.value for one in TraceFormat)}"
    )


def _conversations(path: Path, kind: TraceFormat, options: TraceOptions) -> Iterator[Conversation]:
    if kind is TraceFormat.SESSIONS:
        yield from _sessions(path, options.max_think_s)
    elif kind is TraceFormat.AZURE:
        yield from _azure(path)
    else:
        yield from _mooncake(path, options)


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Where, object) of each line."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"--trace {path}, line {number}"
                try:
                    found = json.loads(line)
                except ValueError as problem:
                    raise ConfigError(f"{where} is not JSON: {problem}") from None
                if not isinstance(found, dict):
                    raise ConfigError(f"{where} is not a JSON object")
                yield where, found


def _mooncake(path: Path, options: TraceOptions) -> Iterator[Conversation]:
    block = options.block_tokens or MOONCAKE_BLOCK
    seconds = MOONCAKE_SECONDS if options.second_multiplier is None else options.second_multiplier
    for where, row in _objects(path):
        try:
            prompt, output = int(row["input_length"]), int(row["output_length"])
            asked = Asked(prompt, output, 0.0, _ids(row.get("hash_ids", ())))
            at_s = float(row["timestamp"]) * seconds
        except (KeyError, TypeError, ValueError) as problem:
            raise ConfigError(f"{where} is no request of Mooncake's format: {_reason(problem)}") from None
        if prompt < 1 or output < 0:
            raise ConfigError(f"{where}: a prompt of {prompt} tokens and an answer of {output}")
        yield Conversation("", block, at_s, (asked,))


def _ids(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(one) for one in values)


def _azure(path: Path) -> Iterator[Conversation]:
    with _open(path) as file:
        rows = csv.DictReader(file)
        for number, row in enumerate(rows, 2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"].strip())
                at_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
                asked = Asked(int(row["ContextTokens"]), int(row["GeneratedTokens"]), 0.0, ())
            except (KeyError, TypeError, ValueError, AttributeError) as problem:
                where = f"--trace {path}, line {number}"
                raise ConfigError(f"{where} is no request of Azure's format: {_reason(problem)}") from None
            if asked.prompt_tokens >= 1:
                yield Conversation("", 1, at_s, (asked,))
            else:
                raise ConfigError(f"--trace {path}, line {number}: a prompt of {asked.prompt_tokens} tokens")


def _sessions(path: Path, max_think_s: float) -> Iterator[Conversation]:
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ConfigError(f"--trace {path} has no .json file")
        for one in files:
            yield from _sessions(one, max_think_s)
        return
    if path.suffix == ".json":
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ConfigError(f"--trace {path} is not JSON: {problem}") from None
        yield from read_session(f"--trace {path}", found, max_think_s)
        return
    for where, session in _objects(path):
        yield from read_session(where, session, max_think_s)


def _reason(problem: Exception) -> str:
    return f"it has no {problem}" if isinstance(problem, KeyError) else str(problem)
