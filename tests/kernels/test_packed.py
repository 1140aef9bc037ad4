"""Products with packed weights, by loops and by oneDNN, against float64 and torch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

from kvtier.attention import workers
from kvtier.machine.loops import products
from runner.model.fused import linears, packed, room, table

CPU = torch.device("cpu")
WAYS = packed.by_loops, packed.by_onednn
ROUNDING = 2e-6
compiled = pytest.mark.skipif(not packed.compiles, reason="loops that run as Python multiply for nobody")
GUARD = 64
"""Numbers before and behind a result that nobody may write."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    if request.param is packed.by_onednn and not packed._runs(packed.by_onednn):
        pytest.skip("this torch has no packed products of oneDNN: pip install torch of an x86 build")
    return request.param


@pytest.fixture
def faster(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine on which one of them is the fastest."""
    monkeypatch.setattr(packed, "fastest", lambda: way)
    monkeypatch.setattr(linears, "_SMALL", 0)


@contextmanager
def _doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def off(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """The RMS of the error, of the root of the sum of a result's squared terms: the terms may cancel each other."""
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    want = F.linear(x, weight, bias)
    terms = F.linear(x.square(), weight.square(), None if bias is None else bias.square())
    assert got.shape == want.shape
    return float((got.double() - want).square().mean().sqrt() / terms.mean().sqrt())


@given(
    rows=st.integers(1, 40) | st.integers(100, 300),
    inner=st.integers(1, 90) | st.sampled_from([1023, 1024, 1025, 2100]),
    columns=st.integers(1, 150),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
    past=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_sizes(rows: int, inner: int, columns: int, has_bias: bool, threads: int, past: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, inner, generator=generator) for n in (rows, columns))
    bias = torch.randn(columns, generator=generator) if has_bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        patch.setattr(workers, "_WORTH_A_THREAD", 1)
        patch.setattr(packed, "_CACHE", 0 if past else 1 << 40)
        product = packed.by_loops(weight, bias)
        got = product(x)
        assert off(got, x, weight, bias) < ROUNDING
        for first in {0, rows // 2, rows - 1}:
            assert torch.equal(product(x[first : first + 1]), got[first : first + 1]), "a row has bits of its own"


@pytest.mark.parametrize(("rows", "inner"), [(1, 37), (5, 16), (13, 64), (14, 64), (130, 37), (300, 16)])
@pytest.mark.parametrize("columns", [1, 31, 64, 100])
@pytest.mark.parametrize("past", [False, True])
def test_nothing_beside_the_result_and_the_scratch_space_is_written(
    rows: int, inner: int, columns: int, past: bool
) -> None:
    """Nor is anything behind x and the bias read that could change the result."""
    weight, nan, scratch_size = torch.randn(columns, inner), float("nan"), products.scratch_numbers(rows, inner)
    room = torch.full((GUARD + rows * columns + GUARD,), nan)
    x = torch.full((rows * inner + GUARD,), nan)
    bias = torch.full((columns + GUARD,), nan)
    x[: rows * inner], bias[:columns] = torch.randn(rows * inner), torch.randn(columns)
    panels, scratch = packed.in_panels(weight), torch.full((scratch_size + GUARD,), 7.0)
    to = room.data_ptr() + 4 * GUARD
    addresses = to, x.data_ptr(), panels.data_ptr(), bias.data_ptr(), scratch.data_ptr()
    assert products.multiplied(*addresses, (rows, inner, columns), 0, len(panels), past and columns == 64)
    assert room[:GUARD].isnan().all() and room[-GUARD:].isnan().all() and (scratch[-GUARD:] == 7).all()
    got = room[GUARD:-GUARD].view(rows, columns)
    assert off(got, x[: rows * inner].view(rows, inner), weight, bias[:columns]) < ROUNDING


def test_shares_of_a_weight_s_panels_are_the_whole() -> None:
    x, weight = torch.randn(3, 20), torch.randn(300, 20)
    panels, scratch, out = packed.in_panels(weight), torch.empty(1 << 14), torch.full((3, 300), float("nan"))
    addresses = out.data_ptr(), x.data_ptr(), panels.data_ptr(), 0, scratch.data_ptr()
    products.multiplied(*addresses, (3, 20, 300), 1, 3, False)
    done = ~out.isnan().any(0)
    width = panels.shape[-1]
    assert done.nonzero().flatten().tolist() == list(range(width, 3 * width))
    assert off(out[:, done], x, weight[done]) < ROUNDING


def test_what_is_no_number_stays_in_its_row_and_column() -> None:
    x, weight = torch.randn(20, 70), torch.randn(90, 70)
    x[17, 3], weight[40, 5] = float("nan"), float("inf")
    got = packed.by_loops(weight, None)(x)
    finite = got.isfinite()
    assert not finite[17].any() and not finite[:, 40].any()
    assert finite.sum() == 19 * 89


@pytest.mark.parametrize("inner", [64, 640, 2048, 4096])
def test_a_row_has_the_same_bits_alone_and_among_others(faster: None, inner: int) -> None:
    layer = nn.Linear(inner, 96).requires_grad_(False)
    forward, x = linears.fused(layer), torch.randn(1, 300, inner)
    assert linears.differs(layer, forward) == ""
    whole = forward(x)
    for first, rows in ((0, 1), (5, 1), (299, 1), (7, 2), (50, 3), (100, 64), (0, 200)):
        assert torch.equal(forward(x[:, first : first + rows]), whole[:, first : first + rows]), (first, rows)


def test_rows_of_any_shape_and_strides_are_taken(faster: None) -> None:
    layer = nn.Linear(8, 5).requires_grad_(False)
    forward = linears.fused(layer)
    for shape in ((8,), (1, 8), (1, 1, 8), (0, 8), (1, 0, 8), (2, 3, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(forward(x), layer(x))
    x = torch.randn(8, 6)
    torch.testing.assert_close(forward(x.T), layer(x.T))
    torch.testing.assert_close(forward(x.T[::2]), layer(x.T[::2]))
    turned = torch.view_as_complex(torch.randn(3, 8, 2)).conj().imag
    assert turned.is_neg()
    torch.testing.assert_close(forward(turned), layer(turned.resolve_neg()))


def test_what_would_be_read_wrong_is_refused() -> None:
    """Two of them are tensors without memory."""
    product = packed.by_loops(torch.ones(5, 8), None)
    nothing = torch._efficientzerotensor(2, 8)
    for x in (torch.ones(2, 9), torch.ones(2, 8).double(), torch.ones(2, 8, device="meta"), nothing):
        with pytest.raises(RuntimeError, match=r"a product of torch.float32 \[\.\.\., 8\]"):
            product(x)
    with pytest.raises((RuntimeError, UserWarning)):
        product(FakeTensorMode().from_tensor(torch.ones(2, 8)))
    with pytest.raises(RuntimeError):
        packed.by_loops(torch.ones(5, 8), torch.ones(3))
    assert packed.by_loops(torch.zeros(40, 8), torch.ones(1))(torch.ones(1, 8)).tolist() == [[1.0] * 40]


@compiled
def test_who_multiplies_what(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, own, float32, bfloat16 in (
        (None, True, packed.by_loops, packed.by_onednn),
        (packed.by_onednn, False, packed.by_onednn, packed.by_loops),
    ):
        monkeypatch.setattr(packed, "fastest", lambda found=found: found)
        monkeypatch.setattr(packed, "_has_rows_of_their_own", lambda own=own: own)
        assert packed.chosen(torch.float32) is float32
        assert packed.chosen(torch.bfloat16) is bfloat16


@pytest.mark.parametrize("inner", [64, 1100])
def test_bfloat16_by_loops_is_rounded_once(inner: int) -> None:
    x, weight, bias = (torch.randn(n, inner).bfloat16() for n in (21, 50, 1))
    product = packed.by_loops(weight, bias[0, :50])
    got, want = product(x), F.linear(x.double(), weight.double(), bias[0, :50].double())
    assert got.dtype is torch.bfloat16
    assert (got.double() - want).abs().max() <= 2**-8 * want.abs().max()
    assert (got == want.bfloat16()).double().mean() > 0.99
    for rows in (1, 3, 20):
        assert torch.equal(product(x[:rows]), got[:rows])
    with pytest.raises(RuntimeError, match=r"a product of torch\.bfloat16"):
        product(x.float())


@compiled
def test_a_way_whose_rows_depend_on_others_is_not_taken_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_tiles(weight: torch.Tensor, bias: Any) -> Any:
        return lambda x: F.linear(x, weight) * (1.01 if len(x) % 16 else 1)

    for way, own in ((of_tiles, False), (packed.by_loops, True)):
        monkeypatch.setattr(packed, "by_onednn", way)
        assert packed._has_rows_of_their_own.__wrapped__() is own


class Router(nn.Module):
    """As LongCat's: it reads its layer's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.other = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden_states, self.classifier.weight) + self.other(hidden_states)


def test_a_weight_that_other_code_reads_stays(faster: None) -> None:
    """It was NaN, and so was every logit."""
    module, x = nn.Sequential(Router()).requires_grad_(False), torch.randn(3, 8)
    own = module(x)
    assert table.fuse(module, CPU)["linears"] == 2
    torch.testing.assert_close(module(x), own)
    assert module[0].other.weight.isnan().all(), "nobody reads this one"


def test_a_packed_weight_takes_the_place_of_its_own_and_a_tied_head_stays(faster: None) -> None:
    ids = torch.arange(20)[None]
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16, "intermediate_size": 40}
    for tied, gone in ((True, 0), (False, 1)):
        config = Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        own, shape = model(ids).logits, model.lm_head.weight.shape
        found = table.fuse(model, CPU)
        assert (found["gates"], found["linears"]) == (2, 11)  # a layer's gate, and its five others; the head
        torch.testing.assert_close(model(ids).logits, own, rtol=1e-5, atol=1e-5)
        assert model.model.embed_tokens.weight.isfinite().all()
        assert bool(model.lm_head.weight.isnan().all()) is bool(gone)
        assert model.lm_head.weight.shape == shape, "others ask for shapes and count parameters"
        layer = model.model.layers[0].mlp.up_proj.weight
        assert layer.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([1.0, 1.0, 1.0], None),
        ([1.0, 0.95, 0.91], None),
        ([1.0, 0.89, 0.85], packed.by_loops),
        ([1.0, 0.89, 0.7], packed.by_onednn),
        ([1.0, 1.5, 0.89], packed.by_onednn),
    ],
)
def test_a_tenth_less_is_asked_for(seconds: list[float], found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loops beside torch, and of oneDNN beside both: a restart should find what the last run found."""
    monkeypatch.setattr(packed, "_least_s", lambda works: seconds)
    monkeypatch.setattr(packed, "_runs", lambda way: True)
    assert packed.fastest.__wrapped__() is found


def test_weights_lie_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of one the next is fetched. What was tried in vain lies not between them, and large ones alone."""
    monkeypatch.setattr(room, "_CHUNK", 1 << 20)
    with room.side_by_side():
        first = packed.in_panels(torch.randn(64, 20))
        before = room.mark()
        tried = packed.in_panels(torch.randn(64, 300))
        room.back_to(before)
        second, large = packed.in_panels(torch.randn(64, 20)), packed.in_panels(torch.randn(1024, 512))
    assert second.data_ptr() == first.data_ptr() + first.nbytes == tried.data_ptr()
    assert first.data_ptr() % 64 == 0 and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    alone = packed.in_panels(torch.randn(64, 20))
    for each in (large, alone):
        assert each.untyped_storage().nbytes() == each.nbytes and each.data_ptr() % 64 == 0


def test_no_rejected_trial_lies_between_weights(faster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[torch.Tensor]()
    inner = packed.in_panels
    monkeypatch.setattr(packed, "in_panels", lambda weight: taken.append(inner(weight)) or taken[-1])
    config = Gemma3TextConfig(hidden_size=48, intermediate_size=72)
    table.fuse(nn.Sequential(nn.Linear(48, 48), Gemma3MLP(config)).requires_grad_(False), CPU)
    if taken:  # of the layer before it, of SiLU, which it is not, of GELU, and of the layer behind both
        before, silu, gelu, behind = taken
        assert before.data_ptr() + before.nbytes == silu.data_ptr() == gelu.data_ptr()
        assert behind.data_ptr() == gelu.data_ptr() + gelu.nbytes


def test_a_trial_s_weights_do_not_lie_among_a_model_s() -> None:
    """They stayed with it, 32 MiB."""
    with room.side_by_side():
        packed.in_panels(torch.randn(64, 20))
        before = room.mark().data_ptr()
        packed.fastest.__wrapped__()
        assert room.mark().data_ptr() == before


def test_memory_of_inference_mode_is_written_outside_of_it() -> None:
    with room.side_by_side():
        with torch.inference_mode():
            packed.by_loops(torch.ones(8, 8), None)
        assert packed.by_loops(torch.ones(8, 8), None)(torch.ones(1, 8)).tolist() == [[8.0] * 8]


@pytest.mark.parametrize("around", [lambda: torch.device("meta"), _doubles, torch.inference_mode])
def test_the_trial_runs_whatever_tensors_are_by_default(around: Any) -> None:
    before = torch.get_rng_state()
    with around():
        packed.fastest.__wrapped__()
    assert torch.equal(torch.get_rng_state(), before)


@compiled
def test_a_torch_without_onednn_has_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "by_onednn", lambda *of: torch.ops.mkldnn._no_such_operation(*of))
    monkeypatch.setattr(packed, "_least_s", lambda works: [1.0, 0.5][: len(works)] + [0.1] * (len(works) - 2))
    assert packed.fastest.__wrapped__() is packed.by_loops


def test_products_stay_torch_s_if_no_way_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_SMALL", 0)
    monkeypatch.setattr(packed, "fastest", lambda: None)
    assert not linears.is_one(nn.Linear(8, 8)) and linears.is_one(nn.Linear(8, 8), exact=True)


def test_products_that_are_wrong_are_not_taken(faster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inner = nn.Linear(8, 8).requires_grad_(False), packed.packed
    monkeypatch.setattr(packed, "packed", lambda *given: lambda x: inner(*given)(x) * 1.0001)
    before = layer.weight.clone()
    assert not any(table.fuse(nn.Sequential(layer), CPU).values())
    assert torch.equal(layer.weight, before)
    assert "forward" not in vars(layer)


def test_small_layers_half_types_and_other_classes_keep_their_products(
    faster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(nn.Linear):
        pass

    assert linears.is_one(nn.Linear(8, 8))
    monkeypatch.setattr(linears, "_SMALL", 64)
    assert not linears.is_one(nn.Linear(8, 8)), "a call of MKL's costs less"
    assert linears.is_one(nn.Linear(8, 8), exact=True) and linears.is_one(nn.Linear(8, 9))
    assert not linears.is_one(nn.Linear(8, 9).to(torch.bfloat16))
    assert not linears.is_one(Other(8, 8))


_OTHER = """
import torch
torch.manual_seed(0)
from kvtier.machine.loops import vectors
from runner.model.fused import packed
assert (vectors.LANES, vectors.ROWS) == ({lanes}, {rows}), (vectors.LANES, vectors.ROWS)
for rows, inner, columns in ((1, 33, 5), (7, 70, 40), (16, 40, 64), (30, 1030, 33)):
    x, weight, bias = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
    product = packed.by_loops(weight, bias)
    got, want = product(x), x.double() @ weight.double().T + bias
    assert (got - want).norm() < 2e-6 * want.norm(), (rows, inner, columns)
    assert torch.equal(product(x[-1:]), got[-1:])
"""


@pytest.mark.parametrize(
    ("environment", "lanes", "rows"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, None, None),
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma"}, 8, 6),
        ({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}, 4, 4),
        ({"NUMBA_CPU_NAME": "generic"}, 4, 4),
    ],
)
def test_other_processors_and_plain_python_give_the_same(
    environment: dict[str, str], lanes: int | None, rows: int | None
) -> None:
    code = _OTHER.format(lanes=lanes or "vectors.LANES", rows=rows or "vectors.ROWS")
    if lanes and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"):
        pytest.skip("this processor is none that these names fit: an x86 one with AVX2 does")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment)
    assert run.returncode == 0, run.stderr
