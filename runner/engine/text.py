"""The text of tokens as they come, and the search for stop strings in it.

Promises   text that is out never changes: an incomplete UTF-8 sequence is held back, and so is a possible start of a
           stop string. In the end the text equals the tokenizer's text of all tokens at once, up to the stop string.
           The exception: byte tokens that are no UTF-8, which change the meaning of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers.decoders import DecodeStream

from runner.engine.stops import START, StopStrings


class TextStream:
    """The text of a growing list of tokens."""

    def __init__(
        self,
        tokenizer: Any,
        stop: StopStrings | None = None,
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """``tokenizer``: transformers', or None: there is no text then. ``stop``: strings that end the text."""
        self._stop = stop
        self._place = START
        self._include_stop = include_stop
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._tokens: list[int] = []
        self._next = _pieces(tokenizer, skip_special_tokens)
        self._text = ""
        self._out = 0
        self.stopped: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """The certain text: without a possible start of a stop string."""
        return self._text[: self._certain()]

    def push(self, token: int, search: bool = True) -> bool:
        """Takes one more token; True once a stop string has appeared, which ends the text. ``search``: for them."""
        if self.stopped is None and self._tokenizer is not None:
            self._tokens.append(token)
            self._append(self._next(token), search)
        return self.stopped is not None

    def take(self) -> str:
        """The certain text since the last call."""
        upto = self._certain()
        piece, self._out = self._text[self._out : upto], max(self._out, upto)
        return piece

    def finish(self) -> None:
        """There are no more tokens: the held-back text is certain."""
        if self.stopped is None and self._tokenizer is not None:
            whole: str = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skips)
            if whole.startswith(self._text):
                self._append(whole[len(self._text) :], True)
        self._stop = None

    def _append(self, piece: str, search: bool) -> None:
        before = len(self._text)
        self._text += piece
        if self._stop is None:
            return
        self._place, read, self.stopped = self._stop.follow(self._place, piece, search)
        if self.stopped is not None:
            self._text = self._text[: before + read - (0 if self._include_stop else len(self.stopped))]

    def _certain(self) -> int:
        """Number of letters before a possible start of a stop string at the end of the text."""
        if self._stop is None or self.stopped is not None:
            return len(self._text)
        return len(self._text) - self._stop.held[self._place]


def _pieces(tokenizer: Any, skip_special_tokens: bool) -> Callable[[int], str]:
    """Makes the next piece of text of the next token: with the tokenizers library, if the tokenizer is one of its
    own."""
    fast = getattr(tokenizer, "_tokenizer", None)
    if fast is None:
        return _Pieces(tokenizer, skip_special_tokens)
    stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def piece(token: int) -> str:
        nonlocal stream
        try:
            return stream.step(fast, token) or ""
        except Exception:  # of bytes that are out as letters, and turn out to be none: it begins anew
            stream = DecodeStream(skip_special_tokens=skip_special_tokens)
            return stream.step(fast, token) or ""

    return piece


class _Pieces:
    """The pieces of a tokenizer in Python: a few tokens are decoded again with each one."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._tokens: list[int] = []
        self._known = 0  # of these, how many are in the text

    def __call__(self, token: int) -> str:
        known = self._decode(self._tokens[: self._known])
        self._tokens.append(token)
        now = self._decode(self._tokens)
        if len(now) <= len(known) or now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._tokens, self._known = self._tokens[self._known :], len(self._tokens) - self._known
        return now[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skips)
        return text
