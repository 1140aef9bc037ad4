"""Requests as JSON bodies: token ids, text, or messages of a chat. A dialogue is a session that is being sent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.machine.errors import ConfigError
from runner.bench.client import Answer
from runner.bench.names import History
from runner.bench.plan import Session, Turn
from runner.bench.texts import Texts, text_of
from runner.bench.tokens import Alphabet, Prompt, key_of, prompt_of


class Dialogue(Protocol):
    """One session: its bodies in turn, and what was answered."""

    def body(self, index: int) -> tuple[bytes, int]:
        """The JSON of turn ``index``, and the tokens that its prompt is to have."""

    def answered(self, index: int, answer: Answer) -> None:
        """Takes the answer into the history; only called if the next turn continues."""


DialogueMaker = Callable[[int, Session], Dialogue]


class IdsDialogue:
    """Prompts are lists of token ids, for /v1/completions."""

    def __init__(
        self,
        number: int,
        session: Session,
        common: Mapping[str, Any],
        alphabet: Alphabet,
        seed: int,
        history: History,
    ) -> None:
        self._head = json.dumps(dict(common))[:-1].encode()
        self._number, self._turns = number, session.turns
        self._alphabet, self._seed, self._history_form = alphabet, seed, history
        self._before: list[bytes] = []
        self._tokens = 0

    def body(self, index: int) -> tuple[bytes, int]:
        """See ``Dialogue``."""
        turn = self._turns[index]
        if not turn.continues:
            self._before, self._tokens = [], 0
        self._add(turn.prompt)
        prompt = b",".join(self._before)
        return b'%b, "max_tokens": %d, "prompt": [%b]}' % (self._head, turn.output_tokens, prompt), self._tokens

    def answered(self, index: int, answer: Answer) -> None:
        """See ``Dialogue``. Raises ``ConfigError`` if the server does not say which tokens it has answered."""
        if self._history_form is History.SCRIPTED:
            self._add(scripted_answer(self._number, index, self._turns[index]))
        elif answer.token_ids is None:
            raise ConfigError("this server does not tell the token ids of its answers: use --history scripted")
        elif answer.token_ids:
            self._before.append(",".join(map(str, answer.token_ids)).encode())
            self._tokens += len(answer.token_ids)

    def _add(self, prompt: Prompt) -> None:
        if prompt.tokens:
            self._before.append(self._alphabet.as_json(prompt, self._seed))
            self._tokens += prompt.tokens


@dataclass(frozen=True)
class Said:
    """What a turn says, and if answers are scripted, what stands for its answer; each with its tokens."""

    text: str
    tokens: int
    scripted: str = ""
    scripted_tokens: int = 0


class TextDialogue:
    """Prompts are text, for /v1/completions."""

    def __init__(self, session: Session, common: Mapping[str, Any], said: Sequence[Said], history: History) -> None:
        self._turns, self._common, self._said, self._history_form = session.turns, dict(common), said, history
        self._before: list[str] = []
        self._tokens = 0

    def body(self, index: int) -> tuple[bytes, int]:
        """See ``Dialogue``."""
        turn, said = self._turns[index], self._said[index]
        if not turn.continues:
            self._before, self._tokens = [], 0
        self._before.append(said.text)
        self._tokens += said.tokens
        return json.dumps(self._common | self._prompt(turn)).encode(), self._tokens

    def _prompt(self, turn: Turn) -> dict[str, Any]:
        return {"max_tokens": turn.output_tokens, "prompt": " ".join(self._before)}

    def answered(self, index: int, answer: Answer) -> None:
        """See ``Dialogue``."""
        said, is_scripted = self._said[index], self._history_form is History.SCRIPTED
        self._before.append(said.scripted if is_scripted else answer.text)
        self._tokens += said.scripted_tokens if is_scripted else self._turns[index].output_tokens


class ChatDialogue(TextDialogue):
    """Prompts are messages, for /v1/chat/completions; the chat template adds tokens of its own."""

    def _prompt(self, turn: Turn) -> dict[str, Any]:
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for role, text in zip(roles, self._before, strict=False)]
        return {"max_completion_tokens": turn.output_tokens, "messages": messages}


async def say(
    texts: Texts, number: int, session: Session, alphabet: Alphabet, seed: int, history: History
) -> list[Said]:
    """A session's turns as text, of as many tokens as planned if the tokenizer lets them."""
    found, filler = [], alphabet.ids.tolist()
    for index, turn in enumerate(session.turns):
        said = await text_of(texts, alphabet.draw(turn.prompt, seed).tolist(), filler)
        scripted = ("", 0)
        if history is History.SCRIPTED and index + 1 < len(session.turns) and session.turns[index + 1].continues:
            ids = alphabet.draw(scripted_answer(number, index, turn), seed).tolist()
            scripted = await text_of(texts, ids, filler)
        found.append(Said(*said, *scripted))
    return found


def scripted_answer(number: int, index: int, turn: Turn) -> Prompt:
    """What stands for the answer to a turn of session ``number`` if answers are scripted."""
    return prompt_of([(key_of("answer", number, index), turn.output_tokens)])
