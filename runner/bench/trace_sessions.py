"""Sessions of kv-cache-tester's format: an agent's requests, each after the answer to the former one.

A session is ``{"id", "block_size", "hash_id_scope", "requests"}``. A request is an object (``t``, ``in``, ``out``,
``hash_ids``, ``think_time``, ``api_time``), or in the compact form a list. The list has t, think, api, in and out, then
how many ids of the former request it begins with. Runs [first id, count] of further ids follow. Without a think time
it follows from t; without an api time that is 0. An entry with requests of its own is a sub-agent, which starts at its
``t`` and goes on beside its session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.machine.errors import ConfigError
from runner.bench.told import LONGEST_PROMPT, blocks, seconds, whole


@dataclass(frozen=True)
class Asked:
    """A request of a trace; ``think_s`` after the answer before it."""

    prompt_tokens: int
    output_tokens: int
    think_s: float
    block_ids: Sequence[int]


@dataclass(frozen=True)
class Conversation:
    """Requests, each after the answer before it. ``scope``: within it equal ids are equal blocks.

    ``start_s`` is of the trace's own clock; of a nested one it counts from its session's start. ``session``: who asks,
    if a line of Mooncake's format says so.
    """

    scope: str
    block_tokens: int
    start_s: float
    asked: tuple[Asked, ...]
    is_nested: bool = False
    session: str | int | None = None


def read_session(where: str, session: Any, max_think_s: float) -> Iterator[Conversation]:
    """A session, and its sub-agents; think times are at most ``max_think_s``.

    Raises ``ConfigError``, which begins with ``where``, for another format.
    """
    try:
        block = whole("block_size", session["block_size"], 1, LONGEST_PROMPT)
        scope = "" if session.get("hash_id_scope") == "global" else str(session["id"])
        reader, beside = _Reader(max_think_s), []
        if not isinstance(session["requests"], list):
            raise ValueError("its requests are no list")
        for entry in session["requests"]:
            if inner := _nested(entry):
                begin_s = reader.elapsed_s + min(max_think_s, max(0.0, seconds("t", entry["t"]) - reader.ended_s))
                own = _Reader(max_think_s)
                for one in inner:
                    own.take(one)
                beside.append(Conversation(scope, block, begin_s, tuple(own.asked), is_nested=True))
            else:
                reader.take(entry)
        yield Conversation(scope, block, 0.0, tuple(reader.asked))
        yield from beside
    except KeyError as problem:
        raise ConfigError(f"{where} is no session of kv-cache-tester's format: it has no {problem}") from None
    except (TypeError, ValueError, IndexError, AttributeError) as problem:
        raise ConfigError(f"{where} is no session of kv-cache-tester's format: {problem}") from None


def _nested(entry: Any) -> list[Any]:
    """A sub-agent's requests; none of a request."""
    if not isinstance(entry, dict):
        return []
    return list(entry.get("requests") or entry.get("reqs") or ())


class _Reader:
    """Requests one by one."""

    def __init__(self, max_think_s: float) -> None:
        self.asked: list[Asked] = []
        self.ended_s = 0.0
        """When the last answer had ended, by the trace's clock."""
        self.elapsed_s = 0.0
        """When the last answer had ended, without the parts of think times that are left out."""
        self._max_think_s = max_think_s
        self._before: list[int] = []

    def take(self, entry: Any) -> None:
        """Reads one request."""
        if isinstance(entry, dict):
            at, took, prompt, output = entry["t"], entry.get("api_time"), entry["in"], entry["out"]
            think = entry.get("think_time")
            self._before = blocks(entry["hash_ids"])
        else:
            at, think, took, prompt, output, kept, runs = entry
            self._before = blocks(self._before[: whole("kept ids", kept, 0, LONGEST_PROMPT)] + _ids_of(runs))
        prompt = whole("in", prompt, 1, LONGEST_PROMPT)
        output = whole("out", output, 0, LONGEST_PROMPT)
        if think is None:
            think = max(0.0, seconds("t", at) - self.ended_s)
        think_s, took_s = seconds("think_time", think), seconds("api_time", took or 0.0)
        self.ended_s = seconds("t", at) + took_s
        think_s = min(self._max_think_s, think_s) if self.asked else 0.0
        self.elapsed_s += think_s + took_s
        self.asked.append(Asked(prompt, output, think_s, self._before))


def _ids_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    """The ids in pairs of first id and count."""
    left, found = LONGEST_PROMPT, list[int]()
    for first, count in runs:
        count = whole("a count of hash_ids,", count, 0, left)
        (first,) = blocks([first])
        left -= count
        found.extend(range(first, first + count))
    return found
