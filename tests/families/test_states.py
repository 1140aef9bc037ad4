"""Recurrent layers: what is read from configs, what mixers are given, and states that do not depend on cuts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from breadth import sample

from kvtier import CacheSpec, KVCache, Part, Request, Scheduler, UnsupportedModel
from runner.model import selfcheck
from runner.model.hybrid import HybridModel
from runner.model.states import Mixers
from runner.model.time_steps import limit_decodes

from . import zoo
from .conftest import Family
from .fake import FakeCache, FakeSteps

RECURRENT = [
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "mamba2",
    "nemotron_h",
    "bailing_hybrid",
    "kimi_linear",
]
RECURRENT = [name for name in RECURRENT if name in zoo.ZOO]


def test_parts_and_roles_are_those_of_the_familys_own_code() -> None:
    spec = CacheSpec.from_config(zoo.config("qwen3_next"), block_tokens=16)
    assert spec.names == ("full", "state")
    group = spec.group("state")
    assert (group.num_layers, group.block_tokens) == (3, 64)
    assert group.attention.parts == (Part("conv0", (128, 4), "float32"), Part("recurrent0", (4, 16, 16), "float32"))
    assert spec.layers == (*({"state": ("state", i)} for i in range(3)), {"kv": ("full", 0)})
    half = CacheSpec.from_config(zoo.config("qwen3_next"), dtype="bfloat16").group("state")
    assert [part.dtype for part in half.attention.parts] == ["bfloat16", "float32"]
    float16 = CacheSpec.from_config(zoo.config("qwen3_next"), dtype="float16").group("state")
    assert [part.dtype for part in float16.attention.parts] == ["float16", "float32"]
    narrow = CacheSpec.from_config(zoo.config("qwen3_next"), dtype="fp8")
    assert (narrow.group("full").dtype, narrow.group("state").attention) == ("float8_e4m3fn", group.attention)


def test_layers_with_both_and_with_states_alone() -> None:
    both = CacheSpec.from_config(zoo.config("falcon_h1"))
    assert both.layers == tuple({"kv": ("full", i), "state": ("state", i)} for i in range(4))
    alone = CacheSpec.from_config(zoo.config("mamba2"), block_tokens=128)
    assert (alone.names, alone.group("state").block_tokens) == (("state",), 128)
    latent = CacheSpec.from_config(zoo.config("kimi_linear"))
    assert [group.head_dims for group in latent.groups] == [(32, 8), (0, 0)]


def test_a_config_that_transformers_cannot_be_asked_about() -> None:
    text = {"model_type": "own", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SimpleNamespace(**text, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModel, match="own: what its recurrent layers keep is asked of transformers"):
        CacheSpec.from_config(config)


def test_a_config_whose_own_code_fails_when_it_is_asked() -> None:
    with pytest.raises(UnsupportedModel, match="qwen3_next: its own code does not tell what its recurrent layers keep"):
        CacheSpec.from_config(zoo.config("qwen3_next", hidden_act="none_such"))


def test_every_recurrent_family_of_the_zoo_is_here() -> None:
    of_states = [name for name in zoo.ZOO if any(CacheSpec.from_config(zoo.config(name)).places("state"))]
    assert sorted(of_states) == sorted(RECURRENT)


def test_a_family_that_limits_time_steps_in_prompts_limits_them_in_decodes(family: Callable[[str], Family]) -> None:
    """Nemotron-H's own decodes do not, and its own forward is left as it is."""
    subject = family("nemotron_h")
    mixer, mixers = subject.model.model.model.layers[0].mixer, subject.model.mixers
    hidden = torch.zeros(3, 1, 64)
    bias = mixer.dt_bias.clone()
    with torch.no_grad():
        try:
            mixer.dt_bias.fill_(-20.0)
            steps = [float(mixer.in_proj(hidden)[0, 0, -1])]
            mixers.step = True
            steps += [float(mixer.in_proj(x)[0, 0, -1]) for x in (hidden, hidden.expand(3, 2, 64))]
        finally:
            mixers.step = None
            mixer.dt_bias.copy_(bias)
    own, decode, prompt = (torch.nn.functional.softplus(torch.tensor(step - 20.0)) for step in steps)
    assert own == prompt < 1e-8
    assert abs(decode - 1e-3) < 1e-7


def test_limits_of_time_steps_in_a_mixer_of_another_form_are_refused() -> None:
    mixer = torch.nn.Linear(4, 4)
    mixer.layer_idx, mixer.time_step_limit = 7, (0.0, 0.1)  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match=r"layer 7 \(Linear\): its code limits the time steps of prompts"):
        limit_decodes(mixer, lambda: True)
    mixer.time_step_limit = (0.0, float("inf"))  # type: ignore[assignment]
    limit_decodes(mixer, lambda: True)


def logits_and_states(model: HybridModel, prompt: list[int], most: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a prompt computed in steps of ``most`` tokens: its last logits, and the states at its end."""
    spec = model.spec(16)
    blocks = {group.name: 8 if group.name == "state" else 40 for group in spec.groups}
    with KVCache(spec, device_blocks=blocks) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=most, max_running=1)
        scheduler.add(Request("a", prompt, 1))
        while True:
            step = scheduler.schedule()
            logits = model.forward(step, cache)
            states = step.group("state").states()
            if len(step.sample_rows):
                layers = spec.group("state").num_layers
                last = int(states.target[-1])
                return logits[0], [part[last].clone() for i in range(layers) for part in cache.state("state", i)]
            scheduler.commit(step, [])


PROMPT = [*range(3, 140), *range(3, 120)][:250]
CUTS = 100, 150, 7, 1


@pytest.mark.parametrize("name", sample(RECURRENT, ["qwen3_next", "lfm2", "nemotron_h"]))
def test_a_state_is_nearly_the_same_however_its_prompt_was_cut(family: Callable[[str], Family], name: str) -> None:
    """Within 1e-5 of its largest number in float32, if steps end at multiples of 64: products of other row counts round
    otherwise. A wrong state is far away."""
    model = family(name).model
    cold, others = logits_and_states(model, PROMPT, 320), [logits_and_states(model, PROMPT, n) for n in CUTS[:2]]
    for logits, states in others:
        assert _near(states, cold[1])
        torch.testing.assert_close(logits, cold[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    sample(
        [(n, d) for n in RECURRENT for d in ("float32", "bfloat16")], [("qwen3_next", "bfloat16"), ("lfm2", "float32")]
    ),
)
def test_an_exact_state_has_the_same_bits_however_its_prompt_was_cut(
    family: Callable[[str], Family], name: str, dtype: str
) -> None:
    """Also by steps of 7 tokens, and by steps of one as decodes are; at a boundary, and between two."""
    model = HybridModel.load(family(name).folder, "cpu", dtype, exact=True)
    for prompt in (PROMPT[:192], PROMPT):
        cold = logits_and_states(model, prompt, 320)
        for most in CUTS if len(prompt) > 192 else CUTS[:3]:
            logits, states = logits_and_states(model, prompt, most)
            assert torch.equal(logits, cold[0]), most
            assert all(torch.equal(a, b) for a, b in zip(states, cold[1], strict=True)), most


def _near(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """float32 products of other row counts round otherwise; a wrong state is far away."""
    return all(
        bool(((a - b).abs() <= 1e-5 * b.abs().max().clamp_min(1)).all()) for a, b in zip(some, others, strict=True)
    )


def test_a_state_that_others_may_find_is_not_written(family: Callable[[str], Family]) -> None:
    subject = family("qwen3_next")
    cache = FakeCache(subject.model.spec())
    steps = FakeSteps(cache, subject.sequences, keep=True)
    subject.model.forward(steps.step({0: 64}), cache)
    kept = steps._tables["state"][0][0]
    before = [part[kept].clone() for i in range(3) for part in cache.state("state", i)]
    for _ in range(2):
        subject.model.forward(steps.step({0: 1}), cache)
    after = [part[kept] for i in range(3) for part in cache.state("state", i)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_mixers_are_wrapped_once_and_are_the_familys_own_without_a_step(family: Callable[[str], Family]) -> None:
    subject = family("falcon_h1")
    again = HybridModel(subject.model.model)
    assert again.mixers is subject.model.mixers is Mixers.of(subject.model.model)
    assert again.mixers.layers == {0, 1, 2, 3}
    selfcheck.self_check(again)
    assert again.mixers.step is None
    assert "llama" in zoo.ZOO and Mixers.of(family("llama").model.model).layers == set()


def test_a_layer_that_does_not_ask_for_its_state_is_refused(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = family("lfm2")
    mixer = subject.model.model.model.layers[1].conv
    monkeypatch.setattr(mixer, "forward", mixer.forward.inner)
    cache = FakeCache(subject.model.spec())
    step = FakeSteps(cache, subject.sequences).step({0: 4})
    with pytest.raises(UnsupportedModel, match=r"layers \[1\] never asked for their states"):
        subject.model.forward(step, cache)
