"""Forbidden words: their tokens, and the words that the next token would complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.machine.errors import InvalidRequest
from kvtier.machine.integers import shown


def tokens_of(words: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """The token ids of each word, as it is at the start of a text and after a space.

    Raises ``InvalidRequest`` if there is no tokenizer, or it makes no token of a word.
    """
    if not words:
        return []
    if tokenizer is None:
        raise InvalidRequest("bad_words are text; this model has no tokenizer to read them with")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise InvalidRequest(f"bad_words has half of a surrogate pair: {shown(word)}")
        plain, spaced = (tuple(_encoded(tokenizer, before + word.lstrip())) for before in ("", " "))
        if not plain:
            raise InvalidRequest(f"bad_words has {shown(word)}, which the tokenizer makes no token of")
        found[plain] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):  # a token of its own for the spaced word
            found[spaced] = None
    return list(found)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


class Ban:
    """One request's words, and the tokens that would complete one now. Only generated tokens count."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """``words``: token ids, at least one each."""
        after: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            after.setdefault(tuple(word[:-1]), set()).add(int(word[-1]))
        self.always = np.array(sorted(after.pop((), ())), np.int64)
        self._after = {begun: np.array(sorted(last), np.int64) for begun, last in after.items()}
        self._lengths = sorted({len(begun) for begun in self._after})
        self._recent: deque[int] = deque(maxlen=max(self._lengths, default=0))
        self.now: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Tokens that complete a word of several tokens, int64; ``always`` has the words of one token."""

    def take(self, token: int) -> None:
        """The next token."""
        if not self._lengths:
            return
        self._recent.append(token)
        recent = tuple(self._recent)
        begun = [self._after.get(recent[-length:]) for length in self._lengths if length <= len(recent)]
        due = [last for last in begun if last is not None]
        self.now = np.unique(np.concatenate(due)) if due else self.now[:0]
