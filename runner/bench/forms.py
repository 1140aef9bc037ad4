"""Requests as JSON bodies: token ids, text, or messages of a chat. A dialogue is a session that is being sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvtier.errors import ConfigError
from runner.bench.client import Answer
from runner.bench.names import History
from runner.bench.plan import Session, Turn
from runner.bench.tokens import Alphabet, key_of, prompt_of


class Dialogue(Protocol):
    """One session: its next body, and what was answered."""

    def body(self, turn: Turn) -> tuple[bytes, int]:
        """The request's JSON, and the tokens that its prompt is to have."""

    def answered(self, turn: Turn, answer: Answer) -> None:
        """Takes the answer into the history."""


DialogueMaker = Callable[[int, Session], Dialogue]


class IdsDialogue:
    """Prompts are lists of token ids, for /v1/completions."""

    def __init__(self, number: int, common: Mapping[str, Any], alphabet: Alphabet, seed: int, history: History) -> None:
        self._head = json.dumps(dict(common))[:-1].encode()
        self._number, self._alphabet, self._seed, self._history_form = number, alphabet, seed, history
        self._turns = 0
        self._before: list[bytes] = []
        self._tokens = 0

    def body(self, turn: Turn) -> tuple[bytes, int]:
        """See ``Dialogue``."""
        if not turn.continues:
            self._before, self._tokens = [], 0
        if turn.prompt.tokens:
            self._before.append(self._alphabet.as_json(turn.prompt, self._seed))
        self._tokens += turn.prompt.tokens
        prompt = b",".join(self._before)
        return b'%b, "max_tokens": %d, "prompt": [%b]}' % (self._head, turn.output_tokens, prompt), self._tokens

    def answered(self, turn: Turn, answer: Answer) -> None:
        """See ``Dialogue``. Raises ``ConfigError`` if the server does not say which tokens it has answered."""
        if self._history_form is History.SCRIPTED:
            said = prompt_of([(key_of("answer", self._number, self._turns), turn.output_tokens)])
            self._before.append(self._alphabet.as_json(said, self._seed))
            self._tokens += turn.output_tokens
        elif answer.token_ids is None:
            raise ConfigError("this server does not tell the token ids of its answers: use --history scripted")
        elif answer.token_ids:
            self._before.append(",".join(map(str, answer.token_ids)).encode())
            self._tokens += len(answer.token_ids)
        self._turns += 1
