"""Models with K and V in e4m3: what the cache adds to the rounding itself, and what the rounding does.

Two oracles. The sharp one is transformers' own forward with K and V rounded head by head (families/fp8.py): through
chunks, windows, shared layers and grouped heads the cache must give the same logits, as it does without rounding. The
other is the unrounded forward, within what vLLM asks of an fp8 cache (tests/models/quantization/test_fp8.py there):
each one's likeliest token is among the eight likeliest of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from breadth import sample
from torch import Tensor

from kvtier import CacheSpec, ConfigError
from kvtier.attention import reference
from runner.engine.calibrate import calibrate
from runner.model.hybrid import HybridModel

from . import fp8, zoo
from .conftest import PLAN, Family
from .fake import FakeCache, FakeSteps

TYPICAL, LARGEST, WRONG = 1e-4, 2e-2, 5e-2
"""Of the difference to the sharp oracle, over the logits' deviation: its median, its root mean square, and what that is
at least where a scale is wrong. A value within float32's rounding of a tie may be rounded either way, and then what
follows differs: the largest seen is 5.4e-3."""
MISSING = {
    "cwm",
    "exaone_moe",
    "glm4",
    "gpt_oss",
    "granitemoe_swa",
    "mimo_v2_flash",
    "ministral3",
    "mixtral",
    "qwen2",
    "smollm3",
}
"""Those of which a token in 17, or up to three, falls out of the eight likeliest, with calibrated scales or without."""
OF_LATENTS = {"deepseek_v3", "sarvam_mla"}
"""Likewise. What is rounded of them is judged in `test_latents.py`."""
WITH_STATES = {"falcon_h1"}
"""Likewise, on some CPUs."""
WITHOUT = {"mamba2"}
"""They have no K and V."""
AMONG_EIGHT = 0.8
"""Of their tokens."""
SHARP = [
    "llama",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma4_shared",
    "llama4",
    "cohere2",
    "olmo3",
    "gemma3n",
    "afmoe",
    *sorted(MISSING),
]

DISTINCT = ["llama", "gemma2", "gemma4_shared", "llama4", "gpt_oss", "mimo_v2_flash", "gemma3n", "cohere2"]
DISTINCT = [name for name in DISTINCT if name in zoo.ZOO]
"""That differ in what they do with K and V: windows, chunks, sinks, shared layers, heads of two sizes, experts."""

Rows = tuple[Tensor, list[tuple[int, int]]]


def forward(model: HybridModel, spec: CacheSpec, family: Family) -> Rows:
    """Logits of every sampled token of the plan, and which (sequence, position) each row is."""
    cache = FakeCache(spec)
    steps, logits, places = FakeSteps(cache, family.sequences), [], []
    for counts in PLAN:
        step = steps.step(counts)
        logits.append(model.forward(step, cache))
        places += [(row, end - 1) for row, end in zip(step.rows, step.seq_lens, strict=True)]
    return torch.cat(logits), places


def scales_of(family: Family) -> dict[int, dict[str, list[float]]]:
    """Calibrated, then spread over the heads so that no two are alike and some values saturate."""
    found = calibrate(family.model, [ids.tolist() for ids in family.sequences])
    for i, pair in found.items():
        for which, shift in (("k", 0), ("v", 1)):
            pair[which] = [x * (0.6 + 0.37 * ((i + h + shift) % 4)) for h, x in enumerate(pair[which])]
    for i, place in enumerate(family.model.spec().layers):  # layers that read another's KV take its scales
        found[i] = found[family.model.spec().layers.index(place)]
    return found


def differences(ours: Rows, expected: list[Tensor]) -> tuple[float, float]:
    """(median, root mean square) of the difference, over the standard deviation of what is expected."""
    theirs = torch.stack([expected[row][position] for row, position in ours[1]])
    gap = (ours[0] - theirs).abs() / theirs.std()
    return float(gap.median()), float(gap.square().mean().sqrt())


@pytest.mark.parametrize("name", sample(SHARP, DISTINCT))
def test_the_cache_adds_nothing_to_the_rounding(family: Callable[[str], Family], name: str) -> None:
    subject = family(name)
    scales = scales_of(subject)
    spec = subject.model.spec(dtype="fp8", kv_scales=scales)
    assert 4 * sum(g.block_bytes for g in spec.groups) == sum(g.block_bytes for g in subject.model.spec().groups)
    expected = fp8.expected(subject.folder, subject.sequences, scales)
    typical, largest = differences(forward(subject.model, spec, subject), expected)
    print(f"{name}: {typical:.1e} {largest:.1e}")
    assert typical <= TYPICAL and largest <= LARGEST
    assert differences(forward(subject.model, subject.model.spec(), subject), expected)[0] > 10 * TYPICAL


class Miscaled:
    """The reference backend with the scales of one call, or of one head, gone wrong."""

    def __init__(self, attend: Callable[[str, Tensor], Tensor] | None = None, write: Any = None) -> None:
        self.PagedBatch = reference.PagedBatch
        self._attend, self._write = attend, write

    def write_kv(self, *args: Any, **scales: Tensor) -> None:
        reference.write_kv(*args, **{n: self._write(n, x) if self._write else x for n, x in scales.items()})

    def attend(self, *args: Any, **options: Any) -> Tensor:
        changed = {n: self._attend(n, x) if self._attend and n.endswith("_scale") else x for n, x in options.items()}
        return reference.attend(*args, **changed)


def one_head(which: str) -> Callable[[str, Tensor], Tensor]:
    """Leaves the scale of the last KV head out."""

    def change(name: str, scale: Tensor) -> Tensor:
        return torch.cat([scale[:-1], torch.ones(1)]) if name == which else scale

    return change


MISTAKES = {
    "k scale of one head not folded": Miscaled(one_head("k_scale")),
    "v scale of one head not folded": Miscaled(one_head("v_scale")),
    "k scale of one head not applied": Miscaled(write=one_head("k_scale")),
    "v scale of one head not applied": Miscaled(write=one_head("v_scale")),
    "folded twice": Miscaled(lambda name, scale: scale**2),
    "applied twice": Miscaled(write=lambda name, scale: scale**2),
    "heads exchanged": Miscaled(lambda name, scale: scale.flip(0)),
    "multiplied": Miscaled(write=lambda name, scale: 1 / scale),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_scale_is_seen(family: Callable[[str], Family], mistake: str) -> None:
    subject = family("gemma3")
    scales = scales_of(subject)
    wrong = HybridModel(subject.model.model, backend=MISTAKES[mistake])
    expected = fp8.expected(subject.folder, subject.sequences, scales)
    ours = forward(wrong, wrong.spec(dtype="fp8", kv_scales=scales), subject)
    assert differences(ours, expected)[1] > WRONG


@pytest.mark.parametrize(
    ("name", "calibrated"),
    sample(
        itertools.product(sorted(zoo.ZOO.keys() - zoo.INDEXED - WITHOUT), [False, True]),
        [(name, name in DISTINCT[::2]) for name in DISTINCT],
    ),
)
def test_rounding_keeps_the_likeliest_tokens_among_the_likeliest(
    family: Callable[[str], Family], name: str, calibrated: bool
) -> None:
    subject = family(name)
    scales = calibrate(subject.model, [ids.tolist() for ids in subject.sequences]) if calibrated else None
    logits, places = forward(subject.model, subject.model.spec(dtype="fp8", kv_scales=scales), subject)
    theirs = torch.stack([subject.expected[row][position] for row, position in places])
    for a, b in ((logits, theirs), (theirs, logits)):
        among = (a.argmax(-1)[:, None] == b.topk(8).indices).any(-1)
        assert float(among.float().mean()) >= (AMONG_EIGHT if name in MISSING | OF_LATENTS | WITH_STATES else 1.0)
    assert differences((logits, places), subject.expected)[1] > 1e-3, "nothing was rounded"


def test_calibrated_scales_are_the_largest_magnitude_of_each_head_over_448(family: Callable[[str], Family]) -> None:
    subject = family("gemma4_shared")
    largest: dict[tuple[int, str], Tensor] = {}

    class Watching(Miscaled):
        def write_kv(self, k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, batch: Any) -> None:
            super().write_kv(k_cache, v_cache, key, value, batch)
            for which, x in (("k", key), ("v", value)):
                most = torch.tensor([float(x[:, h].abs().max()) for h in range(x.shape[1])])
                place = len(largest) // 2 if which == "k" else (len(largest) - 1) // 2
                largest[place, which] = most

    watching = HybridModel(subject.model.model, backend=Watching())
    step = FakeSteps(FakeCache(watching.spec()), subject.sequences[:1]).step({0: len(subject.sequences[0])})
    watching.forward(step, FakeCache(watching.spec()))
    found = calibrate(subject.model, [subject.sequences[0].tolist()])
    spec = subject.model.spec()
    owners = [i for i, place in enumerate(spec.places("kv")) if spec.places("kv").index(place) == i]
    assert len(owners) == len(largest) // 2 < len(spec.layers) == len(found)
    for n, layer in enumerate(owners):
        for which in ("k", "v"):
            torch.testing.assert_close(torch.tensor(found[layer][which]) * 448, largest[n, which])
    for layer, place in enumerate(spec.places("kv")):
        assert found[layer] == found[spec.places("kv").index(place)]


def test_calibration_needs_prompts_and_numbers(family: Callable[[str], Family]) -> None:
    subject = family("llama")
    with pytest.raises(ConfigError, match="needs a prompt"):
        calibrate(subject.model, [])
    norm = subject.model.model.model.layers[2].input_layernorm.weight
    kept = norm[0].item()
    try:
        norm[0] = torch.inf
        with pytest.raises(ConfigError, match="layer 2: K or V is not finite"):
            calibrate(subject.model, [[3, 4, 5]])
    finally:
        norm[0] = kept
    assert subject.model.backend is reference, "what watched is gone, also after an error"
