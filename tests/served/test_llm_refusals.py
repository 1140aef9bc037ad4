"""The offline API: what it refuses before anything runs, by the names that its caller knows."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvtier
from kvtier import AttentionUnavailable, ConfigError, InvalidRequest, MemoryUnavailable, RequestTooLarge
from runner import LLM, AsyncLLM, ModelLoadError, SamplingParams
from runner.engine import foreign, memory, options
from runner.model import checkpoint
from runner.model.hybrid import HybridModel
from runner.needle import make_prompt, weights_path
from served.conftest import SMALL

GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPT = make_prompt(1000, seed=0)


@pytest.mark.parametrize("params", [5, {"max_tokens": 2}, [None]])
def test_params_of_another_type(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="give one SamplingParams, or one per prompt"):
        llm.generate(PROMPT.token_ids, params, use_tqdm=False)


BAD_PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "empty list": ([], InvalidRequest, "no prompt"),
    "empty prompt": ([[]], InvalidRequest, "empty"),
    "id too high": ([[1, 461]], InvalidRequest, "out of the vocabulary"),
    "negative id": ([[1, -1]], InvalidRequest, "out of the vocabulary"),
    "floats": ([[1.5, 2.0]], InvalidRequest, "neither text nor"),
    "an id of 71 bits": ([[1, 2**70]], InvalidRequest, r"token ids in 0\.\.460: \[1, 1180591620717411303424\]"),
    "masked": ([np.ma.masked_equal([1, 2], 2)], InvalidRequest, "masked array; give the ids that count"),
    "text as a list": ([["page"] * 500_000], InvalidRequest, r"neither text nor .{1,300}\(4,000,000 characters\)"),
    "ragged": ([[[1], [2, 3]]], InvalidRequest, "token ids"),
    "None": ([None], InvalidRequest, "neither text nor|token ids"),
    "lone surrogate": (["page \ud800"], InvalidRequest, "no Unicode text"),
    "unknown field": ({"prompt": "page", "colour": 1}, InvalidRequest, "colour"),
    "never fits": ([make_prompt(200 * 16 + 200, seed=0).token_ids], RequestTooLarge, "full: needs"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, case: str) -> None:
    prompts, error, message = BAD_PROMPTS[case]
    before = llm.stats()
    with pytest.raises(error, match=message):
        good = [PROMPT.token_ids] if isinstance(prompts, list) and prompts else []
        llm.generate(good + prompts if good else prompts, GREEDY, use_tqdm=False)
    assert llm.stats() == before
    (output,) = llm.generate(PROMPT.token_ids, GREEDY, use_tqdm=False)
    assert llm.tokenizer.decode(output.token_ids) == PROMPT.answer


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"seed": "x"},
        {"stop": ""},
        {"stop": [1]},
    ],
)
def test_bad_sampling_params(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        SamplingParams(**fields)


def test_bad_engines(model: HybridModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        LLM(tmp_path, "cpu")
    with pytest.raises(ConfigError, match="unknown dtype"):
        LLM(weights_path(), "cpu", dtype="float12")
    with pytest.raises(MemoryUnavailable, match="device_memory"):
        LLM(model, "cpu", device_memory=100)
    with pytest.raises(MemoryUnavailable, match="host_memory"):
        LLM(model, "cpu", "8MiB", host_memory="100TiB")
    with pytest.raises(ConfigError, match="max_running"):
        LLM(model, "cpu", "8MiB", 0, max_running=0)


def test_attention_that_cannot_be_had_is_refused_before_weights_are_read(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(AttentionUnavailable, match=r"runs on CUDA.*attention='auto'"):
        LLM(weights_path(), "cpu", attention="flashinfer")
    with pytest.raises(ConfigError, match="must be one of auto"):
        LLM(weights_path(), "cpu", attention="fast")
    with pytest.raises(ConfigError, match="loaded with attention='reference'"):
        LLM(model, "cpu", SMALL, 0, attention="flashinfer")
    with LLM(model, "cpu", SMALL, 0, attention="reference") as llm:
        assert llm.stats()["attention"]["reason"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"device_memory": "8 gigs"}, ConfigError, "device_memory must be bytes or text such as '8GiB', got '8 gigs'"),
        ({"device_memory": "1KiB"}, MemoryUnavailable, "device_memory is 1,024 bytes, but one block"),
        ({"device_memory": {"all": 9}}, ConfigError, "device_memory must map every group"),
        ({"device_memory": "900TiB"}, MemoryUnavailable, "device_memory asks for .* lower device_memory"),
        ({"host_memory": "much"}, ConfigError, "host_memory must be bytes"),
        ({"host_memory": "1KiB"}, MemoryUnavailable, "host_memory is 1,024 bytes"),
        ({"host_memory": "900TiB"}, MemoryUnavailable, "host_memory asks for"),
        ({"block_tokens": 0}, ConfigError, "block_tokens must be"),
        ({"max_running": 0}, ConfigError, "max_running must be"),
        ({"dtype": "float12"}, ConfigError, "unknown dtype 'float12'"),
        ({"kv_cache_dtype": "int3"}, ConfigError, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8", "kv_scales": {0: {"k": 1.0, "v": 1.0}}}, ConfigError, "no scales for model layers"),
        ({"attention": "fast"}, ConfigError, "attention must be one of"),
        ({"attention": ["auto"]}, ConfigError, "attention must be one of"),
        ({"cuda_graphs": "no"}, ConfigError, "cuda_graphs must be True or False, got 'no'"),
        ({"batch_invariant": 2}, ConfigError, "batch_invariant must be True or False"),
        ({"store": "soon"}, ConfigError, "store must be one of"),
        ({"verify": True}, ConfigError, "verify must be one of"),
        ({"on_load_error": "retry"}, ConfigError, "on_load_error must be one of"),
        ({"deadline_s": 0}, ConfigError, "deadline_s must be a positive number"),
        ({"key_secret": "secret"}, ConfigError, "key_secret must be bytes"),
        ({"model_id": 5}, ConfigError, "model_id must be a string"),
        ({"copy_engine": "magic"}, ConfigError, "copy_engine must be one of"),
        ({"device": "gpu"}, ConfigError, "'cuda:0' is the first GPU.*got 'gpu'"),
        ({"device": "meta"}, ConfigError, "no model runs on device 'meta': it is for bookkeeping only"),
        ({"device": 0}, ConfigError, "device must be 'cpu' or 'cuda:N'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_are_checked_before_weights_are_read(
    given: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(error, match=message) as refused:
        LLM(weights_path(), **({"device": "cpu", "device_memory": "8MiB", "host_memory": 0} | given))
    assert "_bytes" not in str(refused.value) and "_blocks" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"block_size": 16}, "block_size (use block_tokens)"),
        ({"max_num_seqs": 4}, "max_num_seqs (use max_running)"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens (use max_batched_tokens)"),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization (use device_memory"),
        ({"swap_space": 4, "cpu_offload_gb": 10}, "swap_space (use host_memory), cpu_offload_gb (use host_memory"),
        ({"enforce_eager": True}, "enforce_eager (use cuda_graphs=False)"),
        ({"max_model_len": 4096}, "max_model_len (requests may be as long as"),
        ({"tokenizer": "other/one"}, "tokenizer (the tokenizer is the one in the model's folder"),
        ({"seed": 0}, "seed (use SamplingParams(seed=...)"),
        ({"trust_remote_code": True}, "trust_remote_code (only transformers' own code runs"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size (one device"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size (one device"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching (it is always on"),
        ({"quantization": "awq"}, "quantization (weights are served as dtype says"),
        ({"device_blocks": {"full": 4}}, "device_blocks (use device_memory)"),
        ({"stroe": "lazy", "block_size": 16}, "stroe, block_size (use block_tokens); it has device, device_memory"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_llm_does_not_take_is_named_with_what_to_use_instead(given: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM("no such model", "cpu", **given)
    assert f"LLM has no option {instead}" in str(refused.value)
    assert "store, verify, on_load_error" in str(refused.value)


def test_what_says_how_it_is_here_is_taken(model: HybridModel) -> None:
    LLM(model, "cpu", SMALL, 0, tensor_parallel_size=1, enable_prefix_caching=True, trust_remote_code=False).close()
    for name in foreign.FOREIGN:
        assert name not in options.CACHE_OPTIONS and name not in inspect.signature(LLM).parameters


def test_a_loaded_model_stays_what_it_was_loaded_as(model: HybridModel) -> None:
    with pytest.raises(ConfigError, match=r"loaded with dtype=torch\.float32; load it with dtype=torch\.bfloat16"):
        LLM(model, "cpu", SMALL, 0, dtype="bf16")
    LLM(model, "cpu", SMALL, 0, dtype="float32").close()


@pytest.fixture
def gpu_of_3_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with less memory than the bundled model's weights take, as far as torch can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3_000_000, 4_000_000))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)


@pytest.mark.usefixtures("gpu_of_3_mb")
def test_weights_that_the_gpu_has_no_room_for_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        MemoryUnavailable, match=r"loading the weights asks for 3,[\d,]+ bytes on cuda:0.*smaller dtype"
    ):
        HybridModel.load(weights_path(), "cuda:0")


@pytest.mark.usefixtures("gpu_of_3_mb")
def test_a_gpu_that_fills_up_while_weights_are_copied_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision they fit, then somebody else is faster."""

    def to(module: Any, device: str) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", to)
    with pytest.raises(MemoryUnavailable, match=r"out of memory.*smaller dtype"):
        HybridModel.load(weights_path(), "cuda:0", torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"device_memory": 1}, MemoryUnavailable, "device_memory is 1 bytes.*raise device_memory"),
        ({"host_memory": 1}, MemoryUnavailable, "host_memory is 1 bytes.*raise host_memory"),
        ({"device_memory": "much"}, ConfigError, "device_memory must be bytes"),
        ({"device_memory": {"full": 4}}, ConfigError, "device_memory must map every group"),
        ({"host_memory": SMALL | {"full": 0}}, MemoryUnavailable, r"host_memory\['full'\]"),
        ({"device_memory": "900TiB"}, MemoryUnavailable, "lower device_memory"),
    ],
)
def test_memory_that_cannot_work_is_refused_by_the_name_that_the_caller_knows(
    model: HybridModel, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named) as refused:
        LLM(model, "cpu", **({"device_memory": SMALL, "host_memory": 0} | options))
    assert "_bytes" not in str(refused.value) and "_blocks" not in str(refused.value)


def test_a_gpu_without_cupy_has_no_host_tier_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.warns(UserWarning, match="no host tier.*CuPy.*host_memory=0"):
        assert memory.automatic_host(torch.device("cuda:0")) == 0


@pytest.mark.parametrize("nothing", [None, 5, "", " ", b"model", ["model"]], ids=repr)
def test_what_is_no_name_of_a_model_is_refused(nothing: Any) -> None:
    for read in (LLM, checkpoint.find_config, checkpoint.find_folder):
        with pytest.raises(ModelLoadError, match="a model is given as a folder or a hub id"):
            read(nothing)


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_an_engine_without_a_model_names_the_argument_and_a_model_that_is_there(engine: type[LLM]) -> None:
    told = rf"^{engine.__name__} needs the argument model: .*the bundled demo model's folder is (kvtier[\w.]*)\(\)$"
    with pytest.raises(ModelLoadError, match=told) as refused:
        engine(device="cpu")
    named = re.search(told, str(refused.value))
    assert named is not None
    assert named[1] == "kvtier.needle.weights_path"
    assert kvtier.needle.weights_path() == weights_path()


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "user", "content": "half \ud83d"}], "half of a surrogate pair"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}], "half of a surrogate pair"),
        ([[{"role": "user", "content": "whole"}], [{"role": "\ud83d", "content": "x"}]], "half of a surrogate pair"),
        ([{"role": "nobody", "content": "x"}], "chat template refuses .*no such role"),
        ([{"content": "x"}], "chat template refuses"),
        ([5], "messages must be a list"),
    ],
)
def test_chats_that_the_template_cannot_take(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, messages: Any, what: str
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ m['role'] + ' ' + m['content'] }}{% endfor %}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(InvalidRequest, match=what):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert not llm.engine.has_requests()
