"""Every family through pools and block tables gives the logits of its own eager forward, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtier.attention import reference
from kvtier.geometry.kinds import FullAttention
from kvtier.geometry.spec import GroupSpec
from runner.model.hybrid import HybridModel

from . import zoo
from .conftest import PLAN, Family
from .fake import FakeCache, FakeSteps

TOLERANCE = 1e-4
ROUGH = {"lara_mini": 1e-3}
"""transformers' own float32 is up to 4.5e-4 from its float64 there, and up to 8e-5 in qwen3_next."""
WRONG = 1e-3


def max_diff(family: Family, model: HybridModel | None = None, *, keep: bool = False) -> float:
    """Largest logit difference over all sampled positions of the plan; nan if any logit is."""
    model = model or family.model
    cache = FakeCache(model.spec())
    steps = FakeSteps(cache, family.sequences, keep=keep)
    worst = torch.zeros(())
    for counts in PLAN:
        step = steps.step(counts)
        ours = model.forward(step, cache)
        theirs = [family.expected[row][end - 1] for row, end in zip(step.rows, step.seq_lens, strict=True)]
        worst = torch.maximum(worst, (ours - torch.stack(theirs)).abs().max())
    return float(worst)


@pytest.mark.parametrize("name", [*zoo.ZOO, *zoo.MORE])
def test_chunked_ragged_steps_match_eager(family: Callable[[str], Family], name: str) -> None:
    subject = family(name)
    assert all(logits.std() > 0.1 for logits in subject.expected), "degenerate logits would hide errors"
    diff = max_diff(subject)
    print(f"{name}: {diff:.1e}")
    assert diff <= ROUGH.get(name, TOLERANCE)


# --- negative controls: what the comparison above can see -----------------------------------------------------------


class Changed:
    """The reference backend with one feature of attention taken away."""

    def __init__(self, *, spanless: bool = False, **forced: Any) -> None:
        self.PagedBatch = self
        self.write_kv = reference.write_kv
        self._spanless = spanless
        self._forced = forced

    def from_step(self, step: Any, group: GroupSpec, device: Any) -> reference.PagedBatch:
        group = replace(group, attention=FullAttention()) if self._spanless else group
        return reference.PagedBatch.from_step(step, group, device)

    def attend(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "scale" in self._forced:
            kwargs["scale"] = query.shape[-1] ** -0.5
        return reference.attend(query, *args, **{**kwargs, **{k: v for k, v in self._forced.items() if v is None}})


CONTROLS = {
    "span": Changed(spanless=True),
    "sinks": Changed(sinks=None),
    "softcap": Changed(softcap=None),
    "scale": Changed(scale="1 / sqrt(head_dim)"),
}
AFFECTED = {
    "span": {"mistral", "gemma2", "gemma3", "gemma4", "gpt_oss", "llama4", "cohere2", "olmo3", "mimo_v2_flash"},
    "sinks": {"gpt_oss", "mimo_v2_flash"},
    "softcap": {"gemma2"},
    "scale": {"gemma2", "gemma3", "gemma4"},
}
WATCHED = sorted({"llama", "qwen3"}.union(*AFFECTED.values()))


@pytest.mark.parametrize("control", CONTROLS)
def test_dropping_a_feature_fails_exactly_the_families_that_have_it(
    family: Callable[[str], Family], control: str
) -> None:
    diffs = {}
    for name in WATCHED:
        subject = family(name)
        changed = HybridModel(subject.model.model, backend=CONTROLS[control])
        changed.temperatures = subject.model.temperatures
        diffs[name] = max_diff(subject, changed, keep=True)
    assert {name for name, diff in diffs.items() if diff > WRONG} == AFFECTED[control], diffs
    assert {name for name, diff in diffs.items() if not diff <= TOLERANCE} == AFFECTED[control], diffs


def test_llama4_needs_its_query_scales_from_real_positions(family: Callable[[str], Family]) -> None:
    subject = family("llama4")
    assert list(subject.model.temperatures) == [1, 3]
    assert max_diff(subject, HybridModel(subject.model.model), keep=True) > WRONG


# --- what the engine may ask of a step ------------------------------------------------------------------------------


def test_only_sampled_entries_get_logits(family: Callable[[str], Family]) -> None:
    subject = family("gemma3")
    cache = FakeCache(subject.model.spec())
    steps = FakeSteps(cache, subject.sequences)
    assert subject.model.forward(steps.step({0: 20, 1: 5}, sample=[]), cache).shape == (0, zoo.VOCAB)
    step = steps.step({0: 3, 1: 1, 2: 2}, sample=[0, 2])
    logits = subject.model.forward(step, cache)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits, torch.stack([subject.expected[0][22], subject.expected[2][1]]), atol=1e-4, rtol=0
    )


def test_a_step_without_tokens_runs_nothing(family: Callable[[str], Family]) -> None:
    model = family("llama").model
    cache = FakeCache(model.spec())
    step = FakeSteps(cache, family("llama").sequences).step({0: 1})
    empty = replace(step, token_ids=step.token_ids[:0], sample_rows=step.sample_rows[:0])
    assert model.forward(empty, cache).shape == (0, zoo.VOCAB)


@pytest.mark.parametrize("block_tokens", [1, 4, 32])
def test_block_size_does_not_matter(family: Callable[[str], Family], block_tokens: int) -> None:
    subject = family("llama4")
    cache = FakeCache(subject.model.spec(block_tokens), blocks=200)
    steps = FakeSteps(cache, subject.sequences)
    for counts in PLAN[:3]:
        step = steps.step(counts)
        logits = subject.model.forward(step, cache)
        theirs = torch.stack([subject.expected[r][n - 1] for r, n in zip(step.rows, step.seq_lens, strict=True)])
        torch.testing.assert_close(logits, theirs, atol=TOLERANCE, rtol=0)


def test_half_precision_weights_and_pools(family: Callable[[str], Family]) -> None:
    subject = family("gemma3")
    model = HybridModel.load(subject.folder, dtype="bfloat16")
    spec = model.spec()
    assert {g.dtype for g in spec.groups} == {"bfloat16"}
    cache = FakeCache(spec)
    logits = model.forward(FakeSteps(cache, subject.sequences).step({0: 30}), cache)[0]
    assert logits.dtype == torch.float32
    assert torch.corrcoef(torch.stack([logits, subject.expected[0][29]]))[0, 1] > 0.99
