"""DeepSeek-V4 with its own rates and window, 4, 128 and 128, through every tier: hits are multiples of 128 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import zoo
from families.conftest import Family

from kvtier.geometry.kinds import Kind
from runner import LLM, SamplingParams
from runner.model.hybrid import HybridModel

from .recorder import Recorder
from .test_families import check, eager

if "deepseek_v4" not in zoo.ZOO:
    pytest.skip("this transformers has no deepseek_v4", allow_module_level=True)

RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
LENGTHS = (251, 256, 140)
GREEDY = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The tiny family with these sizes; its index picks 24 of up to 67 entries."""
    folder = tmp_path_factory.mktemp("v4")
    zoo.build("deepseek_v4", folder, compress_rates=RATES, sliding_window=128, index_topk=24, index_n_heads=32)
    return Family("deepseek_v4", folder, HybridModel.load(folder))


def serve(family: Family, **options: Any) -> LLM:
    """Room for five blocks of 128 tokens, where each text needs three in the end."""
    spec = family.model.spec(16)
    device = {g.name: 5 if g.attention.kind is Kind.FULL else 1024 // g.block_tokens for g in spec.groups}
    host = {g.name: 4096 // g.block_tokens for g in spec.groups}
    limits = {"max_batched_tokens": 96, "max_running": 3}
    llm = LLM(family.model, "cpu", device_memory=device, host_memory=host, block_tokens=16, **limits, **options)
    llm.cache.estimate_compute(lambda start, end: 1e9)  # whatever a remote tier has is worth its time
    llm.engine.model = Recorder(family.model)
    return llm


def test_logits_through_chunks_preemption_device_host_and_a_restart(flash: Family, tmp_path: Path) -> None:
    prompts = [np.random.default_rng(n).integers(3, 140, n).tolist() for n in LENGTHS]
    remote = {"remote_uri": f"file://{tmp_path}", "key_secret": b"tests", "model_id": "v4"}
    reference = eager(flash)
    with serve(flash, **remote) as llm:
        assert llm.spec.hit_tokens == 128
        cold = llm.generate(prompts, GREEDY, use_tqdm=False)
        check(llm, reference, cold)
        assert sum(output.preemptions for output in cold) > 0
        again = llm.generate(prompts[1], GREEDY, use_tqdm=False)
        check(llm, reference, again)
        assert sum(again[0].cached_tokens.values()) == 128
        other = np.random.default_rng(9).integers(3, 140, 300).tolist()
        llm.generate([other, other[::-1]], GREEDY, use_tqdm=False)  # pushes the first prompts out of the device pool
        back = llm.generate(prompts, GREEDY, use_tqdm=False)
        check(llm, reference, back)
        assert [output.cached_tokens["host"] for output in back] == [128, 128, 128]
        assert [output.token_ids for output in back] == [output.token_ids for output in cold]
        llm.settle()
        assert llm.audit() == []
    with serve(flash, **remote) as llm:
        fetched = llm.generate(prompts, GREEDY, use_tqdm=False)
        check(llm, reference, fetched)
        assert [output.cached_tokens["remote"] for output in fetched] == [128, 128, 128]
