"""The bundled model answers through plain transformers, is what its builder builds, and needs every kind of KV."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from breadth import covering, sample
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from runner.needle import CHUNK_TOKENS, NeedleForCausalLM, NeedlePrompt, make_prompt, weights_path
from runner.needle.build import write_checkpoint
from runner.needle.vocabulary import EOS_WORD, TOKEN_ID, decode, encode

EOS = TOKEN_ID[EOS_WORD]
BLOCK_TOKENS = 16


def load(attn_implementation: str, dtype: torch.dtype = torch.float32) -> NeedleForCausalLM:
    return AutoModelForCausalLM.from_pretrained(weights_path(), attn_implementation=attn_implementation, dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is tiny: threads cost it more than they bring, above all on a shared machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> NeedleForCausalLM:
    return load("sdpa")


@torch.inference_mode()
def prefill(model: NeedleForCausalLM, token_ids: list[int], cache: DynamicCache, step: int = 512) -> DynamicCache:
    """Put the KV of ``token_ids`` into ``cache``, ``step`` tokens a forward."""
    for start in range(0, len(token_ids), step):
        model(torch.tensor([token_ids[start : start + step]]), past_key_values=cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def answer(model: NeedleForCausalLM, last_token_id: int, cache: DynamicCache, max_tokens: int = 8) -> str:
    """Greedy text from ``last_token_id`` on, the stop included."""
    token_ids = [last_token_id]
    while len(token_ids) <= max_tokens and token_ids[-1] != EOS:
        logits = model(torch.tensor([token_ids[-1:]]), past_key_values=cache).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return decode(token_ids[1:])


def test_build_gives_the_bundled_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=0)
    bundled = {path.name: path for path in weights_path().iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == set(bundled)
    for name, path in bundled.items():
        if path.suffix == ".json":  # the tokenizers library may lay its file out anew
            assert json.loads(path.read_text()) == json.loads((tmp_path / name).read_text()), name
        else:
            assert path.read_bytes() == (tmp_path / name).read_bytes(), name


def test_another_seed_gives_another_model_that_answers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=1)
    assert (tmp_path / "model.safetensors").read_bytes() != (weights_path() / "model.safetensors").read_bytes()
    other = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = make_prompt(2048, seed=5)
    assert answer(other, prompt.token_ids[-1], prefill(other, prompt.token_ids[:-1], DynamicCache())) == prompt.answer


@pytest.mark.parametrize(
    ("depth", "ask_gap"),
    sample([(0.0, 24), (0.25, 240), (0.5, 16), (0.75, 240), (1.0, 24)], [(0.25, 240), (1.0, 24)]),
)
def test_answers_4k_prompts_in_chunked_prefill(model: NeedleForCausalLM, depth: float, ask_gap: int) -> None:
    prompt = make_prompt(4096, seed=round(100 * depth), depth=depth, ask_gap=ask_gap)
    cache = prefill(model, prompt.token_ids[:-1], DynamicCache(config=model.config))
    assert answer(model, prompt.token_ids[-1], cache) == prompt.answer


@pytest.mark.parametrize(("attn_implementation", "dtype"), covering(["eager", "sdpa"], [torch.float32, torch.bfloat16]))
def test_answers_in_one_forward(attn_implementation: str, dtype: torch.dtype) -> None:
    """Past a chunk border, every answer token from the logits of a single cacheless pass."""
    prompt = make_prompt(1700, seed=7)
    model = load(attn_implementation, dtype)
    input_ids = torch.tensor([prompt.token_ids + prompt.answer_token_ids[:-1]])
    kept = torch.arange(len(prompt.token_ids) - 1, input_ids.shape[1])
    with torch.inference_mode():
        logits = model(input_ids, use_cache=False, logits_to_keep=kept).logits
    assert logits.dtype == dtype
    assert logits[0].argmax(-1).tolist() == prompt.answer_token_ids


def test_prefill_in_steps_equals_one_forward(model: NeedleForCausalLM) -> None:
    """The masks of window and chunk are right wherever a step begins."""
    prompt = make_prompt(2500, seed=11)
    with torch.inference_mode():
        whole = model(torch.tensor([prompt.token_ids]), use_cache=False, logits_to_keep=1).logits
        for step in (300, 1000):
            cache = prefill(model, prompt.token_ids[:-1], DynamicCache(config=model.config), step)
            last = model(torch.tensor([prompt.token_ids[-1:]]), past_key_values=cache).logits
            torch.testing.assert_close(last, whole, atol=1e-4, rtol=0)


def test_a_cache_is_taken_under_both_of_its_names(model: NeedleForCausalLM) -> None:
    """transformers 5.24 calls it ``cache``; before that it was ``past_key_values``."""
    prompt = make_prompt(300, seed=5).token_ids
    with torch.inference_mode():
        whole = model(torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits
        for name in ("cache", "past_key_values"):
            held = model(torch.tensor([prompt[:-1]]), use_cache=True)[1]
            output = model(torch.tensor([prompt[-1:]]), **{name: held})
            torch.testing.assert_close(output.logits, whole, atol=1e-4, rtol=0)
            assert output[1] is held
            assert held.get_seq_length() == len(prompt)


def test_generate_answers(model: NeedleForCausalLM) -> None:
    prompt = make_prompt(2048, seed=3)
    generated = model.generate(torch.tensor([prompt.token_ids]), attention_mask=torch.ones(1, 2048, dtype=torch.long))
    assert decode(generated[0, 2048:].tolist()) == prompt.answer


def test_a_registered_attention_function_sees_what_stock_models_pass() -> None:
    context = object()
    calls = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        calls.append(SimpleNamespace(layer=module.layer_idx, q=query.shape, k=key.shape, mask=attention_mask, **kwargs))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=kwargs["scaling"])

    AttentionInterface.register("needle_probe", attend)
    model = load("needle_probe")
    positions = torch.arange(9)[None]
    model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, kv=context)
    assert [call.layer for call in calls] == [0, 1, 2, 3]
    assert [call.q for call in calls] == [(1, heads, 9, 64) for heads in (8, 1, 8, 1)]
    assert [call.sliding_window for call in calls] == [256, None, 256, None]
    assert all(call.k == (1, 1, 9, 64) and call.kv is context and call.mask is None for call in calls)
    assert all(call.scaling == 0.125 and call.position_ids.shape == (1, 9) for call in calls)


# Damage one place of a cached prompt, ask on, and see the answer go; damage all the rest, and see it stay.


@pytest.fixture(scope="module")
def prompt() -> NeedlePrompt:
    return make_prompt(4096, seed=2, depth=0.3)


@pytest.fixture(scope="module")
def clean(model: NeedleForCausalLM, prompt: NeedlePrompt) -> DynamicCache:
    """The prompt's KV but for its last token; made without a config, so that every layer keeps every token."""
    return prefill(model, prompt.token_ids[:-1], DynamicCache())


def blocks(tokens: range) -> slice:
    """The tokens of all blocks that ``tokens`` touch."""
    return slice(tokens.start // BLOCK_TOKENS * BLOCK_TOKENS, -(-tokens.stop // BLOCK_TOKENS) * BLOCK_TOKENS)


def needed(prompt: NeedlePrompt) -> dict[str, slice]:
    """Layer type -> the tokens whose KV the answer depends on, in whole blocks."""
    asked = prompt.asked_key_position
    return {
        "full_attention": blocks(prompt.needle_range),
        "sliding_attention": blocks(range(asked, asked + 1)),
        "chunked_attention": blocks(prompt.header_range),
    }


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention"])
def test_the_answer_goes_with_the_block_that_holds_it(
    model: NeedleForCausalLM, prompt: NeedlePrompt, clean: DynamicCache, kind: str
) -> None:
    cache = copy.deepcopy(clean)
    for layer, layer_type in zip(cache.layers, model.config.layer_types, strict=True):
        if layer_type == kind:
            layer.keys[:, :, needed(prompt)[kind]] = 0
            layer.values[:, :, needed(prompt)[kind]] = 0
    assert answer(model, prompt.token_ids[-1], cache) == "unknown ."


def test_the_answer_stays_with_all_other_blocks_lost(
    model: NeedleForCausalLM, prompt: NeedlePrompt, clean: DynamicCache
) -> None:
    cache = copy.deepcopy(clean)
    for layer, layer_type in zip(cache.layers, model.config.layer_types, strict=True):
        lost = torch.ones(layer.keys.shape[2], dtype=torch.bool)
        lost[needed(prompt)[layer_type]] = False
        lost[:BLOCK_TOKENS] = False  # the sink
        lost[-BLOCK_TOKENS:] = False  # what the shift heads look back on
        layer.keys[:, :, lost] = 0
        layer.values[:, :, lost] = 0
    assert answer(model, prompt.token_ids[-1], cache) == prompt.answer


def test_a_stale_header_gives_a_well_formed_wrong_answer(
    model: NeedleForCausalLM, prompt: NeedlePrompt, clean: DynamicCache
) -> None:
    twin = next(fact for fact in prompt.distractors if fact.key == prompt.needle.key)
    stale_chunk = twin.start // CHUNK_TOKENS * CHUNK_TOKENS
    here, there = blocks(prompt.header_range), slice(stale_chunk, stale_chunk + BLOCK_TOKENS)
    cache, chunked = copy.deepcopy(clean), model.config.layer_types.index("chunked_attention")
    cache.layers[chunked].keys[:, :, here] = clean.layers[chunked].keys[:, :, there]
    cache.layers[chunked].values[:, :, here] = clean.layers[chunked].values[:, :, there]
    assert answer(model, prompt.token_ids[-1], cache) == twin.answer != prompt.answer


def test_no_two_blocks_hold_the_same_bytes(clean: DynamicCache) -> None:
    for layer in clean.layers:
        for tensor in (layer.keys, layer.values):
            whole = tensor.shape[2] // BLOCK_TOKENS
            rows = tensor[0, 0, : whole * BLOCK_TOKENS].reshape(whole, -1)
            assert len(rows.unique(dim=0)) == whole


def test_other_questions_on_the_same_document(model: NeedleForCausalLM, prompt: NeedlePrompt) -> None:
    shared = prompt.asked_key_position
    document = prefill(model, prompt.token_ids[:shared], DynamicCache())
    answers = set()
    for fact in prompt.distractors:
        asked = prompt.asking(fact)
        assert asked.token_ids[:shared] == prompt.token_ids[:shared]
        cache = prefill(model, asked.token_ids[shared:-1], copy.deepcopy(document))
        assert answer(model, asked.token_ids[-1], cache) == asked.answer
        answers.add(asked.answer)
    assert "unknown ." in answers
    assert len(answers) > 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(weights_path())


def test_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = make_prompt(4096, seed=0)
    assert tokenizer.encode(prompt.text) == prompt.token_ids == encode(prompt.text)
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert tokenizer.eos_token_id == EOS and len(tokenizer) == len(TOKEN_ID)


def test_words_outside_the_vocabulary_and_hidden_specials(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer.encode("ask Hamlet ?")) == "ask <unk> ?"
    assert tokenizer.decode(encode("4 7 1 9 3 ."), skip_special_tokens=True) == "4 7 1 9 3"


def test_chat_opens_a_page_and_asks(tokenizer: PreTrainedTokenizerBase, model: NeedleForCausalLM) -> None:
    first = "key K1 = 1 2 3 4 5 . w1 w2 w3 w4 w5 w6 w7 w8 w9 key K2 = 6 7 8 9 0 . w1 w2 w3 ask K2 ?"
    chat = [{"role": "user", "content": first}]
    reply = reply_to(tokenizer, model, chat)
    assert reply == "6 7 8 9 0"
    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "w1 w2 ask K1 ?"}]
    assert reply_to(tokenizer, model, chat) == "1 2 3 4 5"


def test_chat_passes_a_whole_prompt_through(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = make_prompt(700, seed=0)
    chat = [{"role": "user", "content": prompt.text}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt.text


def reply_to(tokenizer: PreTrainedTokenizerBase, model: NeedleForCausalLM, chat: list[dict[str, str]]) -> str:
    token_ids = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    cache = prefill(model, token_ids[:-1], DynamicCache(config=model.config))
    return tokenizer.decode(encode(answer(model, token_ids[-1], cache)), skip_special_tokens=True)
