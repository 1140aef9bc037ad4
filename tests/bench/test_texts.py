"""Texts of as many tokens as planned, though text does not always become the tokens that it was made of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

import pytest

from kvtier.machine.errors import ConfigError
from runner import needle
from runner.bench.texts import WORDS, LocalTexts, ids_of_words, text_of


class Merging:
    """Equal neighbours become one token."""

    source = "the test"

    async def encode(self, text: str) -> list[int]:
        return [int(word) for word, _ in groupby(text.split())]

    async def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Splitting(Merging):
    """The text of a token of 100 or more becomes two others."""

    async def encode(self, text: str) -> list[int]:
        return [part for word in text.split() for part in ([int(word)] if int(word) < 100 else [1, int(word) - 100])]


@pytest.mark.parametrize(
    ("texts", "ids", "begins"),
    [
        (Merging(), [5, 5, 6, 6, 6, 7], "5 6 7"),
        (Splitting(), [5, 107, 8, 109, 9], "5 1 7 8"),
        (Merging(), [3, 4], "3 4"),
    ],
)
def test_a_text_has_as_many_tokens_as_planned(texts: Merging, ids: list[int], begins: str) -> None:
    text, count = asyncio.run(text_of(texts, ids, [20, 21, 22]))
    assert count == len(ids) == len(asyncio.run(texts.encode(text))) and text.startswith(begins)


def test_what_cannot_be_reached_is_told() -> None:
    text, count = asyncio.run(text_of(Merging(), [5, 5, 5], [5]))
    assert (text, count) == ("5 5 5", 1)


def test_a_tokenizer_file_gives_the_ids_of_words() -> None:
    texts = LocalTexts(str(needle.weights_path()))
    found = asyncio.run(ids_of_words(texts))
    assert len(found) == len(WORDS.split()) and len(set(found)) >= 11  # of digits, and of a word that it does not know
    assert asyncio.run(texts.decode(asyncio.run(texts.encode("K7 = 4")))) == "K7 = 4"
    with pytest.raises(ConfigError, match="--tokenizer"):
        LocalTexts("nowhere.json")
