"""Latent attention (MLA): what goes to the pools, how it is expanded, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier import CacheSpec, FullAttention, GroupSpec, SlidingWindow, UnsupportedModel
from kvtier.attention import reference
from kvtier.geometry.layout import Layout
from kvtier.pools.arena import Arena
from runner.model.attention import NAME
from runner.model.hybrid import HybridModel
from runner.model.latents import take_latents

from . import zoo
from .conftest import Family
from .fake import FakeCache, FakeSteps

LATENT = [
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "axk1",
    "sarvam_mla",
    "minicpm3",
    "youtu",
    "bailing_hybrid",
    "kimi_linear",
    "longcat_flash",
]
RANK, TURNED, HEADS = 32, 8, 4


def test_every_family_of_today_is_here() -> None:
    specs = {name: CacheSpec.from_config(zoo.config(name)) for name in zoo.ZOO}
    assert [
        name for name, spec in specs.items() if spec.groups[0].head_dims == (32, 8) and not any(spec.places("index"))
    ] == [name for name in LATENT if name in zoo.ZOO]


def test_a_token_takes_its_latent_and_its_rotated_key_and_no_more(family: Callable[[str], Family]) -> None:
    (group,) = family("deepseek_v3").model.spec().groups
    assert (group.num_kv_heads, group.head_dims) == (1, (RANK, TURNED))
    assert group.token_bytes == group.num_layers * (RANK + TURNED) * 4


def test_the_pools_have_what_the_familys_own_cache_would_have(family: Callable[[str], Family]) -> None:
    subject = family("deepseek_v3")
    cache = FakeCache(subject.model.spec(4))
    step = FakeSteps(cache, subject.sequences).step({0: 13})
    subject.model.forward(step, cache)
    mla = subject.model.model.model.layers[0].self_attn
    hidden: list[Tensor] = []
    hook = mla.register_forward_pre_hook(
        lambda _, args, kwargs: hidden.append(kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        subject.model.forward(step, cache)
    finally:
        hook.remove()
    expected = mla.kv_a_layernorm(mla.kv_a_proj_with_mqa(hidden[0])[..., :RANK])[0]
    slots = torch.from_numpy(np.array(step.group("full").slot_mapping))
    found = cache.kv("full", 0)[0].flatten(0, 1)[slots, 0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_our_forward_expands_nothing_and_the_familys_own_is_as_it_was(family: Callable[[str], Family]) -> None:
    subject = family("youtu").model
    mla = subject.model.model.layers[1].self_attn
    given = torch.randn(1, 1, 3, RANK), torch.randn(1, 1, 3, TURNED)
    assert all(a is b for a, b in zip(mla.expand_kv(*given), given, strict=True))
    subject.model.set_attn_implementation("eager")
    try:
        keys, values = mla.expand_kv(*given)
    finally:
        subject.model.set_attn_implementation("kvtier")
    assert keys.shape == (1, HEADS, 3, 24)
    assert values.shape == (1, HEADS, 3, 16)
    absorbed, query = subject.latents[1], torch.randn(3, HEADS, 24)
    rows = torch.cat(given, -1)[0, 0]
    scores = torch.einsum("thd,hsd->ths", query, keys[0])
    torch.testing.assert_close(absorbed.query(query) @ rows.T, scores, atol=1e-4, rtol=1e-4)
    mixed = torch.randn(3, HEADS, RANK)
    expanded = torch.einsum("thr,hrv->thv", mixed, absorbed.values)
    torch.testing.assert_close(absorbed.output(mixed), expanded, atol=1e-5, rtol=1e-5)


def test_a_model_that_is_taken_twice_is_taken_once(family: Callable[[str], Family]) -> None:
    subject = family("deepseek_v2").model
    again = take_latents(subject.model, NAME)
    assert again.keys() == subject.latents.keys() == {0, 1, 2, 3}
    assert all(torch.equal(again[i].keys, subject.latents[i].keys) for i in again)
    assert take_latents(family("llama").model.model, NAME) == {}


# --- an expand_kv that is not what we take it for -------------------------------------------------------------------


class Layer(torch.nn.Module):
    """An MLA layer of 2 heads with latents of 6 and rotated keys of 2; ``own`` of K and V, as a family might."""

    kv_lora_rank, qk_rope_head_dim, layer_idx = 6, 2, 5

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 6, 7))
        self.change = change

    def expand_kv(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.einsum("bosr,hrd->bhsd", latent, self.weight)
        keys, values = both.split([4, 3], -1)
        turned = rotated.expand(-1, 2, -1, -1)
        if self.change == "bias":
            keys = keys + 1
        if self.change == "values":
            values = values + rotated[..., :1]
        if self.change == "swapped":
            turned = turned.flip(-1)
        if self.change == "added":
            return torch.cat([keys[..., :2], keys[..., 2:] + turned], -1), values
        if self.change == "lost":
            turned = torch.zeros_like(turned)
        if self.change == "between":
            return torch.cat([keys[..., :1], turned, keys[..., 1:]], -1), values
        return torch.cat([turned, keys] if self.change == "first" else [keys, turned], -1), values


@pytest.mark.parametrize("change", ["", "first"])
def test_rotated_keys_may_come_first_or_last(change: str) -> None:
    layer = Layer(change)
    with torch.no_grad():
        latent, rotated, query = torch.randn(5, 6), torch.randn(5, 2), torch.randn(3, 2, 6)
        keys, values = Layer.expand_kv(layer, latent[None, None], rotated[None, None])
        absorbed = take_latents(layer, NAME)[5]
        scores = absorbed.query(query) @ torch.cat([latent, rotated], -1).T
        torch.testing.assert_close(scores, torch.einsum("thd,hsd->ths", query, keys[0]))
        weights = torch.rand(3, 2, 5)
        torch.testing.assert_close(absorbed.output(weights @ latent), torch.einsum("ths,hsv->thv", weights, values[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("bias", "adds something to what it expands"),
        ("values", "its values depend on the rotated keys"),
        ("swapped", "not the expanded latent beside the rotated key"),
        ("added", "not the expanded latent beside the rotated key"),
        ("lost", "not the expanded latent beside the rotated key"),
        ("between", "not the expanded latent beside the rotated key"),
    ],
)
def test_an_expansion_of_another_form_is_refused_by_name(change: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"layer 5 \(Layer\): .*{message}; kvtier cannot keep latents"):
        take_latents(Layer(change), NAME)


def test_half_precision_weights_and_pools(family: Callable[[str], Family]) -> None:
    subject = family("deepseek_v3")
    model = HybridModel.load(subject.folder, dtype="bfloat16")
    cache = FakeCache(model.spec())
    steps = FakeSteps(cache, subject.sequences)
    for counts in ({0: 20}, {0: 10}, {0: 1}):
        logits = model.forward(steps.step(counts), cache)[0]
    assert torch.corrcoef(torch.stack([logits, subject.expected[0][30]]))[0, 1] > 0.99


# --- the reference backend over latents -----------------------------------------------------------------------------


class OneStep:
    """A prompt of 11 tokens beside a decode at token 9; blocks of 4 tokens."""

    query_start = np.array([0, 11, 12], np.int32)
    seq_lens = np.array([11, 10], np.int32)
    block_table = np.array([[3, 1, 6], [5, 2, 4]], np.int32)

    def group(self, _: str) -> Any:
        return self

    @property
    def slot_mapping(self) -> np.ndarray:
        rows = [np.arange(11), np.arange(9, 10)]
        return np.concatenate([t[r // 4] * 4 + r % 4 for t, r in zip(self.block_table, rows, strict=True)])


GROUP = GroupSpec("full", FullAttention(), 2, 1, RANK, "float32", 4, TURNED)


def attended(group: GroupSpec, pools: tuple[Tensor, Tensor], **scales: Tensor) -> tuple[Tensor, Tensor]:
    """Ours, and a plain softmax over the same latents."""
    step, torn = OneStep(), torch.Generator().manual_seed(0)
    batch = reference.PagedBatch.from_step(step, group, "cpu")
    k, v = pools
    texts = [torch.randn(n, RANK + TURNED, generator=torn) for n in (11, 10)]
    old = replace(
        batch,
        query_start=[0, 0, 9],
        seq_lens=[0, 9],
        slot_mapping=torch.tensor([int(step.block_table[1][i // 4]) * 4 + i % 4 for i in range(9)]),
    )
    for rows, part in ((texts[1][:9], old), (torch.cat([texts[0], texts[1][9:]]), batch)):
        key, value = rows[:, None, :RANK], rows[:, None, RANK:]
        reference.write_kv(k, v, key, value, part, **scales)
    query = torch.randn(12, HEADS, RANK + TURNED, generator=torn)
    ours = reference.attend_latent(query, k, v, batch, scale=0.3, **scales)
    expected = []
    first = group.attention.first_visible
    for q, text, last in [*((query[i], texts[0], i) for i in range(11)), (query[11], texts[1], 9)]:
        seen = text[first(last) : last + 1]
        expected.append((q @ seen.T * 0.3).softmax(-1) @ seen[:, :RANK])
    return ours, torch.stack(expected)


def pools_of(group: GroupSpec, apart: bool) -> tuple[Tensor, Tensor]:
    if apart:
        return tuple(FakeCache(CacheSpec([group]), blocks=7).kv("full", 1))  # type: ignore[return-value]
    arena = Arena(CacheSpec([group]), Layout.fixed([group.block_bytes], [6]), "cpu")
    arena.allocate("a test")
    arena.storage.fill_(0xFF)  # NaN in all dtypes
    return arena.views(0)[1]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("attention", [FullAttention(), SlidingWindow(5)])
def test_attention_to_latents_is_a_softmax_over_them(attention: Any, apart: bool) -> None:
    group = replace(GROUP, attention=attention)
    ours, expected = attended(group, pools_of(group, apart))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_latents_as_large_as_rotated_keys() -> None:
    """Then a pool keeps them apart."""
    group = replace(GROUP, head_dim=TURNED, head_dim_v=None)
    k, v = pools_of(group, apart=False)
    assert reference._rows(k, v).shape == (*k.shape[:3], 2 * TURNED)


@pytest.mark.parametrize("apart", [False, True])
def test_latents_in_8_bits_have_their_own_scales(apart: bool) -> None:
    group = replace(GROUP, dtype="float8_e4m3fn")
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.02])}
    ours, expected = attended(group, pools_of(group, apart), **scales)
    assert float((ours - expected).std() / expected.std()) < 0.05


def test_rows_of_a_pool_are_not_copied() -> None:
    k, v = pools_of(GROUP, apart=False)
    rows = reference._rows(k, v)
    assert rows.data_ptr() == k.data_ptr()
    assert rows[3, 1, 0, RANK:].data_ptr() == v[3, 1, 0].data_ptr()
