"""Layers of experts and norms that run as fewer kernels, against transformers' own forwards."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kvtier.attention import workers
from runner.model.fused import experts, norms, packed, rope, table, triton_experts, triton_rope
from runner.model.fused.triton_experts import Act

CPU = torch.device("cpu")
NOTHING = {"experts": 0, "rope": 0, "norms": 0, "gates": 0, "linears": 0}
SMALL: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def gpt_oss(experts: int = 5) -> GptOssExperts:
    config = GptOssConfig(**SMALL, **HEADS, intermediate_size=40, num_local_experts=experts, num_experts_per_tok=2)
    return with_random_weights(GptOssExperts(config))


def mixtral(experts: int = 5, act: str = "silu") -> MixtralExperts:
    config = MixtralConfig(**SMALL, **HEADS, intermediate_size=40, num_local_experts=experts, hidden_act=act)
    return with_random_weights(MixtralExperts(config))


def qwen3(experts: int = 5) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(**SMALL, **HEADS, moe_intermediate_size=40, num_experts=experts)
    return with_random_weights(Qwen3MoeExperts(config))


def with_random_weights(module: Any) -> Any:
    module.config._experts_implementation = "eager"  # a loop over experts: nothing of ours is in it
    generator = torch.Generator().manual_seed(7)
    for weight in module.parameters():
        weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    return module.requires_grad_(False)


def step(tokens: int, of: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    scores, ids = torch.randn(tokens, of, generator=generator).topk(top_k)
    return torch.randn(tokens, 48, generator=generator), ids, scores.softmax(1)


@pytest.mark.parametrize("make", [gpt_oss, mixtral, qwen3])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts_give_what_their_own_loop_gives(make: Any, tokens: int) -> None:
    module = make()
    forward = experts.fused(module)
    assert forward is not None
    torch.testing.assert_close(forward(*step(tokens, 5)), module(*step(tokens, 5)), rtol=1e-4, atol=1e-4)


def test_experts_of_a_prompt_are_cut_into_larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    without = triton_experts.HOPPER._replace(few=())  # whoever takes these fails
    monkeypatch.setattr(triton_experts, "HOPPER", without)
    module = gpt_oss(2)
    forward = experts.fused(module)
    assert forward is not None
    x = step(129, 2)  # two tiles for each expert
    torch.testing.assert_close(forward(*x), module(*x), rtol=1e-4, atol=1e-4)


def test_the_trial_tries_both_cuts_however_many_experts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    inner = triton_experts._cut
    monkeypatch.setattr(triton_experts, "_cut", lambda tiles, *rest: tried.append(tiles.rows) or inner(tiles, *rest))
    module = mixtral(40)
    assert experts.differs(module, experts.fused(module)) == ""
    assert set(tried) == {cut.rows for cuts in triton_experts.HOPPER for cut in cuts}


def test_experts_that_no_token_goes_to_are_passed_over() -> None:
    module, (x, ids, shares) = gpt_oss(), step(9, 5)
    forward = experts.fused(module)
    assert forward is not None
    for expert in range(5):
        everybody = torch.full_like(ids, expert)
        everybody[:, 1] = (expert + 2) % 5
        torch.testing.assert_close(forward(x, everybody, shares), module(x, everybody, shares), rtol=1e-4, atol=1e-4)
    assert forward(x[:0], ids[:0], shares[:0]).shape == (0, 48)


@pytest.mark.parametrize("pairs", [1, 255, 256, 3000])
def test_pairs_are_sorted_by_expert_and_keep_their_order(pairs: int) -> None:
    ids = torch.randint(0, 6, (pairs,), generator=torch.Generator().manual_seed(pairs))
    order, starts = torch.empty(pairs, dtype=torch.int32), torch.empty(7, dtype=torch.int32)
    triton_experts._route[(6,)](ids, order, starts, pairs, PAIRS=256)
    assert torch.equal(order.long(), torch.sort(ids, stable=True).indices)
    assert torch.equal(starts.long(), torch.searchsorted(torch.sort(ids).values, torch.arange(7)))


@pytest.mark.parametrize(("make", "act", "interleaved"), [(gpt_oss, Act.CLAMPED, True), (mixtral, Act.SILU, False)])
def test_the_activation_is_found_by_trying_the_gate(make: Any, act: Act, interleaved: bool) -> None:
    found = experts._activation(make())
    assert found is not None
    assert found[:2] == (act, interleaved)


def test_gelu_is_found_and_an_unknown_activation_is_left_alone() -> None:
    module = mixtral(act="gelu_pytorch_tanh")
    forward = experts.fused(module)
    assert forward is not None
    torch.testing.assert_close(forward(*step(7, 5)), module(*step(7, 5)), rtol=1e-4, atol=1e-4)
    assert experts.fused(mixtral(act="relu")) is None


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in Triton's interpreter, and no loop stands in for them."""
    monkeypatch.setattr(table, "runs_kernel", lambda device: True)
    monkeypatch.setattr(rope, "has_loop", lambda module: False)


def model_of(config: Any) -> Any:
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def test_a_model_keeps_its_logits(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GptOssConfig(**SMALL, **HEADS, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2)
    model, ids = model_of(config), torch.arange(20)[None]
    own, launched = model(ids).logits, list[str]()
    for kernels in (triton_experts, triton_rope):
        inner = kernels.launch
        note = functools.partial(launched.append, kernels.__name__.rpartition(".")[2])
        monkeypatch.setattr(kernels, "launch", lambda *given, inner=inner, note=note: note() or inner(*given))
    monkeypatch.setattr(packed, "fastest", lambda: None)
    assert table.fuse(model, CPU) == NOTHING | {"experts": 2, "rope": 2, "norms": 5}
    launched.clear()
    torch.testing.assert_close(model(ids).logits, own, rtol=1e-4, atol=1e-4)
    assert launched == ["triton_rope", "triton_experts"] * 2


def gemma(dtype: torch.dtype) -> Any:
    model = model_of(Gemma3TextConfig(**SMALL, **HEADS, intermediate_size=40)).to(dtype)
    for module in model.modules():
        if norms.is_one(module):
            module.weight.normal_()
    return model


def test_no_bit_of_a_half_type_s_norm_changes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = gemma(torch.bfloat16), torch.arange(20)[None]
    own = model(ids).logits
    assert table.fuse(model, CPU)["norms"] == 13  # four and two a layer, one at the end
    called: list[tuple[int, ...]] = []
    inner = nn.functional.rms_norm
    monkeypatch.setattr(nn.functional, "rms_norm", lambda x, *rest: called.append(x.shape) or inner(x, *rest))
    assert torch.equal(model(ids).logits, own)
    assert len(called) == 13


def test_norms_and_positions_of_float32_are_loops_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, called = gemma(torch.float32), torch.arange(20)[None], list[str]()
    own = model(ids).logits
    monkeypatch.setattr(packed, "fastest", lambda: None)
    for module, name in ((norms, "normed"), (rope, "turned")):
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *of, i=inner, name=name: called.append(name) or i(*of))
    assert table.fuse(model, CPU) == NOTHING | {"rope": 2, "norms": 13}
    called.clear()
    torch.testing.assert_close(model(ids).logits, own, rtol=1e-5, atol=1e-5)
    assert sorted(called) == ["normed"] * 13 + ["turned"] * 4


def test_half_types_beside_weights_of_float32_keep_the_module_s_own_way() -> None:
    module, x = LlamaRMSNorm(48), torch.randn(1, 5, 48, dtype=torch.float16)
    assert torch.equal(norms.plain(module)(x), module(x))
    own = importlib.import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb
    given = [torch.randn(1, 2, 5, 8).half(), torch.randn(1, 2, 5, 8).half(), torch.ones(1, 5, 8), torch.ones(1, 5, 8)]
    assert torch.equal(rope.turning(own, by_loop=True)(*given)[0], own(*given)[0])


LAYOUTS = {
    "rows": lambda: torch.randn(1, 23, 48),
    "heads after tokens": lambda: torch.randn(1, 23, 3, 48),
    "heads before tokens": lambda: torch.randn(1, 23, 3, 48).transpose(1, 2),
    "a part of each row": lambda: torch.randn(1, 23, 3, 96)[..., 20:68].transpose(1, 2),
    "columns": lambda: torch.randn(1, 48, 23).transpose(1, 2),
    "one token of heads": lambda: torch.randn(1, 1, 3, 48).transpose(1, 2),
    "two sequences": lambda: torch.randn(2, 23, 3, 48).transpose(1, 2),
    "no rows": lambda: torch.randn(1, 0, 48),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_s_norm_is_the_same_wherever_it_lies(layout: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1)
    module, x = LlamaRMSNorm(48), LAYOUTS[layout]()
    module.weight.data.normal_()
    forward, kept = norms.plain(module), x.clone()
    found = forward(x)
    torch.testing.assert_close(found, module(x), rtol=1e-5, atol=1e-6)
    alone = [forward(row[None].contiguous()) for row in x.reshape(-1, 48)]
    assert torch.equal(found.reshape(-1, 48), torch.cat([*alone, x.new_empty(0, 48)]))
    assert torch.equal(x, kept)


def test_what_does_not_stand_the_trial_keeps_its_own_forward(
    everywhere: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels that are wrong, and kernels that do not compile."""
    caplog.set_level("INFO", "kvtier.fused")
    module = nn.Sequential(gpt_oss(), gpt_oss())
    inner = triton_experts.launch
    monkeypatch.setattr(triton_experts, "launch", lambda *given: inner(*given) * 1.01)
    assert table.fuse(module, CPU) == NOTHING
    assert caplog.text.count("GptOssExperts keeps its own forward: differs by 0.01 on 1 tokens") == 1  # one trial
    monkeypatch.setattr(triton_experts, "launch", lambda *given: 1 / 0)
    assert table.fuse(module, CPU) == NOTHING
    assert "GptOssExperts keeps its own forward: ZeroDivisionError" in caplog.text
    assert "forward" not in vars(module[0])


def test_a_chip_with_less_shared_memory_gets_smaller_tiles(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "HOPPER", None)  # as tiles that the chip refuses: an error
    module = nn.Sequential(gpt_oss())
    assert table.fuse(module, CPU)["experts"] == 1
    torch.testing.assert_close(module[0](*step(7, 5)), gpt_oss()(*step(7, 5)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
@pytest.mark.parametrize("by", [torch.float32, torch.bfloat16, "loop", "loops of three threads"])
def test_positions_turn_queries_and_keys_as_the_family_does(
    family: str, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss has an angle for each pair of numbers, Llama for each number."""
    by_loop, dtype = (True, torch.float32) if isinstance(by, str) else (False, by)
    if by == "loops of three threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1)
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own, angles = file.apply_rotary_pos_emb, 12 if family == "llama" else 6
    q, k = (torch.randn(1, 7, heads, 12).transpose(1, 2).to(dtype) for heads in (6, 3))
    cos, sin = (torch.randn(1, angles, 7).transpose(1, 2).to(dtype) for _ in range(2))  # transformers 5.17's strides
    refused: list[int] = []
    ours = rope.turning(lambda *given, **more: refused.append(1) or own(*given, **more), by_loop=by_loop)
    for found, expected in zip(ours(q, k, cos, sin), own(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=2e-2)
        assert found.transpose(1, 2).is_contiguous(), "a token's heads lie side by side, as pools want them"
    assert not refused
    for given in ((q, k, cos, sin, 1), (torch.cat([q, q]), torch.cat([k, k]), cos, sin)):
        torch.testing.assert_close(ours(*given)[0], own(*given)[0])
    assert len(refused) == 2


def test_only_the_modules_of_a_model_turn_otherwise(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    file = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    own = file.apply_rotary_pos_emb
    config = GptOssConfig(**SMALL, **HEADS, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2)
    model = model_of(config)
    attention = model.model.layers[0].self_attn
    assert rope.differs(attention, rope.fused(attention)) == ""
    assert file.apply_rotary_pos_emb is own
    monkeypatch.setattr(rope, "turning", lambda own, by_loop: lambda q, k, cos, sin: own(q, k, sin, cos))
    assert "with 32 angles" in rope.differs(attention, rope.fused(attention))


class OtherRMSNorm(nn.Module):
    """A name that says one thing, and a forward that does another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 48))
        self.eps = 1e-6

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states / hidden_states.abs().mean(-1, keepdim=True) * self.weight


def test_what_a_loop_cannot_take_goes_to_the_module_s_own_forward() -> None:
    module, wide = LlamaRMSNorm(48), torch.randn(1, 64, 32, 96).transpose(1, 2)
    for x in (wide, torch.randn(1, 4, 24)):
        with pytest.raises(RuntimeError, match="must match the size"):
            norms.plain(module)(x)
    with pytest.raises(RuntimeError, match="meta"):  # it read an address that is none
        torch.testing.assert_close(norms.plain(module)(torch.empty(1, 4, 48, device="meta")), torch.ones(1, 4, 48))
    module.weight.data = torch.randn(96)[::2]
    x = torch.randn(1, 4, 48)
    torch.testing.assert_close(norms.plain(module)(x), module(x), rtol=1e-5, atol=1e-6)
    overlapping = torch.randn(200).as_strided((1, 3, 2, 48), (1, 1, 7, 1))
    torch.testing.assert_close(norms.plain(module)(overlapping), module(overlapping))


def test_an_attention_with_a_forward_of_ours_or_without_weights_turns_as_it_did() -> None:
    attention = gemma(torch.float32).model.layers[0].self_attn
    assert rope.is_one(attention) and rope.has_loop(attention)
    attention.forward = attention.forward
    assert not rope.is_one(attention)
    assert not rope.has_loop(nn.Module())


def test_a_norm_of_another_kind_keeps_its_own_forward(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier.fused")
    module = nn.Sequential(OtherRMSNorm())
    assert table.fuse(module, CPU) == NOTHING
    assert "OtherRMSNorm keeps its own forward: differs by" in caplog.text


def test_layers_with_more_than_experts_in_them_are_not_candidates() -> None:
    module = gpt_oss()
    assert experts.is_one(module)
    for name, value in (("has_post_expert_norm", True), ("_is_expert_parallel", True), ("has_gate", False)):
        other = gpt_oss()
        setattr(other, name, value)
        assert not experts.is_one(other), name
    assert not experts.is_one(nn.Linear(2, 2))
