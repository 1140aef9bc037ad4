"""SmolLM2 135M Instruct: a conversation."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from server.running import serving

from runner import LLM, AsyncLLM, SamplingParams
from runner.model.hybrid import HybridModel

from .conftest import Transformers

pytestmark = pytest.mark.timeout(3600)

GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def own(smollm_file: Path) -> Transformers:
    return Transformers(smollm_file)


def test_a_conversation_is_that_of_generate(smollm: HybridModel, own: Transformers) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(smollm, device_memory="128MiB", host_memory=0) as llm:
        for cached, question in ((0, "And of Italy?"), (32, "")):
            answer = llm.chat(turns, GREEDY, use_tqdm=False)[0]
            ids = own.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            assert answer.prompt_token_ids == ids
            wanted = own.generate(ids, GREEDY.max_tokens)
            assert answer.token_ids == wanted
            assert answer.text == own.tokenizer.decode(wanted, skip_special_tokens=True)
            assert answer.cached_tokens["device"] >= cached
            turns += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]


def test_a_conversation_over_http_is_that_of_generate(smollm: HybridModel, own: Transformers) -> None:
    turns = [{"role": "user", "content": "Name three colours of the sea."}]
    with (
        AsyncLLM(smollm, device_memory="128MiB", host_memory=0) as llm,
        serving(llm, names=("smollm",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for cached, question in ((0, "And three of the sky?"), (32, "")):
            ids = own.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            wanted = own.tokenizer.decode(own.generate(ids, GREEDY.max_tokens), skip_special_tokens=True)
            options = {"model": "smollm", "messages": turns, "max_tokens": GREEDY.max_tokens, "temperature": 0}
            answer = client.chat.completions.create(**options)
            assert answer.choices[0].message.content == wanted
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.prompt_tokens_details.cached_tokens >= cached
            deltas = [
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)
            ]
            assert "".join(deltas) == wanted and len(deltas) > 2
            turns += [{"role": "assistant", "content": wanted}, {"role": "user", "content": question}]


def test_the_end_of_a_turn_ends_its_text(smollm: HybridModel) -> None:
    with LLM(smollm, device_memory="128MiB", host_memory=0) as llm:
        turns = [{"role": "user", "content": "Say hello, and nothing else."}]
        answer = llm.chat(turns, SamplingParams(max_tokens=200, temperature=0), use_tqdm=False)[0]
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_text_in_a_batch_is_that_of_generate(smollm: HybridModel, own: Transformers) -> None:
    prompts = ["Once upon a time", "The sea is", "One, two, three, " * 60]
    wanted = [own.generate(own.tokenizer(prompt)["input_ids"], GREEDY.max_tokens) for prompt in prompts]
    with LLM(smollm, device_memory="128MiB", host_memory=0, max_batched_tokens=256) as llm:
        for _ in ("cold", "from the cache"):
            assert [out.token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)] == wanted
