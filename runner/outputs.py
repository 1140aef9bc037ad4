"""What a caller gets back, and the text of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.errors import RunnerError


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    ``finish_reason``: "stop" (EOS or a stop string), "length", "abort", "capacity" (it outgrew the pools), "load_error"
    or "error" (``error`` says why: its logits were not finite). ``cached_tokens``: prompt tokens that its first
    admission found on the device and in the host tier. ``ttft_s`` is None if it ended before its first token. Times
    count from the call of ``generate``.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    cached_tokens: dict[str, int]
    preemptions: int
    ttft_s: float | None
    latency_s: float
    error: RunnerError | None = None


class TextStream:
    """The text of a growing list of tokens, decoded a few tokens at a time, and the search for stop strings in it.

    Holds back what may still change (an incomplete UTF-8 sequence), so text that is out never changes.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._prefix = 0  # tokens before this are context of no decode any more
        self._read = 0  # tokens before this are in the text
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Takes one more token; True once a stop string has appeared. The text then ends before it."""
        self._tokens.append(token)
        if self.stopped or self._tokenizer is None:
            return self.stopped
        known = self._decode(self._tokens[self._prefix : self._read])
        now = self._decode(self._tokens[self._prefix :])
        if len(now) > len(known) and not now.endswith("\N{REPLACEMENT CHARACTER}"):
            self._append(now[len(known) :])
            self._prefix, self._read = self._read, len(self._tokens)
        return self.stopped

    def finish(self) -> str:
        """The whole text, what was held back included."""
        if self._tokenizer is not None and not self.stopped:
            known = self._decode(self._tokens[self._prefix : self._read])
            self._append(self._decode(self._tokens[self._prefix :])[len(known) :])
            self._prefix = self._read = len(self._tokens)
        return self.text

    def _append(self, piece: str) -> None:
        searched = max(0, len(self.text) - max((len(s) for s in self._stop), default=1) + 1)
        self.text += piece
        found = [at for s in self._stop if (at := self.text.find(s, searched)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
