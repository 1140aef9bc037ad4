"""Feed-forward layers whose gate and other half are one product, against transformers' own forwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from kvtier.attention import workers
from runner.model.fused import gates, linears, norms, packed, rope, table
from runner.model.fused.distance import relative

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _packed_products_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "fastest", lambda: packed.by_loops)
    monkeypatch.setattr(linears, "_SMALL", 0)


def assert_near(ours: torch.Tensor, own: torch.Tensor) -> None:
    """Sums have other orders; an element may have lost more than the others."""
    assert ours.shape == own.shape
    assert not own.numel() or relative(ours, own) < 1e-5


def llama(act: str = "silu", size: int = 40, bias: bool = False) -> nn.Module:
    return of(LlamaMLP(LlamaConfig(**SMALL, intermediate_size=size, hidden_act=act, mlp_bias=bias)))


def gemma() -> nn.Module:
    return of(Gemma3MLP(Gemma3TextConfig(hidden_size=48, intermediate_size=72)))


def of(module: nn.Module) -> nn.Module:
    for weight in module.parameters():
        weight.data = 0.3 * torch.randn_like(weight)
    return module.requires_grad_(False)


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("threads", [1, 3])
def test_it_gives_what_the_family_s_code_gives(make: Any, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1)
    module = make()
    steps = [torch.randn(shape) for shape in ((1, 1, 48), (1, 37, 48), (2, 3, 48), (48,), (1, 0, 48))]
    expected = [module(x) for x in steps]
    found = table.fuse(nn.Sequential(module), CPU)
    assert (found["gates"], found["linears"]) == (1, 1)
    for x, own in zip(steps, expected, strict=True):
        assert_near(module(x), own)


@pytest.mark.parametrize(("inner", "size"), [(48, 40), (48, 37), (4096, 64), (48, 4096)])
def test_a_row_has_the_same_bits_alone_and_among_others(inner: int, size: int) -> None:
    module = of(LlamaMLP(LlamaConfig(**SMALL | {"hidden_size": inner}, intermediate_size=size)))
    assert table.fuse(nn.Sequential(module), CPU)["gates"] == 1
    x = torch.randn(1, 70, inner)
    whole = module(x)
    for first, rows in ((0, 1), (69, 1), (7, 2), (20, 33)):
        assert torch.equal(module(x[:, first : first + rows]), whole[:, first : first + rows]), (first, rows)


def test_numbers_far_from_zero_and_none_stay_what_they_are() -> None:
    module = llama()
    x = torch.randn(1, 6, 48) * torch.tensor([0.0, 1e-30, 1e3, 1e15, float("inf"), float("nan")])[None, :, None]
    module.up_proj.weight.data *= 1e-18
    expected = module(x), module(x * 1e5)[:, 3]
    assert table.fuse(nn.Sequential(module), CPU)["gates"] == 1
    found = module(x)
    for row in range(4):
        assert_near(found[:, row], expected[0][:, row])
    assert not found[:, 4:].isfinite().any()
    assert_near(module(x * 1e5)[:, 3], expected[1])
    assert expected[1].isfinite().all(), "gates of 1e20, whose squares are no number"


@pytest.mark.parametrize("act", ["gelu", "relu", "relu2", "gelu_new"])
def test_another_activation_is_the_family_s(act: str) -> None:
    module, x = llama(act), torch.randn(1, 5, 48)
    own = module(x)
    found = table.fuse(nn.Sequential(module), CPU)
    assert found["gates"] == (act == "gelu_new"), "this one is GELU by tanh, written out"
    assert_near(module(x), own)


class Sparse(LlamaMLP):
    """As Gemma 3n's: the same modules and weights in each layer, and a number that says what it does."""

    def __init__(self, sparsity: float) -> None:
        super().__init__(LlamaConfig(**SMALL, intermediate_size=40))
        self.sparsity = sparsity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x))
        if self.sparsity:
            gate = gate * (gate > self.sparsity)
        return self.down_proj(gate * self.up_proj(x))


def test_a_layer_that_its_own_number_makes_another_is_tried_alone() -> None:
    layers, x = [of(Sparse(0.0)), of(Sparse(0.5))], torch.randn(1, 5, 48)
    own = [layer(x) for layer in layers]
    assert table.fuse(nn.Sequential(*layers), CPU)["gates"] == 1
    for layer, expected in zip(layers, own, strict=True):
        assert_near(layer(x), expected)


class Clamped(LlamaMLP):
    """As DeepSeek V4's, whose limit is a number far from most gates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x).clamp(-10, 10))


class Scaled(LlamaMLP):
    """It has a tensor of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize("kind", [Clamped, Scaled])
def test_a_layer_that_does_more_keeps_its_forward(kind: Any) -> None:
    module, x = of(kind(LlamaConfig(**SMALL, intermediate_size=40))), 9 * torch.randn(1, 5, 48)
    own = module(x)
    assert table.fuse(nn.Sequential(module), CPU)["gates"] == 0
    assert_near(module(x), own)


def test_a_fused_model_can_be_copied() -> None:
    model, x = nn.Sequential(llama()), torch.randn(1, 5, 48)
    table.fuse(model, CPU)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_shares_that_go_on_after_an_interrupt_hold_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker wrote to memory that was given back."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1)
    module, held = llama(), list[Any]()
    table.fuse(nn.Sequential(module), CPU)
    monkeypatch.setattr(workers, "in_shares", lambda compute, bounds: held.append(compute))
    norm = norms.plain(LlamaRMSNorm(48))
    module(torch.randn(1, 5, 48))
    norm(torch.randn(1, 5, 48))
    rope.turning(apply_rotary_pos_emb, by_loop=True)(*[torch.randn(1, 2, 5, 8)] * 2, *[torch.randn(1, 5, 8)] * 2)
    counts = [sum(isinstance(cell.cell_contents, torch.Tensor) for cell in compute.__closure__) for compute in held]
    assert counts == [3, 2, 3, 3, 4, 4], "of a product without a bias, gates, a product, a norm, queries and keys"


class Reads(LlamaMLP):
    """Its code reads a weight itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * nn.functional.linear(x, self.up_proj.weight))


def test_a_packed_weight_takes_the_place_of_both_and_each_layer_still_has_its_own() -> None:
    for kind, stays in ((LlamaMLP, False), (Reads, True)):
        module, x = of(kind(LlamaConfig(**SMALL, intermediate_size=40))), torch.randn(1, 5, 48)
        gate, up = module.gate_proj(x), module.up_proj(x)
        assert table.fuse(nn.Sequential(module), CPU)["gates"] == 1
        assert_near(module.gate_proj(x), gate)
        assert_near(module.up_proj(x), up)
        assert module.gate_proj.weight.isnan().all() and module.gate_proj.weight.untyped_storage().nbytes() == 4
        assert module.up_proj.weight.isfinite().all() == stays


def test_what_is_no_such_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not gates.is_one(llama(bias=True))
    assert not gates.is_one(llama().to(torch.bfloat16)) and not gates.is_one(llama().to(torch.bfloat16), exact=True)
    module = llama()
    module.up_proj = nn.Linear(48, 41, bias=False)
    assert not gates.is_one(module)
    monkeypatch.setattr(packed, "fastest", lambda: None)
    assert not gates.is_one(llama()) and gates.is_one(llama(), exact=True)
