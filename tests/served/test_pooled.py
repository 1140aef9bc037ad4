"""Recurrent layers by FlashInfer's kernels, which find states where they lie: its own Python over stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention.states_standin import Kernels, states_on
from breadth import sample
from families import zoo
from patience import FOREVER_S

from benchmarks.gpu import states
from benchmarks.gpu.clock import HostClock
from benchmarks.gpu.figures import Budget
from kvtier import CacheSpec, KVCache, Part, Request, Scheduler
from kvtier.attention.flashinfer import FlashInfer
from kvtier.geometry.kinds import RecurrentState
from runner.model.graphs import DecodeGraphs
from runner.model.hybrid import HybridModel
from runner.model.pooled import delta, mamba2
from runner.model.pooled.table import take

from .cpu_graph import CpuGraphs

DELTA = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | {"num_experts": 2, "num_experts_per_tok": 2},
    "qwen3_5": DELTA,
    "granitemoehybrid": {"head_dim": 64, "num_local_experts": 2},
    "mamba2": {},
    "nemotron_h": {"head_dim": 64, "n_routed_experts": 2},
}
"""All experts take part: rounding sends no token to another one."""
ROWS = 5
LAUNCHES = {"qwen3_next": {"delta decode", "delta prompt"}, "qwen3_5": {"delta decode", "delta prompt"}}


@pytest.fixture
def kernels(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    with states_on(flashinfer, monkeypatch) as found:
        yield found


@pytest.fixture
def load(kernels: Kernels, tmp_path: Path) -> Callable[..., HybridModel]:
    """A tiny model over FlashInfer; ``attention``: "reference" is transformers' code for all."""

    def of(name: str, attention: str = "flashinfer", dtype: str = "bfloat16", **changes: Any) -> HybridModel:
        folder = zoo.build(name, tmp_path / name, **{**SHAPES.get(name, {}), **changes})
        if attention == "reference":
            return HybridModel.load(folder, dtype=dtype, attention=attention)
        return HybridModel.load(folder, dtype=dtype, backend=FlashInfer("cpu", workspace_bytes=1 << 10))

    return of


def requests(lengths: tuple[int, ...] = (1, 60, 40, 130)) -> list[Request]:
    """Their answers pass a boundary (64), the first token of one is a decode of nothing."""
    rng = np.random.default_rng(0)
    return [Request(f"r{i}", rng.integers(3, 140, n).tolist(), 6) for i, n in enumerate(lengths)]


class Side:
    """A model, its cache, and a scheduler with the same requests as another one's."""

    def __init__(self, model: HybridModel, make_cache: Any, **options: Any) -> None:
        self.model = model
        blocks = {"full": 80, "state": 24} if "full" in model.spec(16).names else 24
        self.cache: KVCache = make_cache(model.spec(block_tokens=16), blocks, **options)
        self.scheduler = Scheduler(self.cache, max_batched_tokens=80, max_running=ROWS)
        for request in requests():
            self.scheduler.add(request)


def parts_of(model: HybridModel) -> tuple[Part, ...]:
    state = model.spec(16).group("state").attention
    assert isinstance(state, RecurrentState)
    return state.parts


def compare(ours: Side, own: Side, graphs: DecodeGraphs) -> None:
    """Runs both to their ends, ours captured where it can be; each step's logits are nearly the same."""
    while own.scheduler.has_work():
        steps = [side.scheduler.schedule() for side in (own, ours)]
        want = own.model.forward(steps[0], own.cache)
        got = graphs.forward(steps[1])
        if got is None:
            got = ours.model.forward(steps[1], ours.cache)
        assert want.shape == got.shape
        assert bool(((got - want).square().mean(-1) <= 0.05**2 * want.square().mean(-1)).all())
        for side, step in zip((own, ours), steps, strict=True):
            side.scheduler.commit(step, want.argmax(-1).cpu().numpy())
    assert graphs.replayed >= 5 and graphs.eager > 2 and graphs.stats()["reasons"] == []


@pytest.mark.parametrize("name", sample(list(SHAPES), ["qwen3_next", "mamba2"]))
def test_kernels_and_captured_steps_give_the_familys_logits(
    name: str, load: Callable[..., HybridModel], kernels: Kernels, make_cache: Any, flashinfer: Any
) -> None:
    """Prompts cut in pieces, decodes that pass a boundary, and null rows: step by step beside transformers' code."""
    ours, own = (Side(load(name, attention, "float16"), make_cache) for attention in ("flashinfer", "reference"))
    assert ours.model.pooled == "" and own.model.pooled == "the attention is reference"
    assert set(kernels.launches) == LAUNCHES.get(name, {"mamba2 decode"})
    null = [part[0].clone() for part in ours.cache.state("state", 0)]
    graphs = DecodeGraphs(ours.model, ours.cache, ROWS, capture=CpuGraphs(flashinfer))
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 2, 4, 5]
    compare(ours, own, graphs)
    assert all(torch.equal(a, b[0]) for a, b in zip(null, ours.cache.state("state", 0), strict=True))


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "source and target are swapped": lambda source, target: (target, source),
    "the neighbour's state": lambda source, target: (source.roll(1), target),
    "where it was": lambda source, target: (source, source),
    "one block further": lambda source, target: (source, target - 1),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    sample(
        [(name, wrong) for name in ("qwen3_5", "mamba2") for wrong in WRONG],
        [("qwen3_5", "source and target are swapped"), ("mamba2", "the neighbour's state"), ("mamba2", "where it was")],
    ),
)
def test_a_kernel_that_takes_or_leaves_a_state_elsewhere_is_not_used(
    name: str, wrong: str, load: Callable[..., HybridModel], kernels: Kernels
) -> None:
    kernels.swapped = WRONG[wrong]
    model = load(name)
    assert "differs by" in model.pooled or "not its own" in model.pooled
    assert not model.mixers.is_turned and "recurrent0" in {part.name for part in parts_of(model)}


def test_states_that_lie_as_transformers_has_them_go_to_its_code(
    load: Callable[..., HybridModel], kernels: Kernels, make_cache: Any
) -> None:
    """In a cache of the config's spec, not of the model's: sizes are the same, and K and V would be taken for each
    other."""
    model = load("qwen3_5")
    assert model.pooled == "" and model.mixers.is_turned
    plain, logits = CacheSpec.from_config(model.config, dtype=model.dtype, block_tokens=16), []
    for spec in (model.spec(block_tokens=16), plain):
        cache, of = make_cache(spec, {"full": 80, "state": 24}), []
        scheduler = Scheduler(cache, max_batched_tokens=80, max_running=ROWS)
        scheduler.add(requests()[2])
        kernels.launches.clear()
        while scheduler.has_work():
            step = scheduler.schedule()
            of.append(model.forward(step, cache))
            scheduler.commit(step, np.full(len(step.sample_rows), 5))
        logits.append(torch.cat(of))
    assert kernels.launches == []
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < 0.05


REFUSED = {
    "qwen3_next of other heads": ("qwen3_next", {"linear_key_head_dim": 16}, "heads of 16 and 128, and FlashInfer's"),
    "lfm2": ("lfm2", {"hidden_size": 256}, "ShortConv: FlashInfer's kernels take no such recurrence"),
    "negative eigenvalues": ("olmo_hybrid", DELTA | {"linear_allow_neg_eigval": True}, "its output differs by nan"),
    "mamba2 of other heads": ("mamba2", {"num_heads": 16, "head_dim": 8}, "heads of 8, and FlashInfer's"),
    "llama": ("llama", {"head_dim": 64}, "it has no recurrent layers"),
}


@pytest.mark.parametrize("case", sample(list(REFUSED), ["qwen3_next of other heads", "lfm2"]))
def test_what_kernels_cannot_take_is_refused_by_name(case: str, load: Callable[..., HybridModel]) -> None:
    name, changes, reason = REFUSED[case]
    assert reason in load(name, **changes).pooled


def test_kimi_s_delta_rule_is_refused_by_name(load: Callable[..., HybridModel]) -> None:
    """FlashInfer has it for states in bfloat16, or in place together with a convolution of another layout."""
    model = load("kimi_linear", "reference")
    why = take(model.mixers, parts_of(model), model.device, model.dtype)
    assert why == "KimiLinearDeltaAttention: FlashInfer's kernels take no such recurrence"


def test_states_in_half_types_are_refused_by_name() -> None:
    half = (Part("recurrent0", (4, 128, 128), "bfloat16"),)
    assert delta.refuses(half) == "states in bfloat16, and FlashInfer's delta rule is used for float32"
    assert mamba2.refuses(half) == delta.refuses((replace(half[0], dtype="float32"),)) == ""


def test_kernels_that_cannot_be_compiled_leave_the_familys_code(
    load: Callable[..., HybridModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashinfer.gdn_decode.run_pretranspose_decode", None)
    assert "TypeError: 'NoneType' object is not callable" in load("qwen3_5").pooled


def test_a_state_that_is_not_finite_is_named_after_a_captured_step(
    load: Callable[..., HybridModel], make_cache: Any, flashinfer: Any
) -> None:
    """Only where it ends at a boundary: r1's does, four tokens on."""
    side = Side(load("qwen3_next"), make_cache)
    graphs = DecodeGraphs(side.model, side.cache, ROWS, capture=CpuGraphs(flashinfer))
    graphs.capture()
    named = []
    while side.scheduler.has_work() and not named:
        step = side.scheduler.schedule()
        states = step.group("state").states()
        for k, end in enumerate(states.end[-len(step.rows) :]):
            if len(step.rows) == step.num_tokens and end % 64 == 0:
                side.cache.state("state", 1)[1][int(states.source[k])] = torch.nan
                named = [k]
        logits = graphs.forward(step)
        if logits is None:
            logits = side.model.forward(step, side.cache)
        assert list(side.model.unsound) == named
        if not named:
            side.scheduler.commit(step, np.full(len(step.sample_rows), 5))
    assert named and graphs.replayed > 0
    side.scheduler.cancel(step)


# --- the section of the benchmark, and on a GPU -----------------------------------------------------------------------


def test_the_section_of_the_benchmark(kernels: Kernels, flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of small shapes, each by both codes; where there are no kernels the section says why."""
    linear = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    shapes = {
        "delta": lambda: zoo.config("qwen3_5", **linear, **DELTA),
        "scan": lambda: zoo.config("mamba2", num_hidden_layers=1),
        "conv": lambda: zoo.config("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    }
    monkeypatch.setattr(states, "RECURRENT", shapes)
    on_cpu: Any = SimpleNamespace(
        link=SimpleNamespace(device="cpu"),
        clock=HostClock(),
        dtype=torch.bfloat16,
        capture=lambda: CpuGraphs(flashinfer),
        backend=lambda: FlashInfer("cpu", workspace_bytes=1 << 10),
    )
    found = {f.name: f for f in states.run(Budget(FOREVER_S), on_cpu, rows=(1, 3), prompt=70)}
    assert [f.ok for f in found.values() if f.at_least] == [True, True, False]
    assert "no such recurrence" in found["conv: FlashInfer's kernels"].note
    timed = [name for name, f in found.items() if f.unit == "us" and f.value > 0]
    assert len(timed) == 3 * 2 + 3 * 2 + 3
    assert found["delta: a layer's decode of 3 by FlashInfer"].note.startswith("2 MB of states in and out: ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_kernels_and_captured_steps_on_a_gpu(name: str, make_cache: Any, tmp_path: Path) -> None:
    """What no stand-in can tell."""
    if name == "qwen3_5":
        pytest.importorskip("cutlass", reason="FlashInfer compiles the delta rule with nvidia-cutlass-dsl")
    folder = zoo.build(name, tmp_path, **SHAPES[name])
    models = [HybridModel.load(folder, "cuda:0", "bfloat16", attention=of) for of in ("flashinfer", "reference")]
    assert models[0].pooled == ""
    ours, own = (Side(model, make_cache, device="cuda:0") for model in models)
    graphs = DecodeGraphs(ours.model, ours.cache, ROWS)
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 2, 4, 5], graphs.stats()["reasons"]
    compare(ours, own, graphs)
