"""Needle prompts in English, for a model that has a tokenizer.

A prompt is a long text that means little, with one sentence in it that names a secret number. At its end stands the
beginning of the answer, for the model to complete. So it works with a base model, which has no chat.
"""

from __future__ import annotations

import random
from typing import Any

DEPTH = 0.4
"""Where in the prompt the number is named."""

_CITIES = ("Oslo", "Lima", "Cairo", "Hanoi", "Quito", "Dakar", "Perth", "Turin")
_WHO = ("The baker", "A sailor", "My neighbour", "The old teacher", "Her cousin", "A gardener", "Our guide")
_DID = ("painted", "mended", "sold", "carried", "forgot", "described", "borrowed", "cleaned")
_WHAT = ("a wooden boat", "the garden gate", "three clocks", "a heavy book", "the blue lamp", "old maps", "a kettle")
_WHEN = ("before dawn", "in the rain", "last summer", "on the hill", "without a word", "near the river", "after lunch")


def ask(tokenizer: Any, num_tokens: int, seed: int) -> tuple[list[int], str] | None:
    """A prompt of ``num_tokens`` tokens and its answer, a number.

    None if that is too short for the question, or if the tokenizer cannot write it.
    """
    draw = random.Random(seed)
    city, number = draw.choice(_CITIES), str(draw.randrange(10_000, 100_000))
    start = _ids(tokenizer, "", special=True)[:1]
    if start != [tokenizer.bos_token_id]:
        start = []
    needle = _ids(tokenizer, f" Remember: the secret number of {city} is {number}. ")
    question = _ids(
        tokenizer, f" Question: What is the secret number of {city}? Answer: The secret number of {city} is"
    )
    room = num_tokens - len(start) - len(needle) - len(question)
    if room < 1 or number not in tokenizer.decode(needle):
        return None
    text: list[int] = []
    while len(text) < room:
        text += _ids(tokenizer, " ".join(_sentence(draw) for _ in range(500)) + " ")
    depth = int(DEPTH * room)
    return start + text[:depth] + needle + text[depth:room] + question, number


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choice(words) for words in (_WHO, _DID, _WHAT, _WHEN)) + "."


def _ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """``text`` as token ids; ``special``: with the tokenizer's tokens around it."""
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
