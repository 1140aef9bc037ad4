"""Penalties, biases, masks and words against transformers' own processors, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from kvtier import InvalidRequest
from runner import SamplingParams
from runner.errors import NonFiniteLogits, NoTokenAllowed
from runner.sampling.bad_words import tokens_of
from runner.sampling.draw import SamplingState
from served.drawing import Drawing, choose

VOCABULARY = 300
EOS = (1, 2)
BAD = [(5,), (7, 8), (7, 9), (20, 21, 22), (8, 8)]
INF = float("inf")

PARAMS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -2.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"logit_bias": {3: 5.0, 40: -100.0, 299: 2.5}},
    {"min_tokens": 6, "stop_token_ids": [77]},
    {"allowed_token_ids": [0, 4, 8, 150, 299]},
    {"bad_words": ["given as tokens"]},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "logit_bias": {4: 9.0},
        "min_tokens": 3,
        "allowed_token_ids": list(range(0, 300, 2)),
        "bad_words": ["x"],
        "min_p": 0.01,
        "top_k": 50,
    },
]
"""All of them bite on the tokens below."""


class Additive(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's definition: logit - count * frequency - (count > 0) * presence, over the answer."""

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, self.prompt :], minlength=scores.shape[1]).float()
        return scores - self.frequency * counts - self.presence * (counts > 0)


def state_of(params: dict[str, Any], prompt: Sequence[int] = (), seed: int = 0) -> SamplingState:
    words = BAD if "bad_words" in params else []
    return SamplingState.of(SamplingParams(seed=seed, **params), prompt, EOS, bad_words=words)


def expected(row: torch.Tensor, params: dict[str, Any], prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The changed logits, by transformers where it has the processor."""
    ids, scores = torch.tensor([[*prompt, *answer]]), row.clone()[None]
    if (allowed := params.get("allowed_token_ids")) is not None:
        others = sorted(set(range(VOCABULARY)) - set(allowed))
        scores = SuppressTokensLogitsProcessor(others)(ids, scores)
    if "bad_words" in params:
        words = [list(word) for word in BAD]
        scores = NoBadWordsLogitsProcessor(words, eos_token_id=0)(torch.tensor([answer], dtype=torch.long), scores)
    if len(answer) < params.get("min_tokens", 0):
        scores = SuppressTokensLogitsProcessor([*EOS, *params.get("stop_token_ids", [])])(ids, scores)
    for token, bias in params.get("logit_bias", {}).items():
        scores[0, token] += bias
    if (penalty := params.get("repetition_penalty", 1.0)) != 1:
        scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    amounts = (params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0))
    return Additive(len(prompt), *amounts)(ids, scores)[0]


def changed(rows: torch.Tensor, states: Sequence[SamplingState], drawing: Drawing) -> torch.Tensor:
    """What a token is chosen from."""
    drawing.choose(rows, states)
    batch = drawing.sampler._batch
    assert batch is not None and batch._edits is not None
    return batch._edits.applied(rows, drawing.counts(states))


def test_logits_are_changed_as_transformers_changes_them_after_every_token() -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCABULARY, 40).tolist() for _ in PARAMS]
    states = [state_of(params, prompt) for params, prompt in zip(PARAMS, prompts, strict=True)]
    answers: list[list[int]] = [[] for _ in PARAMS]
    drawing = Drawing()
    for token in [7, 20, 21, 7, 7, 8, 8, *random.integers(0, VOCABULARY, 100).tolist(), 20, 21]:
        rows = torch.tensor(random.standard_normal((len(PARAMS), VOCABULARY)) * 3, dtype=torch.float32)
        rows[:, 13] = -INF
        found = changed(rows, states, drawing)
        for i, params in enumerate(PARAMS):
            due = expected(rows[i], params, prompts[i], answers[i])
            assert torch.allclose(found[i], due, rtol=1e-6, atol=1e-6), (params, len(answers[i]))
            drawing.take(states[i], token)
            answers[i].append(token)


def test_a_row_with_any_options_draws_the_same_alone_in_any_company_and_again() -> None:
    random = np.random.default_rng(1)
    kinds = PARAMS * 2
    prompts = [random.integers(0, VOCABULARY, 30).tolist() for _ in kinds]
    rows = torch.tensor(random.standard_normal((25, len(kinds), VOCABULARY)), dtype=torch.float32)
    before = rows.clone()

    def run(members: Sequence[int], logprobs: int | None = None) -> dict[int, list[int]]:
        states = {i: state_of({**kinds[i], "logprobs": logprobs}, prompts[i], seed=i) for i in members}
        drawing, texts = Drawing(), {i: [] for i in members}
        for step in range(25):
            order = sorted(members, key=lambda i: (i * 7 + step) % 11) if step % 3 == 0 else list(members)
            for _ in range(1 + step % 2):  # a step that failed after its choice comes again
                chosen = drawing.choose(rows[step, order], [states[i] for i in order])
            assert chosen.sound.all()
            for i, token in zip(order, chosen.ids.tolist(), strict=True):
                drawing.take(states[i], token)
                texts[i].append(token)
        return texts

    together = run(range(len(kinds)))
    assert run(range(len(kinds)), logprobs=3) == together
    assert {i: run([i])[i] for i in (1, 4, 8, 9, 19)} == {i: together[i] for i in (1, 4, 8, 9, 19)}
    assert run([3, 9, 14]) == {i: together[i] for i in (3, 9, 14)}
    assert torch.equal(rows, before), "the logits are the caller's"
    assert not set(EOS) & set(together[6][:6]) and set(together[7]) <= {0, 4, 8, 150, 299}
    assert 5 not in together[8] and not any(pair in BAD for pair in zip(together[8], together[8][1:], strict=False))


def test_options_that_leave_no_token_end_their_own_row_and_say_so() -> None:
    states = [state_of({}), state_of({"min_tokens": 3, "allowed_token_ids": [1, 2]}), state_of({"logit_bias": {3: 1}})]
    rows = torch.zeros(3, VOCABULARY)
    rows[2, 9] = float("nan")
    chosen = choose(rows, states)
    assert chosen.sound.tolist() == [True, False, False]
    assert isinstance(chosen.why(1, "float32"), NoTokenAllowed)
    assert isinstance(chosen.why(2, "float32"), NonFiniteLogits)


def test_ids_beyond_the_logits_change_no_other_row() -> None:
    beyond: dict[str, Any] = {"logit_bias": {VOCABULARY: 50.0}, "stop_token_ids": [VOCABULARY + 3], "min_tokens": 2}
    params = SamplingParams(repetition_penalty=2.0, bad_words=["x"], **beyond)
    states = [SamplingState.of(params, [VOCABULARY + 1, 10**6], EOS, bad_words=[[VOCABULARY + 4]]), state_of({})]
    rows = torch.ones(2, VOCABULARY)
    found = changed(rows, states, Drawing())
    assert torch.equal(found[1], rows[1]) and torch.equal(found[0, 3:], rows[0, 3:])


def test_words_become_tokens_at_the_start_of_a_text_and_after_a_space() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [50, *map(ord, text[2:])] if text.startswith(" b") else [ord(x) for x in text if x not in "- "]

    assert tokens_of([], None) == []
    assert tokens_of(["a", "bc", " a"], Letters()) == [(97,), (98, 99), (50, 99)]
    for words, tokenizer in ((["a"], None), (["-"], Letters()), (["\ud800"], Letters())):
        with pytest.raises(InvalidRequest, match="bad_words"):
            tokens_of(words, tokenizer)
    with pytest.raises(InvalidRequest, match="bad_words"):
        SamplingState.of(SamplingParams(bad_words=["a"]))
