"""The offline API: what it takes and what it gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core.forking import in_child
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runner import LLM, NonFiniteLogits, RequestOutput, SamplingParams
from runner.engine import memory
from runner.engine.stops import StopStrings
from runner.engine.text import TextStream
from runner.model import checkpoint
from runner.model.hybrid import HybridModel
from runner.needle import make_prompt, weights_path
from served.conftest import SMALL

GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPT = make_prompt(1000, seed=0)


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(llm: LLM) -> None:
    """It waited for the engine's thread, which runs in its parent only."""
    before = llm.generate(PROMPT.text, GREEDY, use_tqdm=False)[0]
    refused = "CacheClosed: this engine is of the process that this one was forked from"
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT.text, GREEDY, use_tqdm=False),
        llm.reset_prefix_cache,
        llm.settle,
        llm.audit,
    ]
    for call in calls:
        assert in_child(call).startswith(refused)
    assert in_child(llm.close) == "None"
    again = llm.generate(PROMPT.text, GREEDY, use_tqdm=False)[0]
    assert again.token_ids == before.token_ids
    assert sum(again.cached_tokens.values()) > 900, "the child's close has closed nothing"


def test_an_audit_runs_on_the_engines_thread_between_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on with copies after the last answer; meanwhile the books change."""
    seen = list[tuple[str, Any]]()
    audit = llm.cache.audit

    def watched() -> Any:
        seen.append((threading.current_thread().name, llm.scheduler.step))
        return audit()

    monkeypatch.setattr(llm.cache, "audit", watched)
    llm.generate([PROMPT.text] * 3, GREEDY, use_tqdm=False)
    assert llm.audit() == []
    assert seen == [("kvtier-engine", None)]


def test_on_a_cpu_the_engines_thread_keeps_no_notes_for_gradients(llm: LLM) -> None:
    assert llm.thread.call(torch.is_inference_mode_enabled).result()


def test_a_step_on_a_cpu_has_2048_tokens_unless_it_is_told_otherwise() -> None:
    model, told = HybridModel.load(weights_path(), "cpu"), {"max_batched_tokens": 64}
    for given, options, tokens in (model, {}, 2048), (weights_path(), {}, 2048), (model, told, 64):
        with LLM(given, "cpu", "4MiB", 0, **options) as llm:
            assert llm.scheduler._max_batched_tokens == tokens


def test_text_tokens_and_dicts_are_the_same_prompt(llm: LLM) -> None:
    forms: list[Any] = [
        PROMPT.text,
        PROMPT.token_ids,
        np.array(PROMPT.token_ids),
        {"prompt": PROMPT.text},
        {"prompt_token_ids": PROMPT.token_ids, "cache_salt": "mine", "priority": 1},
    ]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(o.token_ids) for o in outputs}) == 1
    assert [o.prompt_token_ids for o in outputs] == [PROMPT.token_ids] * len(forms)
    assert outputs[0].text == PROMPT.answer.removesuffix(" .")
    assert outputs[0].finish_reason == "stop"
    assert outputs[-1].cached_tokens == {"device": 0, "host": 0}, "another salt shares nothing"
    assert 0 < (outputs[0].ttft_s or 0) <= outputs[0].latency_s


def test_a_request_without_finite_logits_ends_with_an_error_and_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def answers(salt: str) -> list[RequestOutput]:
        ids = [make_prompt(300, seed).token_ids for seed in range(3)]
        return llm.generate([{"prompt_token_ids": x, "cache_salt": salt} for x in ids], params, use_tqdm=False)

    expected = answers("one")
    forward, bad, sampled = llm.model.forward, str(int(expected[-1].request_id) + 2), 0

    def overflows(step: Any, cache: Any) -> torch.Tensor:
        nonlocal sampled
        logits = forward(step, cache)
        names = [step.request_ids[r] for r in step.sample_rows]
        if bad in names:
            sampled += 1
            if sampled == 3:
                logits[names.index(bad), 7] = torch.nan
        return logits

    monkeypatch.setattr(llm.model, "forward", overflows)
    first, failed, last = answers("two")
    assert [first.token_ids, last.token_ids] == [expected[0].token_ids, expected[2].token_ids]
    assert (failed.finish_reason, failed.token_ids) == ("error", expected[1].token_ids[:2])
    assert isinstance(failed.error, NonFiniteLogits) and "not finite in float32" in str(failed.error)
    again = answers("two")
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]
    assert [sum(output.cached_tokens.values()) > 0 for output in again] == [True, False, True]


def test_a_request_whose_options_leave_no_token_ends_with_an_error_and_alone(llm: LLM) -> None:
    end = llm.model.eos_token_ids[0]
    params = [GREEDY, SamplingParams(max_tokens=8, min_tokens=2, allowed_token_ids=[end]), GREEDY]
    first, failed, last = llm.generate([PROMPT.text] * 3, params, use_tqdm=False)
    assert first.token_ids == last.token_ids and first.finish_reason == "stop"
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert "leave no token" in str(failed.error)


def test_a_bar_moves_within_a_prompt(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(make_prompt(2000, seed=1).token_ids, GREEDY)
    assert "2,0" in capsys.readouterr().err.split("tokens computed")[-2]


def test_one_prompt_alone_is_a_batch_of_one(llm: LLM) -> None:
    assert len(llm.generate(PROMPT.text, GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate(PROMPT.token_ids, GREEDY, use_tqdm=False)) == 1


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [make_prompt(n, seed=n) for n in (1400, 300, 800, 500, 1200)]
    outputs = llm.generate([p.token_ids for p in prompts], GREEDY, use_tqdm=False)
    assert [llm.tokenizer.decode(o.token_ids) for o in outputs] == [p.answer for p in prompts]


def test_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (1, 3)]
    outputs = llm.generate([PROMPT.token_ids, PROMPT.token_ids], params, use_tqdm=False)
    assert [len(o.token_ids) for o in outputs] == [1, 3]
    assert [o.finish_reason for o in outputs] == ["length", "length"]


def test_ignore_eos_goes_on_to_the_length(llm: LLM) -> None:
    (output,) = llm.generate(
        PROMPT.token_ids, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), use_tqdm=False
    )
    assert (len(output.token_ids), output.finish_reason) == (9, "length")


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    digits = PROMPT.answer.split()
    stop = " ".join(digits[1:3])
    (output,) = llm.generate(PROMPT.token_ids, SamplingParams(max_tokens=8, temperature=0, stop=stop), use_tqdm=False)
    assert output.text.strip() == digits[0]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) == 3


def test_the_same_seed_draws_the_same_tokens_whoever_shares_the_batch(llm: LLM) -> None:
    drawn = SamplingParams(max_tokens=8, temperature=30.0, top_p=0.95, top_k=50, seed=7, ignore_eos=True)
    (alone,) = llm.generate(PROMPT.token_ids, drawn, use_tqdm=False)
    crowd = llm.generate([make_prompt(700, seed=1).token_ids, PROMPT.token_ids], [GREEDY, drawn], use_tqdm=False)
    other = SamplingParams(max_tokens=8, temperature=30.0, top_p=0.95, top_k=50, seed=8, ignore_eos=True)
    (different,) = llm.generate(PROMPT.token_ids, other, use_tqdm=False)
    assert alone.token_ids == crowd[1].token_ids != different.token_ids


def test_a_preempted_request_draws_what_it_would_have_drawn(model: HybridModel, llm: LLM) -> None:
    prompts = [make_prompt(100, seed=seed).token_ids for seed in range(2)]
    params = [SamplingParams(15, 30.0, top_p=p, seed=4, ignore_eos=True) for p in (1.0, 0.9)]
    roomy = llm.generate(prompts, params, use_tqdm=False)
    with LLM(model, "cpu", dict.fromkeys(SMALL, 14), 0) as narrow:  # blocks for the prompts, none to spare
        crowded = narrow.generate(prompts, params, use_tqdm=False)
    assert sum(o.preemptions for o in crowded) > sum(o.preemptions for o in roomy) == 0
    assert [o.token_ids for o in crowded] == [o.token_ids for o in roomy]


def test_top_k_one_is_greedy(llm: LLM) -> None:
    (a,) = llm.generate(PROMPT.token_ids, SamplingParams(max_tokens=8, temperature=5.0, top_k=1), use_tqdm=False)
    (b,) = llm.generate(PROMPT.token_ids, GREEDY, use_tqdm=False)
    assert a.token_ids == b.token_ids


def test_a_top_p_that_float32_cannot_hold_is_greedy(llm: LLM) -> None:
    tiny = SamplingParams(max_tokens=8, temperature=5.0, top_p=1e-300)
    a, b = llm.generate([PROMPT.token_ids] * 2, [tiny, GREEDY], use_tqdm=False)
    assert a.token_ids == b.token_ids


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": PROMPT.text}], GREEDY, use_tqdm=False)
    assert llm.tokenizer.decode(output.token_ids) == PROMPT.answer


def test_a_failed_forward_leaves_a_working_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "forward", lambda step, cache: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([PROMPT.token_ids] * 3, GREEDY, use_tqdm=False)
    assert not llm.engine.has_requests()
    (output,) = llm.generate(PROMPT.token_ids, GREEDY, use_tqdm=False)
    assert llm.tokenizer.decode(output.token_ids) == PROMPT.answer


def test_stats_tell_sources_and_close_is_idempotent(model: HybridModel) -> None:
    llm = LLM(model, "cpu", SMALL, 0)
    llm.generate([PROMPT.token_ids], GREEDY, use_tqdm=False)
    llm.generate([PROMPT.token_ids], GREEDY, use_tqdm=False)
    stats = llm.stats()
    sources = stats["cache"]["prompt_tokens"]
    assert sum(sources.values()) == 2 * len(PROMPT.token_ids)
    assert sources["device"] == (len(PROMPT.token_ids) - 1) // 16 * 16
    assert stats["cache"]["host"] == {}
    llm.close()
    llm.close()


class Letters:
    """A tokenizer of bytes, so that characters can be split between tokens."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_never_shows_half_a_character() -> None:
    stream = TextStream(Letters())
    seen = []
    for byte in "aé€b".encode():
        stream.push(byte)
        seen.append(stream.text)
    assert seen == ["a", "a", "aé", "aé", "aé", "aé€", "aé€b"]
    stream.finish()
    assert stream.text == "aé€b"


def test_a_stop_string_may_come_in_pieces() -> None:
    stream = TextStream(Letters(), StopStrings(["END"]))
    assert [stream.push(byte) for byte in b"xxENDy"] == [False, False, False, False, True, True]
    stream.finish()
    assert stream.text == "xx"


def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """Byte-level BPE; and letters with bytes to fall back on, which is where the library's stream gives up."""
    letters = Tokenizer(
        models.BPE({f"<0x{i:02X}>": i for i in range(256)} | {"▁a": 256, "b": 257}, [], byte_fallback=True)
    )
    letters.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytewise.train_from_iterator(["größe 東京 😀"], trainers.BpeTrainer(initial_alphabet=alphabet))
    return {n: PreTrainedTokenizerFast(tokenizer_object=t) for n, t in (("letters", letters), ("bytewise", bytewise))}


@pytest.mark.parametrize("name", ["letters", "bytewise"])
def test_the_pieces_of_any_tokens_are_the_text_of_all(name: str) -> None:
    tokenizer, rng = tokenizers()[name], np.random.default_rng(0)
    texts = [list("größe 東京 😀".encode()), [256, 257, 256], *(rng.integers(0, 258, 30).tolist() for _ in range(50))]
    for tokens in texts:
        stream = TextStream(tokenizer)
        pieces = []
        for token in tokens:
            stream.push(token)
            pieces.append(stream.take())
        stream.finish()
        pieces.append(stream.take())
        assert "".join(pieces) == stream.text
        if name == "bytewise" or tokens in texts[:2]:
            assert stream.text == tokenizer.decode(tokens)


def test_stats_name_the_attention_backend_and_why(model: HybridModel) -> None:
    with LLM(model, "cpu", SMALL, 0) as llm:
        attention = llm.stats()["attention"]
    assert attention["backend"] == "reference" and "device is cpu" in attention["reason"]
    assert (attention["workspace_bytes"], attention["pinned_bytes"]) == (0, 0)


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_the_bytes_of_the_weights_are_known_before_they_are_read(dtype: Any) -> None:
    model = HybridModel.load(weights_path(), dtype=dtype, self_check=False).model
    weights = {p.data_ptr(): p.nbytes for p in model.state_dict().values()}
    assert checkpoint.weights_bytes(weights_path(), dtype) == sum(weights.values())


def test_of_a_folder_that_has_the_weights_twice_those_of_the_index_count(tmp_path: Path) -> None:
    first, second = {"a": torch.zeros(10), "n": torch.zeros(3, dtype=torch.int64)}, {"b": torch.zeros(2, 5)}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    save_file(first | second, tmp_path / "consolidated.safetensors")
    files = {"a": "model-1.safetensors", "n": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert checkpoint.weights_bytes(tmp_path, "auto") == 20 * 4 + 3 * 8
    assert checkpoint.weights_bytes(tmp_path, torch.bfloat16) == 20 * 2 + 3 * 8, "integers stay what they are"


@pytest.mark.parametrize(
    ("given", "asked"), [({"device_memory": SMALL, "host_memory": 0}, []), ({}, ["device", "host"])]
)
def test_what_is_there_is_asked_only_where_no_memory_is_named(
    model: HybridModel, given: dict[str, Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    for tier in ("device", "host"):
        monkeypatch.setattr(memory, f"automatic_{tier}", lambda device, tier=tier: found.append(tier) or 64 << 20)
    with LLM(model, "cpu", **given):
        assert found == asked
