"""A trace of requests, to be replayed.

| format | prompts are |
|---|---|
| ``.jsonl`` with ``prompt_token_ids``, with ``token_ids`` or ``output_length``, maybe with ``session`` | token ids |
| those of ``runner.bench.traces``; a line of Mooncake's may have a ``session`` | blocks with ids |

Blocks with equal ids are equal tokens. What no id covers is the request's own; so is an answer without token ids.

Promises   a line that is not of its format raises ``ConfigError`` with its number.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.machine.errors import ConfigError
from runner.bench import told, traces
from runner.bench.names import TraceFormat
from runner.bench.replay.asked import Asked, Tokens
from runner.bench.tokens import Alphabet, Prompt, key_of, prompt_of
from runner.bench.trace_sessions import Asked as TraceRequest, Conversation

OPEN = 16
"""Sessions of a trace without times that are open at once."""
_LARGEST_ID = 2**31 - 1
_IDS = 2**16  # different tokens of blocks: two blocks that begin alike are no block alike


@dataclass(frozen=True, eq=False)
class OfTokens:
    """A request whose tokens are known."""

    session: Hashable
    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True, eq=False)
class OfBlocks:
    """A request of which blocks are known; its tokens are made when they are asked for."""

    session: Hashable
    blocks: Prompt
    said: Prompt

    @property
    def prompt(self) -> Tokens:
        """int32 [n]."""
        return _drawn(self.blocks)

    @property
    def answer(self) -> Tokens:
        """int32 [n], of no other request."""
        return _drawn(self.said)


def read(path: Path, block_tokens: int | None = None, requests: int | None = None, whole: bool = False) -> list[Asked]:
    """Reads them in the order in which they are to begin: the first ``requests``, or all.

    ``block_tokens``: of a block of Mooncake's format, 512 unless given. ``whole``: prompts of blocks are cut to whole
    ones. Raises ``ConfigError``.
    """
    for name, value in (("--trace-block-tokens", block_tokens), ("--trace-requests", requests)):
        if value is not None and not 1 <= value <= told.LONGEST_PROMPT:
            raise ConfigError(f"{name} must be in 1..{told.LONGEST_PROMPT:,}, got {value}")
    kind = traces.format_of(path)
    if kind is None and '"prompt_token_ids"' in traces.first_line(path):
        found = _of_tokens(path)
    elif kind is not None:
        given = traces.conversations(path, kind, traces.TraceOptions(str(path), block_tokens=block_tokens))
        found = _of_blocks(given, kind, whole)
    else:
        names = ", ".join(one.value for one in TraceFormat)
        raise ConfigError(
            f"--trace {path}: its first line is of none of the formats {names}, and has no prompt_token_ids"
        )
    asked = list(islice(found, requests))
    if not asked:
        raise ConfigError(f"--trace {path} has no request")
    return asked


def _of_tokens(path: Path) -> Iterator[Asked]:
    for number, (where, row) in enumerate(traces.objects(path)):
        try:
            session, prompt = told.who(row.get("session")), _ids("prompt_token_ids", row["prompt_token_ids"])
            if "token_ids" in row:
                answer = _ids("token_ids", row["token_ids"])
            else:
                answer = _drawn(_own(number, told.whole("output_length", row["output_length"], 0, told.LONGEST_PROMPT)))
        except (KeyError, ValueError) as problem:
            raise ConfigError(f"{where} is no request of token ids: {traces.reason(problem)}") from None
        yield OfTokens((number,) if session is None else session, prompt, answer)


def _ids(name: str, value: Any) -> Tokens:
    found = told.ids(value)
    if not found or max(found) > _LARGEST_ID:
        raise ValueError(f"{name} is no list of token ids from 0 to {_LARGEST_ID:,}, one at least")
    return np.array(found, np.int32)


def _of_blocks(given: Iterator[Conversation], kind: TraceFormat, whole: bool) -> Iterator[Asked]:
    order = _taking_turns(given) if kind is TraceFormat.SESSIONS else _as_they_came(given)
    for number, (session, conversation, one) in enumerate(order):
        block = conversation.block_tokens
        if whole and one.prompt_tokens > block:
            one = TraceRequest(one.prompt_tokens // block * block, one.output_tokens, one.think_s, one.block_ids)
        prompt = traces.prompt_in(conversation, one, 1.0, (number, 0))
        yield OfBlocks(session, prompt, _own(number, one.output_tokens))


_Turn = tuple[Hashable, Conversation, TraceRequest]


def _as_they_came(given: Iterator[Conversation]) -> Iterator[_Turn]:
    for number, one in enumerate(sorted(given, key=lambda one: one.start_s)):
        for request in one.asked:
            yield (number,) if one.session is None else one.session, one, request


def _taking_turns(given: Iterator[Conversation]) -> Iterator[_Turn]:
    """``OPEN`` sessions at a time. Who has thought for the shortest time asks next; answers take no time."""
    due: list[tuple[float, int, int, Conversation]] = []
    now_s, numbered = 0.0, enumerate(one for one in given if one.asked)
    while True:
        for number, one in islice(numbered, OPEN - len(due)):
            heapq.heappush(due, (now_s + one.start_s, number, 0, one))
        if not due:
            return
        now_s, name, turn, one = heapq.heappop(due)
        yield (name,), one, one.asked[turn]
        if turn + 1 < len(one.asked):
            heapq.heappush(due, (now_s + one.asked[turn + 1].think_s, name, turn + 1, one))


def _own(number: int, tokens: int) -> Prompt:
    """The answer of the request of this number, one token at least."""
    return prompt_of([(key_of("answer", number), max(1, tokens))])


@cache
def _alphabet() -> Alphabet:
    return Alphabet(range(_IDS), "a trace")


def _drawn(blocks: Prompt) -> Tokens:
    return _alphabet().draw(blocks, 0).astype(np.int32)
