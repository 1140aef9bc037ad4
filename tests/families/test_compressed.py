"""Layers with compressed entries or an index: against the family's own code at other windows, rates and top-k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtier import CacheSpec
from kvtier.integrations.refusals import refuse_to_attend
from kvtier.machine.errors import AttentionUnavailable, NotExact, UnsupportedModel
from runner.model.hybrid import HybridModel

from . import zoo
from .fake import FakeCache, FakeSteps

if "deepseek_v4" not in zoo.ZOO:
    pytest.skip("this transformers has no deepseek_v4", allow_module_level=True)

STEPS = ({0: 29, 1: 9}, {0: 5, 1: 1}, {0: 1, 1: 3}, {0: 1}, {0: 30, 1: 23}, {1: 1}, {0: 6, 1: 5})
"""Tokens of two texts: ends within entries of 4 and of 16, at their borders, and one behind."""
KINDS = {"s": "sliding_attention", "c": "compressed_sparse_attention", "h": "heavily_compressed_attention"}
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}


def logits(folder: Path, keep: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of each text: ours, of the last tokens of its steps, and the family's own of the same tokens."""
    model = HybridModel.load(folder)
    totals = [sum(counts.get(r, 0) for counts in STEPS) for r in range(2)]
    texts = [np.random.default_rng(r).integers(3, 140, n) for r, n in enumerate(totals)]
    cache = FakeCache(model.spec(16))
    steps, ours, ends = FakeSteps(cache, texts, keep=keep), [[], []], [[], []]
    for counts in STEPS:
        found = model.forward(steps.step(counts), cache)
        for row, r in enumerate(counts):
            ours[r].append(found[row])
            ends[r].append(steps.done[r] - 1)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        own = [eager(torch.tensor(text)[None], use_cache=False).logits[0] for text in texts]
    return [torch.stack(rows) for rows in ours], [rows[at] for rows, at in zip(own, ends, strict=True)]


@pytest.mark.parametrize("layers", ["schc", "cchh", "hccs", "hhhh"])
@pytest.mark.parametrize("window", [4, 16])
def test_logits_are_the_familys_own(tmp_path: Path, layers: str, window: int) -> None:
    """Whatever a mask can no longer reach is NaN: a row, an entry or a key too many would show."""
    kinds = [KINDS[letter] for letter in layers]
    folder = zoo.build("deepseek_v4", tmp_path, layer_types=kinds, sliding_window=window, compress_rates=RATES)
    for ours, own in zip(*logits(folder), strict=True):
        torch.testing.assert_close(ours, own, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_an_index_that_picks_some_picks_what_the_familys_own_does(tmp_path: Path, family: str) -> None:
    """5 of up to 73 tokens, or 18 entries, by scores of so many heads that none are equal."""
    own = []
    for most in (5, 128):
        each = zoo.build(family, tmp_path / str(most), index_topk=most, index_n_heads=32)
        found = logits(each)
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
        own.append(found[1][0])
    assert float((own[0] - own[1]).abs().max()) > 1e-2, "the index was to leave something out"


def test_a_neighbour_in_the_step_changes_nothing(tmp_path: Path) -> None:
    folder = zoo.build("deepseek_v4", tmp_path, compress_rates=RATES)
    model = HybridModel.load(folder)
    texts = [np.random.default_rng(r).integers(3, 140, 40) for r in range(2)]
    alone, beside = [], []
    for found, rows in ((alone, [0]), (beside, [1, 0])):
        cache = FakeCache(model.spec(16))
        steps = FakeSteps(cache, texts)
        for n in (23, 1, 9):
            found.append(model.forward(steps.step(dict.fromkeys(rows, n)), cache)[-1])
    torch.testing.assert_close(torch.stack(alone), torch.stack(beside), atol=1e-5, rtol=0)


def test_what_cannot_be_had_is_refused_before_the_weights_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    folder = zoo.build("deepseek_v4", tmp_path)
    monkeypatch.setattr("runner.model.checkpoint.read_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(NotExact, match="exact=True cannot be kept for deepseek_v4: its entries and its index"):
        HybridModel.load(folder, exact=True)
    with pytest.raises(AttentionUnavailable, match="attention='flashinfer' cannot be had"):
        HybridModel.load(folder, attention="flashinfer")


@pytest.mark.parametrize("name", sorted(zoo.INDEXED))
def test_keys_in_8_bits_are_refused_by_name(name: str) -> None:
    """They would be read without their scales."""
    with pytest.raises(UnsupportedModel, match=f"{name}: in 8 bits"):
        config = zoo.config(name)
        refuse_to_attend(config, CacheSpec.from_config(config, dtype="fp8"))


@pytest.mark.parametrize("lost", ["update_overlap_state", "store_compression_weights"])
def test_a_family_that_asks_its_cache_for_more_is_refused(tmp_path: Path, monkeypatch: Any, lost: str) -> None:
    folder = zoo.build("deepseek_v4", tmp_path)
    monkeypatch.delattr(f"runner.model.compressed.OneRequest.{lost}")
    with pytest.raises(UnsupportedModel, match=f"has no attribute '{lost}'"):
        HybridModel.load(folder)
