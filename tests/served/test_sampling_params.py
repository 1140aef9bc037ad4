"""What sampling parameters take, and how they refuse the rest."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pickle
from typing import Any

import numpy as np
import pytest

from kvtier import InvalidRequest
from runner import RequestOutputKind, SamplingParams
from runner.sampling.params import MOST_BAD_LETTERS, StructuredOutputs

NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"max_new_tokens": 5},
            "max_new_tokens is called max_tokens here.*SamplingParams takes max_tokens, temperature",
        ),
        ({"max_completion_tokens": 5}, "is called max_tokens here"),
        ({"stop_sequences": ["x"]}, "is called stop here"),
        ({"random_seed": 5}, "is called seed here"),
        ({"do_sample": False}, "temperature=0 is greedy"),
        ({"num_return_sequences": 2}, "num_return_sequences is called n here"),
        ({"guided_json": {}}, r"use structured_outputs=StructuredOutputs\(json=...\)"),
        ({"top_logprobs": 3}, "is called logprobs here"),
        ({"length_penalty": np.zeros(2)}, "there is no beam search"),
        ({"extra_args": {"x": 1}, "best_of": 3}, "best_of is not supported: n answers.*extra_args is not supported"),
        ({"Temprature": 1}, r"there is no option 'Temprature' \(is it temperature\?\)"),
        ({"colour": 1}, r"there is no option 'colour'\. SamplingParams takes .*ignore_eos, n, .*output_kind$"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_are_not_taken_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        SamplingParams(max_tokens=3, **options)
    with pytest.raises(InvalidRequest, match=said):
        dataclasses.replace(SamplingParams(), **options)


def test_options_that_change_nothing_pass() -> None:
    others: dict[str, Any] = {"num_beams": 1, "best_of": None, "typical_p": 1.0, "logprobs": False, "logit_bias": {}}
    assert SamplingParams(3, 0.5, **others) == SamplingParams(3, 0.5)


def test_params_are_a_plain_frozen_dataclass() -> None:
    params = SamplingParams(3, 0.5, 0.9, 7, 11, "end", True)
    assert dataclasses.astuple(params)[:7] == (3, 0.5, 0.9, 7, 11, ("end",), True)
    whole = SamplingParams(
        max_tokens=9,
        n=3,
        min_p=0.1,
        presence_penalty=-2,
        logit_bias={"7": 5, np.int64(8): -100},
        stop_token_ids=[3, 3, 1],
        allowed_token_ids=np.array([4, 7]),
        bad_words=["x"],
        structured_outputs=StructuredOutputs(choice=["a", "b"]),
        logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )
    assert (whole.logit_bias, whole.stop_token_ids, whole.logprobs) == ({7: 5.0, 8: -100.0}, (3, 1), 1)
    for one in (params, whole):
        assert pickle.loads(pickle.dumps(one)) == one == dataclasses.replace(one)
        assert hash(one) == hash(dataclasses.replace(one))
    assert dataclasses.replace(params, top_k=2).top_k == 2
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in dataclasses.fields(params)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("n", [0, 129, 1.0, True, None]),
        ("min_p", [-0.1, 1.1, NAN, "0", None]),
        ("presence_penalty", [2.1, -2.1, NAN, None]),
        ("frequency_penalty", [2.1, float("inf"), "1"]),
        ("repetition_penalty", [0, -1, NAN, float("inf"), None]),
        ("logit_bias", [[1], {"a": 1}, {"-1": 1}, {1: 101}, {1: NAN}, {1: None}, {1.5: 1}, {True: 1}, {"9" * 30: 1}]),
        ("stop_token_ids", ["12", [-1], [1.0], [True], 7]),
        ("min_tokens", [-1, 17, 1.0, None]),
        ("allowed_token_ids", [[], ["a"], 3]),
        ("bad_words", ["x", [""], [3], 5]),
        ("structured_outputs", [{"json": {}}, "x"]),
        ("logprobs", [-1, 21, 1.5, "3"]),
        ("prompt_logprobs", [-2, 10**30]),
        ("detokenize", [1, None]),
        ("output_kind", [0, "DELTA"]),
    ],
)
def test_values_that_cannot_be_meant_are_refused_with_the_name(name: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: value})


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop needs detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(InvalidRequest, match="ignore_eos must be False"):
        SamplingParams(structured_outputs=StructuredOutputs(json_object=True), ignore_eos=True)


def test_ids_that_a_vocabulary_does_not_have_are_refused() -> None:
    good: dict[str, Any] = {"logit_bias": {9: 1.0}, "stop_token_ids": [9], "allowed_token_ids": [9]}
    SamplingParams(**good).check_token_ids(10)
    for name in good:
        with pytest.raises(InvalidRequest, match=f"{name} must have ids below 9"):
            SamplingParams(**{name: good[name]}).check_token_ids(9)


def test_each_of_n_answers_has_a_seed_of_its_own_and_the_first_the_given_one() -> None:
    params = SamplingParams(n=4, seed=-5, temperature=0.7)
    children = [params.child(i) for i in range(4)]
    assert children == [params.child(i) for i in range(4)]
    assert children[0] == dataclasses.replace(params, n=1)
    seeds = [child.seed % 2**64 for child in children if child.seed is not None]
    assert all(abs(a - b) > 1000 for a, b in itertools.combinations(seeds, 2)) and len(seeds) == 4
    assert SamplingParams(n=2).child(1) == SamplingParams()


def test_long_values_are_cut_in_messages() -> None:
    for name in ("max_tokens", "top_p", "seed", "stop", "n", "logprobs", "logit_bias", "structured_outputs"):
        with pytest.raises(InvalidRequest, match=name) as refused:
            SamplingParams(**{name: [0] * 10_000})
        assert len(str(refused.value)) < 1000


def test_all_bad_words_together_have_a_bound() -> None:
    SamplingParams(bad_words=["a" * (MOST_BAD_LETTERS - 1), "b"])
    with pytest.raises(InvalidRequest, match="bad_words must have at most 16,384 letters in all, got 16385"):
        SamplingParams(bad_words=["a" * MOST_BAD_LETTERS, "b"])
