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
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvtier.machine.errors import ConfigError
from runner.bench.arrivals import offsets
from runner.bench.names import TraceFormat
from runner.bench.plan import Plan, Session, Turn
from runner.bench.tokens import Prompt, key_of, prompt_of
from runner.bench.told import LONGEST_PROMPT, blocks, finite_or_inf, parsed, seconds, who, whole
from runner.bench.trace_sessions import Asked, Conversation, read_session

MOONCAKE_BLOCK, MOONCAKE_SECONDS = 512, 0.001
_UNREADABLE = (OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error)
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceOptions:
    """The trace to play, and how it is changed."""

    path: str
    format: TraceFormat | None = None
    """None: as its first line says."""
    num_prompts: int = 100
    self_timed: bool = True
    """Whether requests come at the trace's own times, not by a rate."""
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
    kind, kept = options.format or format_of(path), _Kept(options)
    if kind is None:
        names = ", ".join(one.value for one in TraceFormat)
        raise ConfigError(f"--trace {path}: its first line is of none of the formats {names}")
    for conversation in conversations(path, kind, options):
        if not kept.take(conversation):
            break
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
        session = Session(start_s + nested_s, _turns(one, number, options))
        if not all(map(math.isfinite, (session.start_s, *(turn.think_s for turn in session.turns)))):
            raise ConfigError(f"--time-scale {options.time_scale:g} makes times that are no longer finite")
        sessions.append(session)
    sessions.sort(key=lambda session: session.start_s)
    parameters = _parameters(options, kind, timed, rate, burstiness, kept.too_long)
    return Plan("timed_trace", parameters, seed, tuple(sessions))


def _parameters(options: TraceOptions, kind: TraceFormat, timed: bool, rate: float, burstiness: float,
                too_long: int) -> dict[str, Any]:  # fmt: skip
    arrival = {} if timed else {"request_rate": finite_or_inf(rate), "burstiness": finite_or_inf(burstiness)}
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
        if max(asked.prompt_tokens, asked.output_tokens) * scale > LONGEST_PROMPT:
            raise ConfigError(f"--length-scale {scale:g} makes lengths of more than {LONGEST_PROMPT:,} tokens")
        prompt = prompt_in(conversation, asked, scale, (number, index))
        turns.append(Turn(prompt, max(1, round(asked.output_tokens * scale)), asked.think_s * options.time_scale))
    return tuple(turns)


def prompt_in(conversation: Conversation, asked: Asked, scale: float, own: tuple[int, int]) -> Prompt:
    """Blocks by their ids; what no id covers is the request's own, by the name ``own``."""
    block, ids = conversation.block_tokens, np.array([one % 2**64 for one in asked.block_ids], np.uint64)
    covered = min(len(ids), -(-asked.prompt_tokens // block))
    counts = np.full(covered, block)
    rest = asked.prompt_tokens - covered * block
    if rest < 0:  # the last block is not full
        counts[-1] += rest
    scaled = np.maximum(1, np.rint(counts * scale)).astype(np.int64)
    keys = ids[:covered] + np.uint64(key_of("trace", conversation.scope))
    if rest <= 0:
        return Prompt(keys, scaled)
    tail = prompt_of([(key_of("own", *own), max(1, round(rest * scale)))])
    return Prompt(np.concatenate([keys, tail.keys]), np.concatenate([scaled, tail.counts]))


def _hash(path: Path) -> str:
    """The hash of the file, or of all files of a folder."""
    found = hashlib.sha256()
    for one in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        found.update(one.read_bytes())
    return found.hexdigest()


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def format_of(path: Path) -> TraceFormat | None:
    """The format by its first line; None for a line of no known format. Raises ``ConfigError`` if it cannot be read."""
    if path.is_dir():
        return TraceFormat.SESSIONS
    first = first_line(path)
    if tuple(name.strip() for name in first.removeprefix("\ufeff").split(",")) == _AZURE:
        return TraceFormat.AZURE
    if '"input_length"' in first:
        return TraceFormat.MOONCAKE
    if '"block_size"' in first or path.suffix == ".json":
        return TraceFormat.SESSIONS
    return None


def first_line(path: Path) -> str:
    """Its beginning at most. Raises ``ConfigError`` for a file that cannot be read."""
    try:
        with _open(path) as file:
            return file.readline(2**20)
    except _UNREADABLE as problem:
        raise ConfigError(f"--trace {path} cannot be read: {problem}") from problem


def conversations(path: Path, kind: TraceFormat, options: TraceOptions) -> Iterator[Conversation]:
    """All of a trace, as it stands there. Raises ``ConfigError`` for what is not of the format."""
    try:
        if kind is TraceFormat.SESSIONS:
            yield from _sessions(path, options.max_think_s)
        elif kind is TraceFormat.AZURE:
            yield from _azure(path)
        else:
            yield from _mooncake(path, options)
    except _UNREADABLE as problem:
        raise ConfigError(f"--trace {path} cannot be read: {problem}") from problem


def _where(path: Path, line: int) -> str:
    return f"--trace {path}, line {line}"


def _lines(path: Path) -> Iterator[str]:
    """Each line, without its end; raises ``ConfigError`` for one that cannot be read."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                yield line.removesuffix("\n")
    except _UNREADABLE as problem:
        raise ConfigError(f"{_where(path, number + 1)} cannot be read: {problem}") from problem


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Where, object) of each line of JSON. Raises ``ConfigError``, with the line's number."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            where = _where(path, number)
            try:
                found = parsed(line)
            except ValueError as problem:
                raise ConfigError(f"{where} is not JSON: {problem}") from None
            if not isinstance(found, dict):
                raise ConfigError(f"{where} is not a JSON object")
            yield where, found


def _mooncake(path: Path, options: TraceOptions) -> Iterator[Conversation]:
    block = options.block_tokens or MOONCAKE_BLOCK
    unit_s = MOONCAKE_SECONDS if options.second_multiplier is None else options.second_multiplier
    for where, row in objects(path):
        try:
            prompt = whole("input_length", row["input_length"], 1, LONGEST_PROMPT)
            output = whole("output_length", row["output_length"], 0, LONGEST_PROMPT)
            asked = Asked(prompt, output, 0.0, blocks(row.get("hash_ids", [])))
            at_s = seconds("a time of", seconds("timestamp", row["timestamp"]) * unit_s)
            name = who(row.get("session"))
        except (KeyError, ValueError) as problem:
            raise ConfigError(f"{where} is no request of Mooncake's format: {reason(problem)}") from None
        yield Conversation("", block, at_s, (asked,), session=name)


def _azure(path: Path) -> Iterator[Conversation]:
    rows = csv.DictReader(_lines(path))
    while True:
        try:
            row = next(rows, None)
        except csv.Error as problem:
            raise ConfigError(f"{_where(path, rows.line_num + 1)} cannot be read: {problem}") from None
        if row is None:
            return
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"].strip())
            at_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
            prompt = whole("ContextTokens", row["ContextTokens"], 1, LONGEST_PROMPT)
            output = whole("GeneratedTokens", row["GeneratedTokens"], 0, LONGEST_PROMPT)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
            where = _where(path, rows.line_num)
            raise ConfigError(f"{where} is no request of Azure's format: {reason(problem)}") from None
        yield Conversation("", 1, at_s, (Asked(prompt, output, 0.0, ()),))


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
            found = parsed(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ConfigError(f"--trace {path} is not JSON: {problem}") from None
        yield from read_session(f"--trace {path}", found, max_think_s)
        return
    for where, session in objects(path):
        yield from read_session(where, session, max_think_s)


def reason(problem: Exception) -> str:
    """Why a line is of no use, from the error that it has led to."""
    return f"it has no {problem}" if isinstance(problem, KeyError) else str(problem)
