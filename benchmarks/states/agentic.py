"""The whole agentic trace: every session and sub-agent is a conversation, and answers come back as they were."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.hits.traces import BLOCK_TOKENS, text_of
from benchmarks.hits.workloads import Tokens

_TAIL = 1 << 30
"""Ids from here on are of prompts' last blocks, which are not full: the trace has none for them."""
WITHIN_S = 4 * 3600
"""Sessions begin at random within so many seconds."""


class Turn:
    """A request. Its texts are made when they are asked for: all of them together have 6 G tokens."""

    def __init__(self, session: int, ids: npt.NDArray[np.int64], num_tokens: int, said: int) -> None:
        self.session, self.num_tokens, self.said = session, num_tokens, said
        self._ids = ids
        self._next: Turn | None = None

    def goes_on_to(self, following: Turn, kept: int) -> None:
        """The next turn of the session begins with ``kept`` blocks of this one.

        If these are all, it has this prompt's last block, which is not full, and the answer as well.
        """
        whole = self.num_tokens // BLOCK_TOKENS
        if kept >= whole and following.num_tokens > self.num_tokens:
            self._next = following
            self._ids[whole] = following._ids[whole]

    @property
    def prompt(self) -> Tokens:
        """int32 [num_tokens]."""
        return text_of(1 + self.session, self._ids, BLOCK_TOKENS)[: self.num_tokens]

    @property
    def answer(self) -> Tokens:
        """int32 [said]: what the next turn has behind this one's prompt, if it goes on from it."""
        if self._next is None:
            return np.full(self.said, 5, np.int32)
        first, last = self.num_tokens, min(self.num_tokens + self.said, self._next.num_tokens)
        ids = self._next._ids[first // BLOCK_TOKENS : -(-last // BLOCK_TOKENS)]
        found = text_of(1 + self.session, ids, BLOCK_TOKENS)[first % BLOCK_TOKENS :][: last - first]
        return np.append(found, np.full(self.said - len(found), 5, np.int32))


def read(folder: Path, every: int = 1) -> list[Turn]:
    """Turns of each ``every``-th session, in the order in which they are asked for."""
    random, made, contexts = Random(1), list[tuple[float, Turn]](), 0
    for path in sorted((folder / "agentic_coding").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                begun_s = random.uniform(0, WITHIN_S)
                if number % every == 0:
                    contexts = _session(json.loads(line)["requests"], begun_s, contexts, made)
    return [turn for _, turn in sorted(made, key=lambda each: each[0])]


def _session(requests: Sequence[Any], begun_s: float, contexts: int, made: list[tuple[float, Turn]]) -> int:
    """Adds the turns of one context and of its sub-agents; returns the number of contexts so far."""
    context, turns, ids = contexts, list[tuple[Turn, int]](), np.empty(0, np.int64)
    contexts += 1
    for request in requests:
        if isinstance(request, dict):  # a sub-agent, with ids of its own
            contexts = _session(request["reqs"], begun_s, contexts, made)
            continue
        at_s, _, _, num_tokens, said, kept, runs = request
        ids = np.concatenate([ids[:kept], *(np.arange(first, first + n) for first, n in runs)])
        whole = num_tokens // BLOCK_TOKENS
        if num_tokens > 0 and len(ids) >= whole:
            turn = Turn(context, np.append(ids[:whole], _TAIL + len(made)), num_tokens, max(1, said))
            turns.append((turn, kept))
            made.append((begun_s + at_s, turn))
    for (turn, _), (following, kept) in reversed(list(pairwise(turns))):
        turn.goes_on_to(following, kept)
    return contexts
