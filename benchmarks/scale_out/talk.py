"""Conversations with the bundled model, through a router, and where each turn was served."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

BLOCK_TOKENS = 16
TRIES = 20
"""Of a turn that fails, before it is given up."""


@dataclass
class Turn:
    """One answer."""

    conversation: int
    number: int
    engine: str
    prompt_tokens: int
    cached_tokens: int
    could_be_cached: int
    """Full blocks of the turn before, prompt and answer."""
    home: str | None
    """The engine that served the turn before, which holds the prefix; None for first turns."""
    answer: str
    seconds: float
    began_s: float
    failures: int

    @property
    def is_at_home(self) -> bool:
        """Whether it went where its prefix is."""
        return self.engine == self.home

    def runs_at(self, moment_s: float) -> bool:
        """Whether it was being answered."""
        return self.began_s <= moment_s < self.began_s + self.seconds


@dataclass
class Talks:
    """So many conversations at once, each a thread: a turn, its answer, a pause, the next turn."""

    url: str
    conversations: int = 12
    turns: int = 5
    first_words: int = 400
    next_words: int = 80
    pause_s: float = 4.0
    seed: int = 0
    done: list[Turn] = field(default_factory=list)
    given_up: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> list[Turn]:
        """All of them; the turns by conversation."""
        with ThreadPoolExecutor(self.conversations) as threads:
            list(threads.map(self._talk, range(self.conversations)))
        return sorted(self.done, key=lambda turn: (turn.conversation, turn.number))

    @property
    def num_done(self) -> int:
        """Turns that were answered so far."""
        return len(self.done)

    def _talk(self, conversation: int) -> None:
        words = random.Random(self.seed * 1000 + conversation)
        messages: list[dict[str, str]] = []
        before: Turn | None = None
        known = 0
        with httpx.Client(base_url=self.url, timeout=60.0) as web:
            for number in range(self.turns):
                time.sleep(self.pause_s * (0.5 + words.random()))
                messages.append(
                    {"role": "user", "content": _question(words, self.next_words if number else self.first_words)}
                )
                told = self._ask(web, messages)
                if told is None:
                    self.given_up += 1
                    return
                answer, seconds, began_s, failures = told
                usage, text = answer["usage"], answer["choices"][0]["message"]["content"]
                turn = Turn(
                    conversation=conversation,
                    number=number + 1,
                    engine=answer["model"],
                    prompt_tokens=usage["prompt_tokens"],
                    cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                    could_be_cached=known // BLOCK_TOKENS * BLOCK_TOKENS,
                    home=None if before is None else before.engine,
                    answer=text,
                    seconds=seconds,
                    began_s=began_s,
                    failures=failures,
                )
                with self.counting:
                    self.done.append(turn)
                messages.append({"role": "assistant", "content": text})
                before, known = turn, usage["prompt_tokens"] + usage["completion_tokens"] - 1

    def _ask(self, web: httpx.Client, messages: list[dict[str, str]]) -> tuple[Any, float, float, int] | None:
        """The answer, its seconds, when it was asked for, and how often it failed before."""
        for failures in range(TRIES):
            began_s = time.monotonic()
            try:
                reply = web.post(
                    "/v1/chat/completions", json={"messages": messages, "max_tokens": 16, "temperature": 0}
                )
                if reply.status_code == 200:
                    return reply.json(), time.monotonic() - began_s, began_s, failures
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        return None


def _question(words: random.Random, length: int) -> str:
    """Filler, a fact, filler, and the question about it."""
    key, digits = words.randrange(256), " ".join(str(words.randrange(10)) for _ in range(5))
    filler = [f"w{words.randrange(120)}" for _ in range(length - 36)]
    cut = len(filler) // 2
    gap = " ".join(f"w{words.randrange(120)}" for _ in range(24))
    return " ".join([*filler[:cut], f"key K{key} = {digits} .", *filler[cut:], f"ask K{key} ? {gap}"])
