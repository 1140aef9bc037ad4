"""POST /v1/completions, through OpenAI's own client."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import openai
import pytest

from runner import SamplingParams, needle
from runner.sampling.params import StructuredOutputs
from runner.server.protocol import CompletionBody
from server.running import Running

PROMPT = needle.make_prompt(200, seed=3)
ASK = {"model": "needle", "prompt": PROMPT.text, "temperature": 0}


def test_text_and_ids_give_the_same_answer_and_usage_counts_them(client: openai.OpenAI) -> None:
    told = [client.completions.create(**{**ASK, "prompt": p}) for p in (PROMPT.text, PROMPT.token_ids)]
    assert [t.choices[0].text for t in told] == [PROMPT.answer.removesuffix(" .")] * 2
    assert told[0].choices[0].finish_reason == "stop"
    usage = told[1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (200, 6, 206)
    cached = usage.prompt_tokens_details
    assert cached.cached_tokens == sum(cached.cached_tokens_by_tier.values()) >= 160
    assert told[0].id.startswith("cmpl-")
    assert told[0].object == "text_completion"


def test_choices_of_several_prompts_come_in_their_order(client: openai.OpenAI) -> None:
    others = [needle.make_prompt(120, seed=seed) for seed in (5, 6)]
    told = client.completions.create(**{**ASK, "prompt": [p.text for p in others], "n": 2, "temperature": 1e-4})
    assert [c.index for c in told.choices] == [0, 1, 2, 3]
    assert [c.text + " ." for c in told.choices] == [p.answer for p in others for _ in range(2)]


def test_a_stream_adds_up_to_the_whole_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) + " ." == PROMPT.answer
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 6
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_two_prompts_and_two_answers_has_all_four(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    options = {"n": 2, "temperature": 1e-4, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.completions.create(**{**ASK, "prompt": [PROMPT.text] * 2, **options}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == dict.fromkeys(range(4), PROMPT.answer.removesuffix(" ."))
    assert chunk.usage.completion_tokens == 24


def test_what_a_request_says_of_sampling_reaches_the_engine(running: Running) -> None:
    """A parameter that requests have by the same name is to be added here, and nowhere in ``Served.sampling``."""
    said = {"n": 2, "max_tokens": 9, "min_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125}
    said |= {"seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logprobs": 4}
    said |= {"prompt_logprobs": 2, "include_stop_str_in_output": True, "skip_special_tokens": False}
    lists = {"stop": ["ab"], "stop_token_ids": [3], "allowed_token_ids": [5, 6], "bad_words": ["no"]}
    told = said | {name: tuple(of) for name, of in lists.items()}
    told |= {"logit_bias": {5: 1.5}, "structured_outputs": StructuredOutputs(regex="a+"), "ignore_eos": True}
    assert told.keys() == {field.name for field in fields(SamplingParams)} & CompletionBody.model_fields.keys()
    one = {**said, **lists, "logit_bias": {"5": 1.5}, "structured_outputs": {"regex": "a+"}}
    for asked, name in ((one, "ignore_eos"), (one | {"ignore_eos": True}, "structured_outputs")):
        body = CompletionBody(prompt="a", **{key: value for key, value in asked.items() if key != name})
        got = running.server.served.sampling(body, 4, max_tokens=body.max_tokens, logprobs=body.logprobs)
        assert {key: getattr(got, key) for key in told if key != name} == {k: told[k] for k in told if k != name}
    plain = running.server.served.sampling(CompletionBody(prompt="a", stop=""), 4, max_tokens=9, logprobs=None)
    assert (plain.stop, plain.n, plain.structured_outputs) == ((), 1, None)


def test_many_clients_at_once_get_their_own_answers(running: Running) -> None:
    prompts = [needle.make_prompt(96, seed=seed) for seed in range(12)]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: needle.NeedlePrompt) -> str:
                stream = await client.completions.create(**{**ASK, "prompt": prompt.text}, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    assert [text + " ." for text in asyncio.run(all_of_them())] == [p.answer for p in prompts]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    told = client.completions.create(**{**ASK, "prompt": PROMPT.token_ids}, echo=True, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in told) if stream else told.choices[0].text
    assert text == f"{PROMPT.text}{PROMPT.answer.removesuffix(' .')}"


def test_fields_of_vllm_mean_what_they_mean_there(client: openai.OpenAI) -> None:
    digits = PROMPT.answer.split()
    extra = {"ignore_eos": True, "return_token_ids": True, "priority": 3, "request_id": "mine"}
    told = client.completions.create(**ASK, max_tokens=9, extra_body=extra)
    assert told.id == "cmpl-mine"
    assert told.choices[0].finish_reason == "length"
    assert len(told.choices[0].token_ids) == 9
    assert told.choices[0].prompt_token_ids == PROMPT.token_ids
    stop = {"stop": [digits[2]], "extra_body": {"include_stop_str_in_output": True}}
    told = client.completions.create(**ASK, **stop)
    assert told.choices[0].text == " ".join(digits[: digits.index(digits[2]) + 1])
    assert told.choices[0].stop_reason == digits[2]


def test_tenants_of_different_salts_see_nothing_of_each_other(running: Running, client: openai.OpenAI) -> None:
    """Neither in what is told nor in the work: the second tenant's prompt is computed whole."""
    prompt = needle.make_prompt(333, seed=99).text

    def cached_and_computed(**salt: str) -> tuple[int, int]:
        before = running.llm.engine.computed_tokens
        told = client.completions.create(**{**ASK, "prompt": prompt, "max_tokens": 1}, extra_body=salt)
        return told.usage.prompt_tokens_details.cached_tokens, running.llm.engine.computed_tokens - before

    cold = cached_and_computed(cache_salt="one")
    assert cold == (0, 333)
    assert cached_and_computed(cache_salt="one")[0] > 300
    assert cached_and_computed(cache_salt="two") == cold
    assert cached_and_computed() == cold


def test_logprobs_stand_beside_their_tokens(client: openai.OpenAI) -> None:
    whole = client.completions.create(**ASK, logprobs=2).choices[0].logprobs
    assert whole.tokens == PROMPT.answer.split()
    assert [max(best, key=best.get) for best in whole.top_logprobs] == whole.tokens
    assert whole.token_logprobs == [max(best.values()) for best in whole.top_logprobs]
    chunks = [c.choices[0].logprobs for c in client.completions.create(**ASK, logprobs=2, stream=True)]
    assert [token for c in chunks for token in c.tokens] == whole.tokens
    assert [at for c in chunks for at in c.text_offset] == whole.text_offset


def test_a_prompt_is_judged_without_an_answer(client: openai.OpenAI) -> None:
    """What evaluation harnesses ask for: echo, logprobs and no new token."""
    told = client.completions.create(**ASK, echo=True, logprobs=1, max_tokens=0).choices[0]
    words = PROMPT.text.split()
    assert told.text == PROMPT.text
    assert told.logprobs.tokens == words
    assert told.logprobs.token_logprobs[0] is told.logprobs.top_logprobs[0] is None
    assert all(best[word] <= 0 for word, best in zip(words[1:], told.logprobs.top_logprobs[1:], strict=True))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"guided_choice": ["w9 w8", "4 7 1"]}, "4 7 1"),
        ({"structured_outputs": {"regex": "(w1 ){2}w2"}}, "w1 w1 w2"),
        ({"guided_grammar": 'root ::= "w5 " ("w6" | "w6 w7")'}, None),
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI, form: dict, text: str | None) -> None:
    told = client.completions.create(**ASK, max_tokens=30, extra_body=form).choices[0]
    assert told.text == text or (text is None and told.text.startswith("w5 w6"))
    assert told.finish_reason == "stop"
