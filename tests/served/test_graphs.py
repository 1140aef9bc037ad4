"""Captured decode steps: which steps, in which bucket, with what in the buffers; on a CPU, all but the capturing."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample
from families import zoo
from torch import Tensor

from kvtier import ChunkedLocal, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.attention._flashinfer_plan import GRAPH_INT_WORKSPACE_BYTES, INT_WORKSPACE_BYTES
from kvtier.attention.choice import Choice
from kvtier.attention.flashinfer import FlashInfer
from kvtier.machine.errors import AttentionUnavailable
from kvtier.testing import Faults, SimulatedDevice
from runner.engine.loop import Engine
from runner.model import graphs as module
from runner.model.graphs import DecodeGraphs, bucket_for, bucket_sizes, is_decode, most_pages
from runner.model.hybrid import HybridModel
from runner.model.selfcheck import self_check
from runner.sampling.params import SamplingParams

from .conftest import MAX_RUNNING, SHAPES, Serving
from .cpu_graph import CpuGraphs

# --- which steps, and which bucket -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_running", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
    ],
)
def test_buckets(max_running: int, sizes: list[int]) -> None:
    assert bucket_sizes(max_running) == sizes
    for entries in range(1, max_running + 1):
        size = bucket_for(entries, sizes)
        assert size is not None and size >= entries and not any(entries <= s < size for s in sizes)
    assert bucket_for(max_running + 1, sizes) is None


@pytest.mark.parametrize(("tokens", "entries", "decode"), [(0, 0, False), (3, 3, True), (4, 3, False), (1, 1, True)])
def test_decode_steps_have_one_token_an_entry(tokens: int, entries: int, decode: bool) -> None:
    assert is_decode(SimpleNamespace(num_tokens=tokens, rows=[0] * entries)) is decode


# --- real models, FlashInfer's Python, stand-in kernels ---------------------------------------------------------------


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(f"r{i}", rng.integers(3, 140, rng.integers(1, 60)).tolist(), int(rng.integers(2, 12)))
        for i in range(count)
    ]


FAMILIES = ["gemma3", "gemma2", "gpt_oss", "llama4", "mistral", "mimo_v2_flash", "gemma4"]
FAMILIES = [name for name in FAMILIES if name in zoo.ZOO]
ALIKE = {"gemma3", "mistral", "gemma4"}
"""Whose attention is in that of the others: gemma2's windows, mimo_v2_flash's heads of two sizes."""


@pytest.mark.parametrize("name", sample(FAMILIES, [name for name in FAMILIES if name not in ALIKE]))
def test_captured_steps_and_eager_ones_give_the_same_logits(
    name: str, serve: Callable[..., Serving], flashinfer: Any
) -> None:
    """Every step runs eagerly over FlashInfer and over the torch reference, and in a graph where it can."""
    model, cache, scheduler = serve(name)
    reference = HybridModel(model.model, attention="reference")
    reference.temperatures = model.temperatures
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=CpuGraphs(flashinfer))
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 2, 4, 5]
    for request in requests(7):
        scheduler.add(request)
    steps, captured = 0, set()
    while scheduler.has_work():
        step = scheduler.schedule()
        null = [view[0].clone() for g in cache.spec.groups for view in cache.kv(g.name, 0)]
        want = reference.forward(step, cache)
        eager = model.forward(step, cache)
        got = graphs.forward(step)
        limit = 0.02 * float(want.abs().max()) if want.numel() else 0.0
        assert bool(((eager - want).abs() <= limit).all())
        if got is not None:
            assert bool(((got - want).abs() <= limit).all()) and got.shape == want.shape
            captured.add(len(step.request_ids))
        after = [view[0] for g in cache.spec.groups for view in cache.kv(g.name, 0)]
        assert all(torch.equal(a, b) for a, b in zip(null, after, strict=True))
        steps += step.num_tokens > 0
        scheduler.commit(step, want.argmax(-1).numpy())
    assert len(captured) > 1 and graphs.replayed + graphs.eager >= steps
    assert graphs.stats()["reasons"] == []


def test_entries_that_are_not_sampled_have_no_logits(serve: Callable[..., Serving], flashinfer: Any) -> None:
    """One token of a longer prompt looks like a decode, but nothing of it is sampled."""
    model, cache, scheduler = serve("gemma3")
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=CpuGraphs(flashinfer))
    graphs.capture()
    for request in requests(4):
        scheduler.add(request)
    while not (is_decode(step := scheduler.schedule()) and len(step.request_ids) > 2):
        scheduler.commit(step, model.forward(step, cache).argmax(-1).numpy())
    every = graphs.forward(step)
    assert every is not None
    every = every.clone()
    names = ("num_tokens", "rows", "token_ids", "positions", "group")
    for rows in ([1], [0, 2], []):
        part = SimpleNamespace(**{name: getattr(step, name) for name in names}, sample_rows=np.array(rows, np.int32))
        got = graphs.forward(part)
        assert got is not None and torch.equal(got, every[rows])
    scheduler.cancel(step)


def test_captured_sizes_leave_their_logits_in_one_place(serve: Callable[..., Serving], flashinfer: Any) -> None:
    """Each of its own would be gigabytes over a vocabulary of hundreds of thousands."""
    model, cache, _ = serve("gemma3")
    left: list[Tensor] = []

    def capture(forward: Callable[[], Tensor]) -> module.Captured:
        replay, logits = CpuGraphs(flashinfer)(forward)
        left.append(logits)
        return replay, logits

    DecodeGraphs(model, cache, MAX_RUNNING, capture=capture).capture()
    assert [x.shape for x in left] == [(n, model.vocab_size) for n in (5, 4, 2, 1)]
    assert {x.data_ptr() for x in left} == {left[0].data_ptr()} and {x.dtype for x in left} == {torch.float32}


def test_what_captured_steps_will_take_is_found_by_rehearsing_the_largest(
    serve: Callable[..., Serving], flashinfer: Any
) -> None:
    """Its logits for all, and twice what its forward takes: in the graphs' pool, and for the one that warms up next."""
    model, cache, _ = serve("gemma3")
    rehearsed: list[Tensor] = []

    def rehearse(forward: Callable[[], Tensor]) -> int:
        rehearsed.append(forward())
        return 1 << 20

    held = model.backend.pinned_bytes()
    found = module.memory(model, cache.spec, 6, rehearse)
    assert [x.shape for x in rehearsed] == [(6, model.vocab_size)]
    assert found == 6 * model.vocab_size * 4 + (2 << 20)
    gc.collect()
    assert model.backend.pinned_bytes() == held, "the rehearsal's are gone"
    assert module.memory(model, cache.spec, 6, lambda forward: 1 // 0) == 6 * model.vocab_size * 4


def test_logits_without_memory_leave_eager_steps(
    serve: Callable[..., Serving], flashinfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(model: HybridModel, rows: int) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(module, "_logits", none_left)
    serving = serve("gemma3")
    model, cache, _ = serving
    assert module.memory(model, cache.spec, 6, lambda forward: pytest.fail("rehearsed")) == 6 * model.vocab_size * 4
    engine = engine_of(serving, CpuGraphs(flashinfer))
    assert len(answers(engine, 3)) == 3 and engine.graphs is not None
    assert engine.graphs.stats()["reasons"] == ["capturing failed (OutOfMemoryError: no memory)"]


def engine_of(serving: Serving, capture: Any) -> Engine:
    model, cache, scheduler = serving
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=capture)
    graphs.capture()
    return Engine(model, cache, scheduler, graphs)


def answers(engine: Engine, count: int) -> dict[str, list[int]]:
    for request in requests(count):
        engine.add(request, SamplingParams(max_tokens=request.max_new_tokens, temperature=0))
    done: dict[str, list[int]] = {}
    while engine.has_requests():
        done |= {report.request_id: report.token_ids for report in engine.step().finished}
    return done


def test_the_engine_replays_decode_steps(serve: Callable[..., Serving], flashinfer: Any) -> None:
    engine = engine_of(serve("gemma3"), CpuGraphs(flashinfer))
    assert {name: len(ids) for name, ids in answers(engine, 6).items()} == {
        r.request_id: r.max_new_tokens for r in requests(6)
    }
    assert engine.graphs is not None and engine.graphs.replayed > 5 and engine.graphs.eager > 1


def failing(
    flashinfer: Any, fails: set[int], problem: Callable[[int], Exception]
) -> Callable[[Callable[[], Tensor]], module.Captured]:
    """A capture whose calls of these numbers fail."""
    calls: list[int] = []

    def capture(forward: Callable[[], Tensor]) -> module.Captured:
        calls.append(len(calls))
        if calls[-1] in fails:
            raise problem(calls[-1])
        return CpuGraphs(flashinfer)(forward)

    return capture


@pytest.mark.parametrize(
    ("fails", "captured"),
    sample(
        [({0}, [1, 2, 4]), ({0, 1}, []), ({2}, [1, 4, 5]), ({1, 2}, [1, 5]), ({3}, [2, 4, 5])],
        [({0}, [1, 2, 4]), ({0, 1}, []), ({1, 2}, [1, 5])],
    ),
    ids=["largest", "largest two", "one", "two", "smallest"],
)
def test_a_size_that_cannot_be_captured_leaves_the_others(
    fails: set[int], captured: list[int], serve: Callable[..., Serving], flashinfer: Any, caplog: Any
) -> None:
    """Of 5, 4, 2, 1 rows. What fails twice from the start will fail again: each failure costs memory and time."""

    def problem(call: int) -> Exception:
        return RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING):
        engine = engine_of(serve("gemma3"), failing(flashinfer, fails, problem))
        found = answers(engine, 6)
    assert {name: len(ids) for name, ids in found.items()} == {r.request_id: r.max_new_tokens for r in requests(6)}
    assert engine.graphs is not None and engine.graphs.stats()["captured"] == captured
    assert (engine.graphs.replayed > 5) is (captured != [])
    said = [r.getMessage() for r in caplog.records if r.name == "runner.model.graphs"]
    reason = "capturing failed (RuntimeError: operation not permitted when stream is capturing)"
    assert said == [f"decode steps run without CUDA graphs: {reason}"]


def test_sizes_that_lack_memory_leave_the_smaller_ones(serve: Callable[..., Serving], flashinfer: Any) -> None:
    def problem(call: int) -> Exception:
        return torch.OutOfMemoryError(f"{5 - call} GiB")

    engine = engine_of(serve("gemma3"), failing(flashinfer, {0, 1, 2}, problem))
    assert engine.graphs is not None and engine.graphs.stats()["captured"] == [1]
    assert len(answers(engine, 5)) == 5 and engine.graphs.replayed > 0
    assert "steps of more than 1 entries are not captured" in engine.graphs.stats()["reasons"]


@pytest.mark.parametrize("lost", [False, True])
def test_captures_begin_once_all_copies_have_ended(
    lost: bool, serve: Callable[..., Serving], make_cache: Any, flashinfer: Any
) -> None:
    """Stores are under way when decode steps are to be captured; one that never ends leaves them eager."""
    device = SimulatedDevice(0, Faults(lose=1.0) if lost else Faults(max_delay_s=3.0), look_s=0.2)
    model = serve("gemma3")[0]
    cache = make_cache(model.spec(block_tokens=8), 60, 60, copy_engine=device.engine, store="eager")
    scheduler = Scheduler(cache, max_batched_tokens=40, max_running=MAX_RUNNING)
    for request in requests(3):
        scheduler.add(request)
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.commit(step, np.full(len(step.sample_rows), 5))
    assert device.under_way()

    def capture(forward: Callable[[], Tensor]) -> module.Captured:
        assert not device.under_way()
        return CpuGraphs(flashinfer)(forward)

    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=capture)
    graphs.capture()
    assert graphs.stats()["captured"] == ([] if lost else [1, 2, 4, 5])
    assert graphs.stats()["reasons"] == ["copies were under way that did not end"] * lost
    cache.close()


def test_a_workspace_that_is_too_small_is_told_as_that(
    serve: Callable[..., Serving], flashinfer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflows(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "Buffer overflow when allocating memory for batch_prefill_tmp_v with size 143523840 and alignment 16, but "
            "only 134217728 bytes available in AlignedAllocator. Increase the workspace buffer size."
        )

    model, cache, _ = serve("gemma3")
    monkeypatch.setattr("flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan", overflows)
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=CpuGraphs(flashinfer))
    graphs.capture()
    (reason,) = graphs.stats()["reasons"]
    assert reason.startswith("capturing failed (MemoryUnavailable: a workspace of FlashInfer's is too small for group ")
    assert "143523840" in reason and "nvcc" not in reason


def test_steps_that_do_not_fit_run_eagerly_and_that_is_said_once(
    serve: Callable[..., Serving],
    flashinfer: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "most_pages", lambda group, blocks, rows, max_tokens: rows)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(serve("gemma3"), CpuGraphs(flashinfer))
        assert len(answers(engine, 5)) == 5
    said = [r.getMessage() for r in caplog.records if r.name == "runner.model.graphs"]
    assert said == ["decode steps run without CUDA graphs: a step has more pages than its graph has room for"]
    assert engine.graphs is not None and engine.graphs.eager > 5


def test_more_entries_than_were_captured(serve: Callable[..., Serving], flashinfer: Any) -> None:
    model, cache, scheduler = serve("gemma3")
    graphs = DecodeGraphs(model, cache, 1, capture=CpuGraphs(flashinfer))
    graphs.capture()
    engine = Engine(model, cache, scheduler, graphs)
    assert len(answers(engine, 5)) == 5
    assert graphs.stats()["reasons"] == ["steps of more than 1 entries are not captured"]


def test_the_reference_attention_is_not_captured(make_cache: Any, tmp_path: Path) -> None:
    model = HybridModel.load(zoo.build("gemma3", tmp_path))
    graphs = DecodeGraphs(model, make_cache(model.spec(), 8), 4, capture=lambda _: pytest.fail("captured"))
    graphs.capture()
    assert graphs.stats()["reasons"] == ["the reference attention cannot be captured"]


def test_room_for_pages_covers_shared_prefixes() -> None:
    full, window, chunk = (
        GroupSpec("g", attention, 1, 1, 16, block_tokens=4)
        for attention in (FullAttention(), SlidingWindow(10), ChunkedLocal(12))
    )
    assert most_pages(full, 100, 5, None) == 5 * 100, "all rows may see all blocks"
    assert most_pages(full, 100, 5, 120) == 5 * 31
    assert most_pages(window, 100, 5, None) == 5 * 5 and most_pages(chunk, 100, 5, 10_000) == 5 * 4
    assert most_pages(full, 3, 5, 120) == 5 * 3


def test_a_family_with_heads_that_flashinfer_cannot_compute_is_refused_at_load(flashinfer: Any, tmp_path: Path) -> None:
    folder = zoo.build("gemma3", tmp_path)
    with pytest.raises(AttentionUnavailable, match="not 16"):
        HybridModel.load(folder, dtype="float16", backend=FlashInfer("cpu", workspace_bytes=1 << 10))


@pytest.mark.parametrize("broken", ["import", "kernels", "other GPU"])
def test_auto_falls_back_where_flashinfer_turns_out_not_to_work(
    broken: str, flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler for its kernels, libraries that it lacks: found when it is tried, before anything is served."""
    reason = "no kernel image is available" if broken == "other GPU" else "nvcc not found"

    def fails(*_: Any) -> Any:
        raise RuntimeError(reason)

    if broken == "kernels":
        flashinfer.cannot_build = lambda compiled: True
    elif broken == "other GPU":
        from attention.flashinfer_standin import Module

        monkeypatch.setattr(Module, "paged_run", fails)
    else:
        monkeypatch.setattr("kvtier.attention._flashinfer_plan.importlib", SimpleNamespace(import_module=fails))
    folder = zoo.build("gemma3", tmp_path, head_dim=64)
    forgotten: list[torch.device] = []
    monkeypatch.setattr("runner.model.hybrid.forget_last_error", forgotten.append)
    for required in (False, True):
        chosen = Choice("flashinfer", "as if on CUDA", required)
        monkeypatch.setattr("kvtier.attention.choice.choose", lambda *_, chosen=chosen, **options: chosen)
        if required:
            with pytest.raises(AttentionUnavailable, match=reason):
                HybridModel.load(folder, dtype="float16")
        else:
            model = HybridModel.load(folder, dtype="float16")
            assert model.attention.name == "reference" and reason in model.attention.reason
            assert model.attention_stats()["workspace_bytes"] == 0
            assert forgotten == [model.device], "which only matters on a GPU"


def test_what_flashinfer_says_is_not_blamed_on_the_family(
    flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attention.flashinfer_standin import Module

    def fails(*_: Any) -> Any:
        raise RuntimeError("failed with error an illegal memory access was encountered")

    monkeypatch.setattr(Module, "paged_run", fails)
    folder = zoo.build("gemma3", tmp_path, head_dim=64)
    with pytest.raises(AttentionUnavailable, match=r"RuntimeError: failed with error an illegal memory access"):
        HybridModel.load(folder, dtype="float16", backend=FlashInfer("cpu", workspace_bytes=1 << 10))


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4", "deepseek_v3"])
def test_replayed_graphs_give_the_eager_logits(name: str, make_cache: Any, tmp_path: Path) -> None:
    folder = zoo.build(name, tmp_path, **SHAPES.get(name, {"head_dim": 64}))
    model = HybridModel.load(folder, "cuda:0", "bfloat16", attention="flashinfer")
    cache = make_cache(model.spec(block_tokens=8), 60, device="cuda:0")
    scheduler = Scheduler(cache, max_batched_tokens=40, max_running=MAX_RUNNING)
    graphs = DecodeGraphs(model, cache, MAX_RUNNING)
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 2, 4, 5], graphs.stats()["reasons"]
    replayed_like_eager(graphs, model, cache, scheduler, requests(7))
    assert graphs.replayed > 5


def replayed_like_eager(
    graphs: DecodeGraphs, model: HybridModel, cache: KVCache, scheduler: Scheduler, asked: list[Request]
) -> set[int]:
    """Every captured step gives the eager logits; returns how many rows they had."""
    rows = set()
    for request in asked:
        scheduler.add(request)
    while scheduler.has_work():
        step = scheduler.schedule()
        want = model.forward(step, cache)
        got = graphs.forward(step)
        if got is not None:
            assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())
            rows.add(len(got))
        scheduler.commit(step, want.argmax(-1).cpu().numpy())
    return rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_graphs_whose_keys_are_never_split_read_no_index_that_nobody_wrote(
    name: str, make_cache: Any, tmp_path: Path
) -> None:
    """A graph has as many thread blocks as fill the device, whatever the rows: most of them have nothing to do."""
    folder = zoo.build(name, tmp_path, **SHAPES.get(name, {"head_dim": 64}))
    model = HybridModel.load(folder, "cuda:0", "bfloat16", attention="flashinfer", batch_invariant=True)
    cache = make_cache(model.spec(block_tokens=8), 60, device="cuda:0")
    scheduler = Scheduler(cache, max_batched_tokens=40, max_running=MAX_RUNNING)
    graphs = DecodeGraphs(model, cache, MAX_RUNNING)
    leave_dirt("cuda:0")
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 2, 4, 5], graphs.stats()["reasons"]
    asked = [Request(f"r{i}", [7 + i] * (4 + i), 12 if i else 20) for i in range(MAX_RUNNING)]
    assert {1, MAX_RUNNING} <= replayed_like_eager(graphs, model, cache, scheduler, asked)


def leave_dirt(device: str, each: int = 16) -> None:
    """What torch gives out next for wrappers, pinned or not, is full of numbers that are no index."""
    for num_bytes in (INT_WORKSPACE_BYTES, GRAPH_INT_WORKSPACE_BYTES):
        pinned = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu") for _ in range(each)]
        for memory in [*pinned, *(torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(each))]:
            memory.fill_(0x7F)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
def test_a_model_that_waits_for_the_device_is_served_eagerly(make_cache: Any, tmp_path: Path) -> None:
    """And later work is queued where it was before."""
    folder = zoo.build("gemma3", tmp_path, head_dim=64)
    model = HybridModel.load(folder, "cuda:0", "bfloat16", attention="flashinfer")
    cache = make_cache(model.spec(block_tokens=8), 60, device="cuda:0")
    scheduler = Scheduler(cache, max_batched_tokens=40, max_running=MAX_RUNNING)
    graphs, current = DecodeGraphs(model, cache, MAX_RUNNING), torch.cuda.current_stream()
    hook = model.model.register_forward_hook(lambda module, given, output: output.logits[0, 0, 0].item() and None)
    graphs.capture()
    hook.remove()
    assert torch.cuda.current_stream() == current
    assert graphs.stats()["captured"] == []
    assert any("capturing" in reason for reason in graphs.stats()["reasons"])
    assert len(answers(Engine(model, cache, scheduler, graphs), 5)) == 5
    again = DecodeGraphs(model, cache, MAX_RUNNING)
    again.capture()
    assert again.stats()["captured"] == [1, 2, 4, 5], "once the model does not wait any more"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu` on a machine with one")
def test_what_a_failed_launch_has_left_does_not_fail_the_reference(tmp_path: Path) -> None:
    folder = zoo.build("gemma3", tmp_path, head_dim=64)
    model = HybridModel.load(folder, "cuda:0", "bfloat16", attention="reference")
    model.attention, model.backend = Choice("flashinfer", "for what follows"), None
    assert int(torch.cuda.cudart().cudaHostUnregister(1 << 12)), "an error, which CUDA keeps as the last one"
    model.fall_back(AttentionUnavailable("no kernel image is available"))
    self_check(model)
