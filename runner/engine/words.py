"""The texts of single tokens, each decoded once.

Promises   a text is the tokenizer's own. No more are kept than the vocabulary has. Any thread may ask.
"""

from __future__ import annotations

from typing import Any


class Words:
    """The texts of one model's vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: transformers', or None."""
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str | None:
        """The text of a token; None without a tokenizer."""
        found = self._known.get(token)
        if found is None and self.tokenizer is not None:
            found = self._known[token] = self.tokenizer.decode([token])
        return found
