"""Models over FlashInfer: K and V in fp8, new tokens written by the Triton kernel, memory beside the pools."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from breadth import breadth
from families import zoo
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kvtier import ConfigError, MemoryUnavailable, Request
from kvtier.attention.choice import Choice
from kvtier.attention.flashinfer import FlashInfer, Held, workspace_bytes_for
from kvtier.machine.errors import AttentionUnavailable
from runner import LLM, SamplingParams, verify
from runner.engine import memory
from runner.engine import service as service_module
from runner.model import graphs
from runner.model.attention import scales_of
from runner.model.graphs import DecodeGraphs
from runner.model.hybrid import HybridModel
from runner.verify import kit, show
from runner.verify.scenarios import SCENARIOS

from .conftest import MAX_RUNNING, SHAPES, Serving
from .cpu_graph import CpuGraphs
from .test_graphs import requests

MIB = 1 << 20
LAYERS = 4
TYPICAL, LARGEST = 1e-2, 6e-2
"""Over the logits' deviation. Seen: 2.4e-3 and 2.2e-2; with one head's scale for another's 8.6e-2 and 1.3e-1."""


def uneven(model: HybridModel) -> dict[int, dict[str, list[float]]]:
    """Scales of which no two heads' are alike."""
    spec = model.spec()
    places = {place: n for n, place in enumerate(spec.layers)}
    return {
        i: {
            which: [by * (1 + 0.37 * ((places[place] + h) % 4)) for h in range(spec.group(place[0]).num_kv_heads)]
            for which, by in (("k", 0.05), ("v", 0.03))
        }
        for i, place in enumerate(spec.layers)
    }


@pytest.fixture
def written_by_triton(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New tokens are written by the kernel, in Triton's interpreter; a captured launch is one operation."""
    pytest.importorskip("triton", reason="make test installs it")
    from kvtier.attention.kernels import triton_write_kv

    launch, launches = triton_write_kv.launch, []

    def on_the_stream(*args: Any) -> None:
        def work() -> None:
            launches.append(len(args[4]))
            with np.errstate(over="ignore"), _disable_current_modes():
                launch(*args)

        flashinfer.submit(work)

    monkeypatch.setattr(triton_write_kv, "launch", on_the_stream)
    monkeypatch.setattr(sys.modules["kvtier.attention.kernels.write_kv"], "runs_kernel", lambda device: True)
    return launches


def check_served(serving: Serving, flashinfer: Any, asked: Sequence[Request] = ()) -> DecodeGraphs:
    """Every step runs over the torch reference, eagerly over FlashInfer, and in a graph where it can.

    Hidden states in float16 differ in their last bit, and a value near a tie may then be rounded otherwise into 8 bits,
    or go to another expert. So the median is what must be small, and the root mean square not large.
    """
    model, cache, scheduler = serving
    reference = HybridModel(model.model, attention="reference")
    reference.temperatures = model.temperatures
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=CpuGraphs(flashinfer))
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 2, 4, 5], graphs.stats()["reasons"]
    for request in asked or requests(7):
        scheduler.add(request)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    while scheduler.has_work():
        step = scheduler.schedule()
        want = reference.forward(step, cache)
        for gaps, got in zip(found, (model.forward(step, cache), graphs.forward(step)), strict=True):
            if got is not None and want.numel():
                assert got.shape == want.shape
                gaps.append((got - want).abs().flatten() / want.std())
        scheduler.commit(step, want.argmax(-1).numpy())
    for gaps in found:
        gap = torch.cat(gaps)
        typical, largest = float(gap.median()), float(gap.square().mean().sqrt())
        assert typical <= TYPICAL and largest <= LARGEST, f"{typical:.1e} {largest:.1e}"
    assert graphs.replayed > 2
    return graphs


# --- K and V in fp8 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ("gemma3", "gemma2", "gpt_oss", "llama4", "mistral") if n in zoo.ZOO])
def test_fp8_eagerly_and_captured(name: str, serve: Callable[..., Serving], flashinfer: Any) -> None:
    check_served(serve(name, dtype="fp8", kv_scales=uneven), flashinfer)
    assert {m.dtype_kv for m in flashinfer.modules} == {
        torch.float8_e4m3fn,
        torch.float16,
    }


def test_a_captured_step_keeps_the_scales_that_it_reads(serve: Callable[..., Serving], flashinfer: Any) -> None:
    """Its graph knows their addresses only, and others may push them out of the cache that they came from."""
    model, cache, _ = serve("gemma3", dtype="fp8", kv_scales=uneven)
    scales_of.cache_clear()
    graphs = DecodeGraphs(model, cache, 2, capture=lambda forward: (lambda: None, forward()))
    graphs.capture()
    pairs = scales_of(cache.spec, model.device).values()
    kept = [weakref.ref(x) for pair in pairs for x in pair.values()]
    assert len(kept) == 2 * LAYERS and graphs.stats()["captured"] == [1, 2]
    del pairs
    scales_of.cache_clear()
    gc.collect()
    assert all(x() is not None for x in kept)


@pytest.mark.parametrize(
    "kv",
    [pytest.param({}, marks=breadth), {"dtype": "fp8", "kv_scales": uneven}],
    ids=["float16", "fp8"],
)
def test_the_triton_kernel_writes_eagerly_and_captured(
    kv: dict[str, Any], written_by_triton: list[int], serve: Callable[..., Serving], flashinfer: Any
) -> None:
    short = [Request(f"r{i}", [5 + i] * n, 4) for i, n in enumerate((4, 2))]
    graphs = check_served(serve("gemma3", **kv), flashinfer, short)
    small = [rows for rows in written_by_triton if rows <= 2]  # a decode step runs eagerly and is replayed
    assert len(written_by_triton) % LAYERS == 0 and len(small) >= 2 * LAYERS * graphs.replayed


@pytest.fixture
def as_if_on_cuda(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """``attention="auto"``, or "flashinfer" if it is required, finds FlashInfer."""

    def choose(required: bool) -> None:
        chosen = Choice("flashinfer", "as if on CUDA", required)
        monkeypatch.setattr("kvtier.attention.choice.choose", lambda *_: chosen)

    return choose


def load(name: str, tmp_path: Path) -> HybridModel:
    folder = zoo.build(name, tmp_path / name, **SHAPES.get(name, {"head_dim": 64}))
    return HybridModel.load(folder, dtype="float16")


@pytest.mark.parametrize("required", [False, True])
def test_head_sizes_that_flashinfer_cannot_compute_in_fp8(
    required: bool, as_if_on_cuda: Callable[[bool], None], tmp_path: Path
) -> None:
    """192 with 128 works in 16 bits, and so the model loads."""
    as_if_on_cuda(required)
    model = load("mimo_v2_flash", tmp_path)
    assert model.try_attention(model.spec()) > 0 and model.attention.name == "flashinfer"
    if required:
        with pytest.raises(AttentionUnavailable, match=r"group '\w+'.*64, 128, 256 over K and V in 8 bits"):
            LLM(model, "cpu", "64MiB", 0, kv_cache_dtype="fp8")
    else:
        with LLM(model, "cpu", "1MiB", 0, kv_cache_dtype="fp8") as llm:
            attention = llm.stats()["attention"]
            assert attention["backend"] == "reference" and "in 8 bits" in attention["reason"]
            assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)


@pytest.mark.parametrize("required", [False, True])
def test_fp8_kernels_that_nobody_can_compile(
    required: bool, as_if_on_cuda: Callable[[bool], None], flashinfer: Any, tmp_path: Path
) -> None:
    """Those for 16 bits may be there, built ahead: found before the cache is built, not amid a request."""
    as_if_on_cuda(required)
    model = load("gemma3", tmp_path)
    flashinfer.cannot_build = lambda compiled: compiled.dtype_kv.itemsize == 1
    assert model.try_attention(model.spec()) == 2
    spec = model.spec(dtype="fp8")
    if required:
        with pytest.raises(AttentionUnavailable, match=r"(?s)float8_e4m3fn.*nvcc not found"):
            model.try_attention(spec)
    else:
        assert model.try_attention(spec) == 0
        assert model.attention.name == "reference" and "nvcc not found" in model.attention.reason


# --- memory beside the pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral"])
def test_what_the_attention_will_hold_is_known_before_it_does(
    name: str, serve: Callable[..., Serving], flashinfer: Any
) -> None:
    serving = serve(name)
    model, cache, _ = serving
    kinds = model.try_attention(cache.spec)
    assert kinds == len(cache.spec.groups)
    assert (model.backend.workspace_bytes(), model.backend.pinned_bytes()) == (1 << 10, 0), "the trial's are gone"
    most = model.attention_memory(kinds, captured=4)
    captured = check_served(serving, flashinfer)
    assert most == (model.backend.workspace_bytes(), model.backend.pinned_bytes())
    assert captured.stats()["captured"] == [1, 2, 4, 5]


def flash_model(tmp_path: Path, workspace: int = 4 * MIB) -> HybridModel:
    folder = zoo.build("gemma3", tmp_path / "gemma3", head_dim=64)
    return HybridModel.load(folder, dtype="float16", backend=FlashInfer("cpu", workspace_bytes=workspace))


@pytest.mark.parametrize("kv", [{}, {"kv_cache_dtype": "fp8"}], ids=["float16", "fp8"])
def test_workspaces_count_in_the_device_memory_asked_for(kv: Any, flashinfer: Any, tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    with LLM(model, "cpu", 64 * MIB, 0, **kv) as llm:
        pools = llm.stats()["cache"]["device_bytes"]
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        held = llm.stats()["attention"]
    assert held["workspace_bytes"] == 4 * MIB + 2 * 2 * (8 * MIB + 4 * 32768)
    assert 62 * MIB < pools + held["workspace_bytes"] <= 64 * MIB


@pytest.fixture
def rehearsed(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode steps are captured, here too, and a rehearsal takes 3 MiB; its rows."""
    rows: list[int] = []

    class Rehearsed(CpuGraphs):
        def __init__(self, device: torch.device) -> None:
            super().__init__(flashinfer)

        def rehearse(self, forward: Callable[[], torch.Tensor]) -> int:
            rows.append(len(forward()))
            return 3 * MIB

    for place in (graphs, service_module):
        monkeypatch.setattr(place, "why_eager", lambda model: None)
    monkeypatch.setattr(graphs, "CudaCapture", Rehearsed)
    return rows


def test_captured_steps_count_in_the_device_memory_asked_for(rehearsed: list[int], tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    with LLM(model, "cpu", 96 * MIB, 0, max_running=6) as llm:
        pools = llm.stats()["cache"]["device_bytes"]
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        assert llm.graphs is not None and llm.graphs.stats()["captured"] == [1, 2, 4, 6]
    held, logits = model.attention_memory(2, 4).device_bytes, 6 * model.vocab_size * 4
    assert rehearsed == [6] and 94 * MIB < pools + held + logits + 6 * MIB <= 96 * MIB


def test_what_torch_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as what a rehearsal has left: it would count as taken, and once more as what graphs will take."""
    free = [100]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(1000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 2000))
    assert memory.automatic_device(torch.device("cuda:0")) == 900


def test_the_workspace_is_large_enough_for_the_rows_of_the_largest_graph(
    rehearsed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is that large it stays so; without graphs it need not be."""
    model = flash_model(tmp_path)
    monkeypatch.setattr(service_module, "captured", lambda *_: None)
    text = model.config.get_text_config()
    few, many = (workspace_bytes_for(text.num_attention_heads, text.num_key_value_heads, 64, n, 1) for n in (6, 400))
    assert few < 4 * MIB < many
    with LLM(model, "cpu", 64 * MIB, 0, max_running=400, cuda_graphs=False):
        assert model.attention_memory(0, 0) == (4 * MIB, 0)
    for rows, has in ((6, 4 * MIB), (400, many), (6, many)):
        with LLM(model, "cpu", 256 * MIB, 0, max_running=rows) as llm:
            pools = llm.stats()["cache"]["device_bytes"]
        assert model.attention_memory(0, 0) == (has, 0)
        held = model.attention_memory(2, len(graphs.bucket_sizes(rows))).device_bytes
        assert 254 * MIB < pools + held + rows * model.vocab_size * 4 + 6 * MIB <= 256 * MIB
    assert rehearsed == [6, 400, 6]


def test_pinned_buffers_count_in_the_host_memory_asked_for(flashinfer: Any, tmp_path: Path) -> None:
    with LLM(flash_model(tmp_path), "cpu", "64MiB", "48MiB") as llm:
        host = llm.stats()["cache"]["host_bytes"]
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        held = llm.stats()["attention"]["pinned_bytes"]
    assert held == 2 * 2 * 8 * MIB and 45 * MIB < host + held <= 48 * MIB


def test_blocks_by_name_and_no_host_tier_are_taken_as_they_are(flashinfer: Any, tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    blocks = dict.fromkeys(model.spec().names, 9)
    with LLM(model, "cpu", blocks, blocks) as llm, LLM(model, "cpu", blocks, 0) as other:
        stats = llm.stats()["cache"], other.stats()["cache"]
    assert stats[0]["host_bytes"] > 0 == stats[1]["host_bytes"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            ("30MiB", 0),
            r"device_memory is 31,457,280 bytes, and what serves the pools \(FlashInfer's .*\) takes 38,\d+,\d+; raise",
        ),
        (
            ("64MiB", 32 * MIB),
            r"host_memory is 33,554,432 bytes, and what serves the pools \(FlashInfer's .*\) takes 35,\d+,\d+; raise",
        ),
    ],
)
def test_memory_that_workspaces_use_up_is_refused(
    sizes: Any, message: str, flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = flash_model(tmp_path)
    monkeypatch.setattr("runner.engine.service.KVCache", lambda *_, **__: pytest.fail("a cache was built"))
    with pytest.raises(MemoryUnavailable, match=message):
        LLM(model, "cpu", *sizes)
    with pytest.raises(ConfigError, match="device_memory must be bytes"):
        LLM(model, "cpu", "lots", 0)


def test_index_arrays_count_in_the_memory_asked_for(rehearsed: list[int], tmp_path: Path) -> None:
    """As large as steps can have them: what every row may see, in each of the steps that are alive at once."""
    model = flash_model(tmp_path)
    spec, asked, none = model.spec(), 128 * MIB, Held(0, 0)
    given: list[Held] = []
    for max_running in (4, 40):
        with LLM(model, "cpu", asked, asked, max_running=max_running, max_batched_tokens=512) as llm:
            stats = llm.stats()["cache"]
            assert llm.graphs is not None
            captured = [b for bucket, _ in llm.graphs._buckets.values() for b in bucket._batches.values()]
        buffers = {id(b._buffers.kv_indices): b._buffers.kv_indices.nbytes for b in captured}
        assert len(buffers) == len(spec.groups), "all sizes share them"
        own = sum(t.nbytes for b in captured for t in (*b._buffers, b.slot_mapping)) - len(captured) // 2 * sum(
            buffers.values()
        )
        slots = 8 * max(512, max_running) * len(spec.groups)
        counted = memory.index_arrays(spec, asked, max_running, 512, model.max_tokens, True)
        assert counted.device_bytes >= 3 * (sum(buffers.values()) + slots) + sum(buffers.values()) + own
        assert counted.pinned_bytes >= 4 * 3 * (sum(buffers.values()) + slots)
        attention = model.attention_memory(2, len(graphs.bucket_sizes(max_running)))
        graph = Held(max_running * model.vocab_size * 4 + 6 * MIB, 0)
        sizes = memory.pool_sizes(asked, asked, memory.total(attention, graph, counted))
        for tier in ("device", "host"):
            assert 0 <= sizes[f"{tier}_bytes"] - stats[f"{tier}_bytes"] < 2 * MIB
        given.append(counted)
    assert given[0] < given[1]
    assert memory.index_arrays(spec, asked, 4, 512, model.max_tokens, False).device_bytes < given[0].device_bytes
    assert memory.pool_sizes("1KiB", {"full": 3}, none) == {"device_bytes": 1024, "host_blocks": {"full": 3}}


def test_requests_that_share_a_long_document_stay_in_graphs(rehearsed: list[int], tmp_path: Path) -> None:
    """Each of them lists the document's pages: together more than the pool has."""
    model = flash_model(tmp_path)
    document = list(range(5, 125)) * 4
    with LLM(model, "cpu", dict.fromkeys(model.spec().names, 60), 0, max_running=8, max_batched_tokens=512) as llm:
        params = SamplingParams(max_tokens=6, temperature=0)
        llm.generate([document], params, use_tqdm=False)
        llm.generate([[*document, i] for i in range(7)], params, use_tqdm=False)
        assert llm.graphs is not None and llm.graphs.stats()["reasons"] == []
        assert llm.graphs.stats()["replayed"] >= 10


def test_blocks_by_name_count_as_they_are_given(tmp_path: Path) -> None:
    spec = HybridModel.load(zoo.build("gemma3", tmp_path)).spec()
    blocks = dict.fromkeys(spec.names, 500)
    few = memory.index_arrays(spec, dict.fromkeys(spec.names, 5), 4, 64, None, False)
    assert memory.index_arrays(spec, blocks, 4, 64, None, False).pinned_bytes > few.pinned_bytes
    in_bytes = 500 * len(spec.groups) * min(group.block_bytes for group in spec.groups)
    assert memory.staging(spec, blocks, verifies=True) == memory.staging(spec, in_bytes, verifies=True)


def test_captured_batches_hold_no_arrays_of_steps_gone_by(rehearsed: list[int], tmp_path: Path) -> None:
    model = flash_model(tmp_path)
    with LLM(model, "cpu", 96 * MIB, 0, max_running=6) as llm:
        llm.generate([[5] * 40, [6] * 9], SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
        assert llm.graphs is not None and llm.graphs.stats()["replayed"] > 0
        bucket, _ = llm.graphs._buckets[2]
        for batch in bucket._batches.values():
            assert not hasattr(batch, "indices") and not hasattr(batch, "_paged") and not hasattr(batch, "_slots")


class HostMemory:
    """Pinned memory as torch and CuPy hand it out: in powers of two, each for requests of its own size, none back."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._free: Counter[int] = Counter()

    def take(self, num_bytes: int) -> int:
        """What to give back."""
        power = 1 << (num_bytes - 1).bit_length()
        if self._free[power]:
            self._free[power] -= 1
        else:
            self.kept_bytes += power
        return power

    def give_back(self, powers: Iterable[int]) -> None:
        self._free.update(powers)


def test_page_lists_that_grow_stay_within_what_is_counted(tmp_path: Path) -> None:
    """From step to step each lists a page more, three of them at a time."""
    spec = HybridModel.load(zoo.build("gemma3", tmp_path)).spec()
    blocks = dict.fromkeys(spec.names, 257)
    host, counted = HostMemory(), memory.index_arrays(spec, blocks, 4, 16, None, False)
    for group in spec.groups:
        alive: deque[int] = deque()
        for pages in range(1, graphs.most_pages(group, 257, 4, None) + 1):
            alive.append(host.take(4 * pages))
            if len(alive) > 2:
                host.give_back([alive.popleft()])
    assert counted.pinned_bytes / 2 < host.kept_bytes <= counted.pinned_bytes


def test_what_transfers_of_any_size_stage_stays_within_what_is_counted(tmp_path: Path) -> None:
    """All blocks of the host tier, whatever the device has: first in many transfers, later in ever fewer."""
    spec = HybridModel.load(zoo.build("gemma3", tmp_path)).spec()
    size = min(group.block_bytes for group in spec.groups)
    host, counted = HostMemory(), memory.staging(spec, 1200 * size, verifies=True)
    for n in sorted({*(2**k + 1 for k in range(10)), 1, 171, 342, 683, 1200}):
        taken = []
        for _ in range(1200 // n):
            taken += [host.take(8 * n), host.take(8 * n)]
        host.give_back(taken)
    assert counted.pinned_bytes / 2 < host.kept_bytes <= counted.pinned_bytes
    largest = max(group.block_bytes for group in spec.groups)
    assert counted.device_bytes == 24 * 1200 + 2 * (6 * 8 * MIB + 2 * largest)
    assert memory.staging(spec, 0, verifies=True) == memory.staging(spec, 1200 * size, verifies=False) == (0, 0)


@pytest.mark.parametrize("limits", [{"max_running": 0}, {"max_running": "many"}, {"max_batched_tokens": -1}])
def test_limits_that_no_scheduler_takes_are_refused_first(limits: Any, flashinfer: Any) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(limits))} must be an integer"):
        LLM("no such model", "cpu", "64MiB", 0, **limits)


def test_captured_sizes_have_workspaces_of_their_own(flashinfer: Any, tmp_path: Path) -> None:
    """Each of 1, 2, 4, 8, ... rows a smaller one, on the device and pinned."""
    model = flash_model(tmp_path)
    none, four = (model.attention_memory(2, n) for n in (0, 4))
    assert four.pinned_bytes - none.pinned_bytes == 2 * 4 * MIB
    assert four.device_bytes - none.device_bytes == 2 * 4 * (MIB + 4 * 32768)
    reference = HybridModel(model.model, attention="reference")
    assert reference.try_attention(model.spec()) == 0 and reference.attention_memory(2, 4) == (0, 0)
    assert SimpleNamespace(**reference.attention_stats()).workspace_bytes == 0


# --- the equivalence kit ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("fails", [False, True], ids=["captured", "capture fails"])
def test_verify_runs_decode_steps_as_the_engine_does(
    fails: bool, flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(device: torch.device) -> Any:
        return (lambda forward: 1 / 0) if fails else CpuGraphs(flashinfer)

    model = flash_model(tmp_path, workspace=16)
    assert graphs.captured(model, None, 4) is None  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "CudaCapture", capture)
    for module in (graphs, kit):
        monkeypatch.setattr(module, "why_eager", lambda model: None)
    scenarios = [s for s in SCENARIOS if s.name in ("host hit", "batch", "resume")]
    report = verify.run(model, tokens=120, prompts=2, new_tokens=8, scenarios=scenarios)
    assert report.ok, [(r.name, r.missing, r.difference, r.violations) for r in report.results]
    used = report.graphs
    if fails:
        assert used["replayed"] == 0 and used["reasons"] == ["capturing failed (ZeroDivisionError: division by zero)"]
        assert show.graphs(report).startswith("Decode steps ran eagerly: capturing failed")
    else:
        assert used["replayed"] > 7 * 2 * 3 and used["eager"] > 0 and used["reasons"] == []
        assert show.graphs(report).endswith(f"{used['eager']:,} steps ran eagerly.")
        gc.collect()
        assert model.backend.workspace_bytes() == model.attention_memory(2, 0).device_bytes, "each cache's are gone"


def test_verify_says_why_decode_steps_are_not_captured(flashinfer: Any, tmp_path: Path) -> None:
    model = flash_model(tmp_path, workspace=16)
    report = verify.run(model, tokens=120, prompts=2, new_tokens=2, scenarios=[])
    assert "on cpu" in show.graphs(report) and report.graphs["replayed"] == 0
    on_cuda = SimpleNamespace(device=torch.device("cuda:0"), backend=object(), attention=Choice("reference", ""))
    assert graphs.why_eager(on_cuda) == "the reference attention cannot be captured"  # type: ignore[arg-type]
    on_cuda.backend = model.backend
    assert graphs.why_eager(on_cuda) is None  # type: ignore[arg-type]
