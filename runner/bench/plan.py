"""A plan of requests, made before the first is sent.

A session is a row of turns, each sent after the answer to the former one. A single request is a session of one turn.

Promises   a plan never changes. Its digest is that of all it says, so that two reports can be known to be of the same
           requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.bench.tokens import Prompt


@dataclass(frozen=True)
class Turn:
    """A request. ``continues``: its prompt begins with the former turn's prompt and answer."""

    prompt: Prompt
    output_tokens: int
    think_s: float = 0.0
    continues: bool = False


@dataclass(frozen=True)
class Session:
    """Turns; the first is due at ``start_s``, each other one ``think_s`` after the answer to the one before."""

    start_s: float
    turns: tuple[Turn, ...]

    def lengths(self) -> Iterator[tuple[int, int]]:
        """(Prompt, answer) tokens of each turn as planned, the history included."""
        before = 0
        for turn in self.turns:
            prompt = turn.prompt.tokens + (before if turn.continues else 0)
            yield prompt, turn.output_tokens
            before = prompt + turn.output_tokens


@dataclass(frozen=True)
class Plan:
    """Sessions by their start; ``parameters`` are all that made them, but for the seed."""

    workload: str
    parameters: Mapping[str, Any]
    seed: int
    sessions: tuple[Session, ...]

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, histories included."""
        return sum(prompt for session in self.sessions for prompt, _ in session.lengths())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max((a + b for session in self.sessions for a, b in session.lengths()), default=0)

    def digest(self) -> str:
        """SHA-256 of everything that is sent, and when; but for the ids that stand for the tokens."""
        found = hashlib.sha256(repr((self.seed, len(self.sessions))).encode())
        for session in self.sessions:
            found.update(np.float64(session.start_s).tobytes())
            for turn in session.turns:
                found.update(repr((turn.output_tokens, turn.think_s, turn.continues)).encode())
                found.update(turn.prompt.keys.tobytes())
                found.update(turn.prompt.counts.tobytes())
        return found.hexdigest()

    def describe(self) -> dict[str, Any]:
        """The whole plan for the report, with sizes."""
        lengths = [pair for session in self.sessions for pair in session.lengths()]
        prompts, answers = np.array(lengths, np.int64).reshape(-1, 2).T
        last_s = self.sessions[-1].start_s if self.sessions else 0.0
        return {
            "name": self.workload,
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "sessions": len(self.sessions),
            "requests": len(lengths),
            "prompt_tokens": _sizes(prompts),
            "output_tokens": _sizes(answers),
            "last_start_s": last_s,
            "digest": self.digest(),
        }


def _sizes(values: Any) -> dict[str, float]:
    if not len(values):
        return {"sum": 0, "min": 0, "mean": 0.0, "max": 0}
    return {
        "sum": int(values.sum()),
        "min": int(values.min()),
        "mean": round(float(values.mean()), 1),
        "max": int(values.max()),
    }
