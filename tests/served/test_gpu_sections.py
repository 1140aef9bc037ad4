"""The parts of ``make gpu`` that serve models, on a CPU: tiny models, a played link, FlashInfer over stand-in kernels.

What is not rehearsed: CUDA's events, the capture of its graphs, and what the GPU says of itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from breadth import breadth, sample, sized
from core.fake_cuda import FakeCuda, FakeSums
from families import zoo
from patience import FOREVER_S

from benchmarks.gpu import decode, interference, latents, layouts, link, main_job, serving, ttft
from benchmarks.gpu.chip import peak_flops
from benchmarks.gpu.clock import HostClock
from benchmarks.gpu.figures import Budget, Figure
from benchmarks.gpu.interference import DEPTH, Traffic
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.serving import Stage
from kvtier import FullAttention, GroupSpec
from kvtier.attention.choice import Choice
from kvtier.attention.flashinfer import FlashInfer
from kvtier.cpu_offload.engines.cuda import link as cuda_link
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration
from kvtier.cpu_offload.transfer import Direction
from runner import cli
from runner.engine.loop import Engine
from runner.model.hybrid import HybridModel

from .cpu_graph import CpuGraphs

STORE, LOAD = Direction.STORE, Direction.LOAD
TINY = {
    "gpt-oss-20b": lambda: zoo.config("gpt_oss", head_dim=64),
    "Gemma-3-12B": lambda: zoo.config("gemma3", head_dim=64),
    "Llama-3.1-8B": lambda: zoo.config("llama"),
}
TOKENS, CHUNK = 320, 64
SIZE = decode.Size(running=3, context=40, steps=2, settle=2)
PLENTY = 1 << 50


def no_graphs() -> Any:
    return lambda forward: pytest.fail("the reference attention is not captured")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A CPU, with the link of a played GPU."""
    cuda = FakeCuda()
    setup = link.Setup(
        cuda,
        "cpu",
        lambda: FakeSums(cuda),
        raw_bytes=1 << 16,
        tokens=TOKENS,
        repeats=2,
        on_device=lambda arena: cuda.device_ranges.append((arena.address, arena.num_bytes)),
    )
    monkeypatch.setattr(cuda_link, "MEASURED", 0)
    monkeypatch.setattr(interference, "BLOCKS", 20)
    yield Stage(setup, HostClock(), no_graphs, "NVIDIA H200", lambda: PLENTY, TINY, torch.float32, chunk=CHUNK)
    assert cuda.problems == []
    assert cuda.registered == {}
    assert cuda.streams == {}


@pytest.fixture
def flash_stage(stage: Stage, flashinfer: Any) -> Stage:
    """The same over FlashInfer's own Python, with stand-in kernels and graphs."""
    return replace(
        stage,
        capture=lambda: CpuGraphs(flashinfer),
        dtype=torch.float16,
        backend=lambda: FlashInfer("cpu", workspace_bytes=1 << 10, check_indices=True),
    )


def named(figures: Iterable[Figure]) -> dict[str, Figure]:
    return {f"{f.section}: {f.name}": f for f in figures}


# --- latents ---------------------------------------------------------------------------------------------------------


def test_latents_are_attended_to_by_both_backends(flash_stage: Stage, flashinfer: Any) -> None:
    size = latents.Size(heads=4, layers=2, rows=3, context=40, chunks=2)
    found = named(latents.run(Budget(FOREVER_S), replace(flash_stage, needs=""), size))
    apart = [f for name, f in found.items() if "off the reference" in name]
    assert len(apart) == 2 and all(f.ok and 0 <= f.value < latents.MOST_OFF for f in apart)
    assert sum(f.unit == "us a layer" for f in found.values()) == 4 and flashinfer.latents.launches
    assert latents.off(torch.full((3,), torch.nan), torch.ones(3)) == float("inf")


def test_without_kernels_for_latents_it_says_so(stage: Stage) -> None:
    [figure] = latents.run(Budget(FOREVER_S), replace(stage, needs="flashinfer"))
    assert figure.ok is False and "device is cpu" in figure.note


# --- time to first token ---------------------------------------------------------------------------------------------


def test_time_to_first_token_and_the_mark_that_follows_from_the_link(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttft, "load_peak", lambda setup: 1e-3)
    monkeypatch.setattr(ttft, "MODELS", ttft.MODELS[: sized(1, 3)])
    found = named(ttft.run(Budget(FOREVER_S), stage))
    for model in ttft.MODELS:
        cold, share, device, host, ratio = (f for name, f in found.items() if model in name)
        assert cold.name == f"{model}, 320 tokens computed"
        assert "reference attention" in cold.note and "PFLOP" in cold.note
        assert cold.value > 0 and device.value > 0 and 0 < share.value < 1
        groups = serving.spec_of(stage, model).groups
        live = [20 - g.attention.first_visible(TOKENS) // g.block_tokens for g in groups]
        num_bytes = sum(n * g.block_bytes for n, g in zip(live, groups, strict=True))
        assert host.at_most == pytest.approx(1e3 * num_bytes / (0.97 * 1e-3 * 1e9) + device.value + 3.0)
        assert ratio.value == pytest.approx(cold.value / host.value)
        assert ratio.at_least is None and ratio.note.startswith("no mark")


def test_long_prompts_are_left_to_the_backend_that_can_run_them_in_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttft, "MODELS", ("gpt-oss-20b",))
    [figure] = ttft.run(Budget(FOREVER_S), replace(stage, needs="flashinfer"))
    assert figure.name == "gpt-oss-20b: not run" and figure.ok is False
    assert figure.note == "FlashInfer runs on CUDA and the device is cpu; use device='cuda:0' where there is a GPU"


def test_the_tail_of_a_cached_prompt_runs_as_a_captured_step(flash_stage: Stage) -> None:
    with serving.served(flash_stage, "gpt-oss-20b", *_room(flash_stage), max_running=2) as subject:
        assert subject.note == "flashinfer attention"
        assert len(subject.kept.replays) == 2
        graphs = subject.llm.graphs
        assert graphs is not None
        before = graphs.replayed
        list(ttft.one(flash_stage, "gpt-oss-20b", subject, 1.0))
        assert graphs.replayed - before == 1 + 2 * flash_stage.link.repeats


def _room(stage: Stage) -> tuple[dict[str, int], dict[str, int]]:
    return ttft._blocks(stage, serving.spec_of(stage, "gpt-oss-20b"))


@pytest.mark.parametrize(
    ("share", "hybrid", "at_least"),
    [(40.0, True, 30.0), (39.9, True, None), (None, True, None), (60.0, False, None)],
)
def test_the_mark_on_the_ratio_holds_where_computing_is_a_fair_rival(
    share: float | None, hybrid: bool, at_least: float | None
) -> None:
    assert ttft.ratio("m", 29.0, share, hybrid).at_least == at_least
    assert ttft.ratio("m", 29.0, share, hybrid).ok is (None if at_least is None else False)


@breadth
def test_a_chip_that_is_not_known_is_said_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "MODELS", ("gpt-oss-20b",))
    found = named(ttft.run(Budget(FOREVER_S), replace(stage, chip="Sparkler 3000")))
    share = found["ttft: gpt-oss-20b, computing, of the dense peak"]
    assert share.note == "the dense peak of 'Sparkler 3000' is not known here"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA GH200 480GB", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756)],
)
def test_chips(name: str, tflops: int) -> None:
    assert peak_flops(name) == tflops * 1e12


@breadth
def test_what_does_not_fit_is_said_and_a_model_leaves_nothing_behind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, made, alive = iter([1000, PLENTY, PLENTY]), [], []

    def make(*args: Any, **options: Any) -> HybridModel:
        model = HybridModel(*args, **options)
        made.append(weakref.ref(model))
        return model

    def free_bytes() -> int:
        alive.append([ref() is not None for ref in made])
        return next(free)

    monkeypatch.setattr(serving, "HybridModel", make)
    found = named(ttft.run(Budget(FOREVER_S), replace(stage, free_bytes=free_bytes)))
    assert "does not fit" in found["ttft: gpt-oss-20b: not run"].note
    assert found["ttft: gpt-oss-20b: not run"].ok is False
    assert "ttft: Llama-3.1-8B, loaded against computed" in found
    assert alive == [[], [], [False]]


def test_without_time_nothing_is_built(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "served", lambda *_, **__: pytest.fail("built"))
    assert [f.ok for f in ttft.run(Budget(5.0), stage)] == [False] * 3


@breadth
def test_a_prompt_that_was_not_where_it_should_be_gives_no_figure(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next model is measured all the same, with nothing of this one held."""
    forgets, forget, made = iter([False]), ttft.forget, []

    def make(*args: Any, **options: Any) -> HybridModel:
        model = HybridModel(*args, **options)
        assert not [ref for ref in made if ref() is not None]
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(serving, "HybridModel", make)
    monkeypatch.setattr(ttft, "forget", lambda llm: next(forgets, True) and forget(llm))
    found = named(ttft.run(Budget(FOREVER_S), stage))
    assert "'host 0' found {'device': 320" in found["ttft: gpt-oss-20b: broke"].note
    assert "ttft: gpt-oss-20b, loaded against computed" not in found
    assert "ttft: Gemma-3-12B, loaded against computed" in found and len(made) == 3


@breadth
def test_kernels_that_cannot_be_had_leave_the_reference_attention_and_the_reason(
    flash_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attention.flashinfer_standin import Module, fail_to_build

    monkeypatch.setattr(Module, "__init__", lambda *_: fail_to_build("nvcc not found"))
    monkeypatch.setattr("kvtier.attention.choice.choose", lambda *_: Choice("flashinfer", "as if on CUDA"))
    monkeypatch.setattr(ttft, "MODELS", ("gpt-oss-20b",))
    found = named(ttft.run(Budget(FOREVER_S), replace(flash_stage, backend=lambda: None)))
    cold = found["ttft: gpt-oss-20b, 320 tokens computed"]
    assert "reference attention" in cold.note and "nvcc not found" in cold.note


# --- decode ----------------------------------------------------------------------------------------------------------


def test_decode_steps_in_graphs_beside_copies_and_over_other_pages(flash_stage: Stage) -> None:
    found = named(decode.run(Budget(FOREVER_S), flash_stage, SIZE))
    step = found["decode: gpt-oss-20b, 3 requests of 40 tokens, a step"]
    alone, idle = (
        found[f"decode: {name}"] for name in ("the graph of a step, replayed alone", "of a step, the GPU idles")
    )
    assert found["decode: steps run as captured graphs"].ok
    assert step.note.endswith("flashinfer attention")
    assert idle.value == pytest.approx(100 * (1 - alone.value / step.value)) and idle.at_most == 5.0
    host = found["decode: of a step, the host works"]
    assert all(f"{part} " in host.note for part in ("schedule", "refill", "forward", "commit"))
    assert 0 < host.value <= 100
    assert found["decode: arrays and plans of 2 groups, a step"].value > 0
    marks = {name: f.at_most for name, f in found.items() if name.startswith("interference")}
    assert marks == {
        "interference: decode throughput lost beside loads": 2.0,
        "interference: decode throughput lost beside stores": 2.0,
        "interference: decode throughput lost beside loads and stores": 4.0,
    }
    for what in ("chunk of 64 up to 256 tokens", "decode of 3 x 80 tokens"):
        strided, contiguous = (
            found[f"layouts: gpt-oss-20b {what}, pages {name}"].value for name in ("block-major", "per layer")
        )
        longer = found[f"layouts: gpt-oss-20b {what}, block-major takes"].value
        assert longer == pytest.approx(100 * (strided / contiguous - 1))


@breadth
def test_steps_that_are_not_captured_miss_their_mark(stage: Stage) -> None:
    found = named(decode.run(Budget(FOREVER_S), stage, SIZE))
    assert found["decode: steps run as captured graphs"].ok is False
    assert "cannot be captured" in found["decode: steps run as captured graphs"].note
    assert "decode: of a step, the GPU idles" not in found


@breadth
def test_a_smaller_step_that_is_captured_is_not_timed_for_the_whole_one(flash_stage: Stage) -> None:
    calls: list[int] = []

    def capture() -> Any:
        take = flash_stage.capture()

        def take_all_but_the_first(forward: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return take(forward)

        return take_all_but_the_first

    found = named(decode.run(Budget(FOREVER_S), replace(flash_stage, capture=capture), SIZE))
    assert len(calls) > 1
    assert found["decode: steps run as captured graphs"].ok is False
    assert "decode: of a step, the GPU idles" not in found


@breadth
def test_decode_says_what_does_not_fit(stage: Stage) -> None:
    [figure] = decode.run(Budget(FOREVER_S), replace(stage, free_bytes=lambda: 10), SIZE)
    assert figure.ok is False and "does not fit" in figure.note


def test_attention_is_timed_as_the_model_runs_it(flash_stage: Stage) -> None:
    """With its sinks, which take a kernel of their own."""
    blocks = decode._blocks(serving.spec_of(flash_stage, decode.MODEL), CHUNK, SIZE)
    with serving.served(flash_stage, decode.MODEL, *blocks, max_running=3) as subject:
        options = layouts.Attend(flash_stage, subject, 4, subject.spec.group("full"))._options
    assert set(options) == {"scale", "sinks"} and options["sinks"].shape == (4,)


def test_the_host_waits_from_a_launched_forward_to_the_commit() -> None:
    spans = decode.Spans.__new__(decode.Spans)
    spans._found = [
        ("schedule", 0.0, 1.0),
        ("refill", 1.2, 1.4),
        ("forward", 1.0, 2.0),
        ("commit", 5.0, 6.0),
        ("schedule", 6.0, 7.0),
        ("forward", 7.0, 7.5),
        ("forward", 7.5, 8.0),
        ("commit", 9.0, 9.5),
    ]
    assert spans.waiting_s() == pytest.approx(3.0 + 1.0)
    assert spans.spent() == pytest.approx({"schedule": 2.0, "refill": 0.2, "forward": 2.0, "commit": 1.5})


# --- interference ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rig(stage: Stage) -> Iterator[Rig]:
    setup = stage.link
    pinned = HostMemory(1 << 16, Registration(setup.api.host_register, setup.api.host_unregister))
    made = Rig(GroupSpec("full", FullAttention(), 1, 1, 8), 40, pinned, setup.api, "cpu")
    setup.on_device(made.device)
    yield made
    made.close()
    pinned.release()


@pytest.mark.parametrize("directions", [(LOAD,), (STORE,), (LOAD, STORE), ()])
def test_traffic_is_always_under_way_in_its_directions(rig: Rig, directions: tuple[Direction, ...]) -> None:
    traffic = Traffic(rig, directions)
    for _ in range(5):
        traffic.top_up()
        under_way = list(traffic._under_way.values())
        assert {d: under_way.count(d) for d in directions} == dict.fromkeys(directions, DEPTH)
    traffic.drain()
    transfers = rig.runtime.counts["transfers"]
    assert transfers >= DEPTH * len(directions)
    assert traffic.moved_bytes == transfers * 20 * rig.block_bytes


def test_traffic_that_fails_is_no_figure(rig: Rig, stage: Stage) -> None:
    stage.link.api.refuse = lambda *copy: 999
    traffic = Traffic(rig, (LOAD,))
    traffic._ids = {LOAD: tuple(ids[:1] for ids in traffic._ids[LOAD])}
    with pytest.raises(RuntimeError, match="999"):
        traffic.top_up()
        traffic.drain()
    stage.link.api.refuse = lambda *copy: 0
    while rig.engine.wait(0.1):
        rig.engine.poll()


@pytest.mark.parametrize(("slow", "directions", "ok"), [(1.01, 1, True), (1.03, 1, False), (1.03, 2, True)])
def test_lost_throughput(rig: Rig, monkeypatch: pytest.MonkeyPatch, slow: float, directions: int, ok: bool) -> None:
    rounds = []

    def played(llm: Any, traffic: Traffic, steps: int) -> tuple[float, int]:
        busy = bool(traffic._ids)
        rounds.append(busy)
        return (slow, 10**9) if busy else (1.0, 0)

    monkeypatch.setattr(interference, "_round", played)
    figure = interference._lost(None, rig, "copies", (LOAD, STORE)[:directions], 7, 2.0)
    assert figure.ok is ok and figure.value == pytest.approx(100 * (1 - 1 / slow))
    assert rounds == [False, True, True, False] * 2
    assert figure.note == f"{1 / slow:.1f} GB/s meanwhile, {50 / slow:.0f} % of the link's own peak"


@breadth
def test_a_measurement_has_tokens_for_all_its_steps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that ended half way would make the rest of the steps look fast."""
    running = []
    inner = Engine.step

    def watched(engine: Engine) -> Any:
        out = inner(engine)
        running.append(len(engine._live))
        return out

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(layouts, "run", lambda *_: iter(()))
    list(decode.run(Budget(FOREVER_S), stage, SIZE))
    first = running.index(3)
    assert set(running[first:]) == {3}
    assert len(running) - first >= 2 + 2 + interference.steps(2)


# --- the main job ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("really", sample([True, False], [False]))
def test_the_main_job_and_its_figures(
    really: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the dtype that a GPU runs it in; a CPU has no FlashInfer, and the figure says so.

    In a process of its own, or in this one: to import all that it needs takes longer than the job.
    """

    def run(command: list[str], **_: Any) -> CompletedProcess[str]:
        assert command[1:3] == ["-m", "runner.cli"]
        status = cli.main(command[3:])
        return CompletedProcess(command, status, *capsys.readouterr())

    if not really:
        monkeypatch.setattr(main_job.subprocess, "run", run)
    found = named(main_job.run(Budget(FOREVER_S), ("--tokens", "400", "--dtype", main_job.DTYPE)))
    answered = found["main job: 3 requests of 400 tokens, answered rightly and equally"]
    assert answered.ok
    why = f"bundled needle model in {main_job.DTYPE}, reference attention (FlashInfer runs on CUDA and the device is"
    assert answered.note.startswith(why)
    again = found["main job: request 3, S0, first token"]
    assert again.note.endswith(" host, 16 computed") and not again.note.startswith("0 device, 0 host")


@pytest.mark.parametrize("really", sample([True, False], [False]))
def test_a_main_job_that_cannot_start_says_why(really: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, and with its last words played."""
    if not really:
        ended = CompletedProcess([], 2, "", "usage\nkvtier demo: prompts of 3 tokens are too short\n")
        monkeypatch.setattr(main_job.subprocess, "run", lambda *_, **__: ended)
    [figure] = main_job.run(Budget(FOREVER_S), ("--tokens", "3"))
    assert figure.ok is False and "status 2" in figure.note and "too short" in figure.note


def test_a_main_job_that_takes_too_long_is_ended() -> None:
    [figure] = main_job.run(Budget(0.0), ("--tokens", "400"))
    assert figure.ok is False and figure.note == "ended after 1 s"


def test_a_wrong_answer_misses_its_mark() -> None:
    request = {"prompt": "S0", "tokens": 9, "ttft_s": 1.0} | dict.fromkeys(
        ("device_tokens", "host_tokens", "computed_tokens"), 3
    )
    report = {
        "model": "m",
        "dtype": "float16",
        "ok": False,
        "wall_s": 1.0,
        "load_s": 1.0,
        "requests": [request],
        "violations": ["I1: lost"],
        "stats": {"attention": {"backend": "reference", "reason": "asked for"}},
    }
    marks = [f for f in main_job.figures(report) if f.ok is not None]
    assert [f.ok for f in marks] == [False, False]
