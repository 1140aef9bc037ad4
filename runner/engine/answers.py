"""From tokens to answers: a request for its caller.

Owns       the n answers of one call: their text, their ends, and the part of them that is out already.
Promises   no output contains a stop string, nor any token after the token that completed it.
Does not   wait (that is for a thread or a coroutine, which calls ``advance`` when there is mail).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import KVTierError, Request
from kvtier.coordinator.request import FinishReason
from runner.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenChoices
from runner.engine.stops import StopStrings
from runner.engine.streams import Mail, TokenStream
from runner.engine.text import TextStream
from runner.engine.thread import EngineThread
from runner.engine.words import Words
from runner.sampling.logprobs import TokenLogprobs
from runner.sampling.state import SamplingState

TURN_ENTRIES = 512
"""Tokens, and likeliest ones beside them, that are read in one turn: some 3 ms. What is left waits for the
next turn; other requests do not wait for it."""


class Answer:
    """One answer."""

    def __init__(
        self, index: int, request: Request, state: SamplingState, mail: Mail, words: Words, stop: StopStrings | None
    ) -> None:
        """``words``: the model's; ``stop``: of ``state.params``, which all answers to a prompt share."""
        params = state.params
        self.index = index
        self.request = request
        self.state = state
        self.params = params
        self.stream = TokenStream(mail)
        self._words = words
        self._text = TextStream(
            words.tokenizer if params.detokenize else None,
            stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        self._tokens: list[int] = []
        self._choices: list[TokenChoices] = []
        self._prompt_choices: list[TokenChoices | None] = [None]  # nothing tells of the first token
        self._out = 0
        self.is_done = False

    def advance(self, thread: EngineThread, most: int | None = None) -> bool:
        """Reads the engine's news, ``most`` tokens of it; True if there is something new to tell."""
        if most is None and self.params.prompt_logprobs is not None:
            self.read_prompt(len(self.request.tokens))
        stream, tokens = self.stream, self._tokens
        end = stream.end  # before the tokens: none come after it
        before = len(tokens), self.is_done
        upto = len(stream.tokens) if most is None else min(len(stream.tokens), len(tokens) + most)
        while len(tokens) < upto and self._text.stopped is None:
            token = stream.tokens[len(tokens)]
            tokens.append(token)
            if self._is_hidden(token):
                continue
            if self._text.push(token, search=len(tokens) > self.params.min_tokens):
                thread.finish(self.request.request_id)
        if self.params.logprobs is not None:
            told = stream.logprobs[len(self._choices) : len(tokens)]
            self._choices += [_choices(one, self.params.logprobs, self._words) for one in told]
        if end is not None and not self.is_done and not self.has_more:
            self._text.finish()
            self.is_done = True
        return (len(tokens), self.is_done) != before

    @property
    def has_more(self) -> bool:
        """Whether there is news that ``advance`` has not read."""
        return self.has_more_of_prompt or (len(self._tokens) < len(self.stream.tokens) and self._text.stopped is None)

    @property
    def has_more_of_prompt(self) -> bool:
        """Whether there are logprobs of the prompt that ``read_prompt`` has not read."""
        return len(self._prompt_choices) <= len(self.stream.prompt_logprobs)

    def read_prompt(self, most: int) -> None:
        """Reads what the engine has told of the prompt, ``most`` tokens of it."""
        start = len(self._prompt_choices) - 1
        told = self.stream.prompt_logprobs[start : start + most]
        self._prompt_choices += [_choices(one, self.params.prompt_logprobs or 0, self._words) for one in told]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None while it goes on."""
        end = self.stream.end if self.is_done else None
        if end is None:
            return None
        reason = end.report.finish_reason
        if end.error is not None:
            return "error"
        return "stop" if self._text.stopped is not None and reason not in ("abort", "error") else reason

    def output(self, *, delta: bool) -> CompletionOutput:
        """The answer so far: all of it, or the part that is new since the last time."""
        start, self._out = self._out if delta else 0, len(self._tokens)
        piece = self._text.take()
        end = self.stream.end if self.is_done else None
        return CompletionOutput(
            index=self.index,
            text=piece if delta else self._text.text,
            token_ids=self._tokens[start:],
            logprobs=None if self.params.logprobs is None else self._choices[start:],
            finish_reason=self.finish_reason,
            stop_reason=None if end is None else self._stop_reason(),
            error=None if end is None else end.error,
        )

    def prompt_logprobs(self) -> list[TokenChoices | None] | None:
        """Logprobs of all prompt tokens, if they were asked for and are there."""
        are_there = len(self._prompt_choices) == len(self.request.tokens)
        return self._prompt_choices if self.params.prompt_logprobs is not None and are_there else None

    def _is_hidden(self, token: int) -> bool:
        """Whether a token only says that the text is over."""
        return token in self.request.eos_token_ids and not self.params.include_stop_str_in_output

    def _stop_reason(self) -> str | int | None:
        if self._text.stopped is not None:
            return self._text.stopped
        last = self._tokens[-1] if self._tokens else None
        return last if last in (self.params.stop_token_ids or ()) else None


def _choices(told: TokenLogprobs, most: int, words: Words) -> TokenChoices:
    """The token's own number, then the ``most`` likeliest."""
    found: TokenChoices = {}
    ranks = [told.rank, *range(1, most + 1)]
    for token, value, rank in zip(told.ids.tolist(), told.logprobs.tolist(), ranks, strict=False):
        if token not in found:
            found[token] = Logprob(value, rank, words.of(token))
    return found


class Answers:
    """All answers to one prompt."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: npt.NDArray[np.integer[Any]],
        answers: Sequence[Answer],
        arrived_s: float,
    ) -> None:
        self.request_id = request_id
        self.answers = list(answers)
        self.arrived_s = arrived_s
        self._prompt = prompt
        self._given_ids = prompt_token_ids
        self._prompt_token_ids: list[int] | None = None
        self._first = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._given_ids)

    @property
    def is_done(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.is_done for answer in self.answers)

    @property
    def has_begun(self) -> bool:
        """Whether any answer has a token, or has ended."""
        return any(a.is_done or a.stream.first_token_s is not None for a in self.answers)

    @property
    def failure(self) -> KVTierError | None:
        """The error that an answer has ended with, if any."""
        ends = (answer.stream.end for answer in self.answers if answer.is_done)
        return next((end.error for end in ends if end is not None and end.error is not None), None)

    def advance(self, thread: EngineThread) -> list[Answer]:
        """Reads the engine's news, as much as one turn may; returns the answers with something new.

        ``has_more`` says whether there is more. Answers take turns to be first.
        """
        one = self.answers[0]
        if one.has_more_of_prompt:  # a turn of its own
            one.read_prompt(max(1, TURN_ENTRIES // (1 + (one.params.prompt_logprobs or 0))))
            return []
        left, fresh = max(1, TURN_ENTRIES // (1 + (one.params.logprobs or 0))), []
        for answer in (*self.answers[self._first :], *self.answers[: self._first]):
            if answer.is_done:
                continue
            if not left:
                self._first = answer.index
                break
            before = answer.num_tokens
            if answer.advance(thread, left):
                fresh.append(answer)
            left -= answer.num_tokens - before
        return fresh

    @property
    def has_more(self) -> bool:
        """Whether there is news that ``advance`` has not read."""
        return any(answer.has_more for answer in self.answers)

    def output(self, fresh: Sequence[Answer], *, delta: bool) -> RequestOutput:
        """The output of ``fresh``."""
        if self._prompt_token_ids is None:
            self._prompt_token_ids = self._given_ids.tolist()
        ends = [answer.stream.end for answer in self.answers]
        reports = [end.report for end in ends if end is not None]
        first = [s for answer in self.answers if (s := answer.stream.first_token_s) is not None]
        ended = [end.ended_s for end in ends if end is not None]
        now = max(ended) if self.is_done else time.perf_counter()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.output(delta=delta) for answer in fresh],
            finished=self.is_done,
            cached_tokens=dict(reports[0].cached_tokens) if reports else {"device": 0, "host": 0},
            preemptions=sum(report.preemptions for report in reports),
            ttft_s=min(first) - self.arrived_s if first else None,
            latency_s=now - self.arrived_s,
            prompt_logprobs=self.answers[0].prompt_logprobs(),
        )

    def abort(self, thread: EngineThread) -> None:
        """Ends all answers that still go on."""
        for answer in self.answers:
            if not answer.is_done:
                thread.abort(answer.request.request_id)
