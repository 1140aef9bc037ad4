"""Prompts are laid out as their module says, at every length, and refuse the lengths that cannot work."""

from __future__ import annotations

from itertools import pairwise

import pytest
from breadth import sample

from runner.needle import CHUNK_TOKENS, make_prompt, usable_length
from runner.needle.vocabulary import decode


@pytest.mark.parametrize("num_tokens", [54, 600, 1531, 1570, 4096, 32768, 90112, 131072])
@pytest.mark.parametrize("depth", [None, 0.0, 0.5, 1.0])
def test_layout(num_tokens: int, depth: float | None) -> None:
    prompt = make_prompt(num_tokens, seed=num_tokens, depth=depth)
    words = prompt.text.split()
    assert len(prompt.token_ids) == len(words) == num_tokens
    assert words[0] == "<bos>" and words[-1] == "->"

    for chunk_start in range(0, num_tokens, CHUNK_TOKENS):
        header = chunk_start or 1
        assert words[header : header + 2] == ["page", "section"]
    header = prompt.header_range
    assert words[header.start : header.stop] == ["page", "section", f"S{prompt.tag}"]
    assert header.start // CHUNK_TOKENS == (num_tokens - 1) // CHUNK_TOKENS == (num_tokens + 4) // CHUNK_TOKENS

    asked = prompt.asked_key_position
    assert words[asked - 1 : asked + 2] == ["ask", prompt.key, "?"]
    assert num_tokens - asked >= 16 and words[-2].startswith("w")

    facts = (prompt.needle, *prompt.distractors)
    for fact in facts:
        assert decode(prompt.token_ids[fact.start : fact.token_range.stop]) == fact.text
    assert prompt.answer == prompt.needle.answer
    assert decode(prompt.answer_token_ids) == prompt.answer

    starts = sorted(fact.start for fact in facts)
    assert all(after - before >= 16 for before, after in pairwise(starts))
    assert words.count("key") == len({(fact.tag, fact.key) for fact in facts}) == len(facts)
    assert sum(fact.key == prompt.needle.key and fact.tag == prompt.tag for fact in facts) == 1


def test_depth_places_the_needle() -> None:
    starts = [make_prompt(90112, seed=0, depth=depth / 10).needle.start for depth in range(11)]
    assert starts == sorted(starts)
    assert all(abs(start - depth / 10 * 90112) < 64 for depth, start in enumerate(starts))


def test_the_same_arguments_give_the_same_prompt() -> None:
    assert make_prompt(5000, seed=4) == make_prompt(5000, seed=4) != make_prompt(5000, seed=5)


@pytest.mark.parametrize("ask_gap", sample([16, 24, 240], [240]))
def test_every_length_works_or_says_which_do(ask_gap: int) -> None:
    refused = 0
    for num_tokens in range(3000, 3000 + CHUNK_TOKENS):
        try:
            make_prompt(num_tokens, seed=0, ask_gap=ask_gap)
        except ValueError as error:
            refused += 1
            below, above = [int(word) for word in str(error).split() if word.isdigit()][-2:]
            assert below == usable_length(num_tokens, ask_gap) < num_tokens < above
            make_prompt(below, seed=0, ask_gap=ask_gap)
            make_prompt(above, seed=0, ask_gap=ask_gap)
        else:
            assert usable_length(num_tokens, ask_gap) == num_tokens
    assert refused == ask_gap + 13


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_tokens": 3072}, "3067 and 3105"),
        ({"num_tokens": 40}, "no room for a needle.*54 and more"),
        ({"num_tokens": -1}, "no room for a needle"),
        ({"num_tokens": 4096, "ask_gap": 15}, r"ask_gap must be in \[16, 240\]"),
        ({"num_tokens": 4096, "ask_gap": 241}, "ask_gap"),
        ({"num_tokens": 4096, "depth": 1.5}, "depth"),
    ],
)
def test_refusals(arguments: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_prompt(seed=0, **arguments)


def test_no_usable_length() -> None:
    with pytest.raises(ValueError, match="up to 30 tokens"):
        usable_length(30)
