"""Every family through the whole engine, against transformers: chunked prefill, hits from both tiers, preemption.

Logits are compared and not only tokens: with random weights a wrong mask can leave the likeliest token as it is. The
largest differences are printed (``pytest -s``): docs/SERVING.md has them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample
from families import zoo
from families.conftest import Family
from transformers import AutoModelForCausalLM

from kvtier.geometry.kinds import Kind
from runner import LLM, RequestOutput, SamplingParams

from .recorder import Recorder, eager_logits

BLOCK = 8
LENGTHS = (70, 61, 48)
"""Beyond every window (16 to 24) and chunk (32), off a block's border, and on it."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
TOLERANCE = 1e-4
ASKED = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "gpt_oss", "llama4", "cohere2", "olmo3"]


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 140, n).tolist() for n in LENGTHS]


def serve(family: Family, **options: Any) -> LLM:
    """A tight engine: two of the three prompts fit the full-attention pool, but not with what they generate."""
    spec = family.model.spec(BLOCK)
    blocks = {Kind.FULL: lambda g: 18 * BLOCK // g.block_tokens, Kind.STATE: lambda _: 6}
    device = {g.name: blocks.get(g.attention.kind, lambda _: 16)(g) for g in spec.groups}
    llm = LLM(
        family.model,
        "cpu",
        device_memory=device,
        host_memory=dict.fromkeys(spec.names, 120),
        block_tokens=BLOCK,
        max_batched_tokens=24,
        max_running=3,
        **options,
    )
    llm.cache.estimate_compute(lambda start, end: 1e9)  # whatever a remote tier has is worth its time
    llm.engine.model = Recorder(family.model)
    return llm


def eager(family: Family) -> Any:
    model = AutoModelForCausalLM.from_pretrained(family.folder, attn_implementation="eager", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def check(llm: LLM, reference: Any, outputs: list[RequestOutput]) -> float:
    """The largest difference of a logit."""
    worst = 0.0
    for output in outputs:
        expected = eager_logits(reference, output.prompt_token_ids + output.token_ids)
        worst = max(worst, llm.engine.model.worst(output.request_id, expected))
        assert worst <= TOLERANCE
        likeliest = expected[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist()
        assert output.token_ids == likeliest
        assert output.finish_reason == "length"
    return worst


@pytest.mark.parametrize("name", sample(zoo.ZOO, ["gpt_oss", "llama4", "minicpm3", "qwen3_next"]))
def test_logits_equal_eager_through_chunks_preemption_and_hits_from_both_tiers(
    family: Callable[[str], Family], name: str
) -> None:
    model = family(name)
    reference = eager(model)
    with serve(model) as llm:
        first = llm.generate(prompts(), GREEDY, use_tqdm=False)
        worst = {"cold": check(llm, reference, first)}
        has_full = any(g.attention.kind is Kind.FULL for g in llm.spec.groups)
        assert not has_full or sum(output.preemptions for output in first) > 0

        again = llm.generate(prompts()[0], GREEDY, use_tqdm=False)
        worst["device"] = check(llm, reference, again)
        assert sum(again[0].cached_tokens.values()) >= LENGTHS[0] - 2 * BLOCK

        llm.generate(prompts(seed=1), GREEDY, use_tqdm=False)  # pushes the first prompts out of the device pool
        back = llm.generate(prompts(), GREEDY, use_tqdm=False)
        worst["host"] = check(llm, reference, back)
        print(f"{name}:", ", ".join(f"{how} {found:.1e}" for how, found in worst.items()))
        of_states_alone = all(g.attention.kind is Kind.STATE for g in llm.spec.groups)  # nothing of them was pushed out
        assert of_states_alone or sum(output.cached_tokens["host"] for output in back) > 0
        assert [o.token_ids for o in back] == [o.token_ids for o in first]
        llm.settle()
        assert llm.audit() == []


@pytest.mark.parametrize("name", sample(zoo.ZOO, ["gemma3", "deepseek_v3", "falcon_h1"]))
def test_logits_equal_eager_from_a_store_after_a_restart(
    family: Callable[[str], Family], name: str, tmp_path: Path
) -> None:
    model = family(name)
    store = {"remote_uri": f"file://{tmp_path}", "key_secret": b"tests", "model_id": name}
    with serve(model, **store) as llm:
        first = llm.generate(prompts()[0], GREEDY, use_tqdm=False)
    with serve(model, **store) as llm:
        again = llm.generate(prompts()[0], GREEDY, use_tqdm=False)
        print(f"{name}: restart {check(llm, eager(model), again):.1e}")
        assert again[0].cached_tokens == {"device": 0, "host": 0, "remote": LENGTHS[0] // BLOCK * BLOCK}
        assert again[0].token_ids == first[0].token_ids
        assert llm.audit() == []


@pytest.mark.parametrize("name", sample(ASKED, ["gemma3", "llama4"]))
def test_greedy_tokens_equal_generate(family: Callable[[str], Family], name: str) -> None:
    model = family(name)
    reference = eager(model)
    with serve(model) as llm:
        outputs = llm.generate(prompts(seed=2), GREEDY, use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert output.token_ids == expected[0, ids.shape[1] :].tolist()
