"""Runs the scenarios: one cache each, one after the other, all compared with the same cold run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier import ConfigError, KVCache
from kvtier.cpu_offload.engines.by_name import engine_factory
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.geometry.dtypes import DTYPE_BYTES
from kvtier.testing import FaultyLink, SimulatedEngine
from runner import needle
from runner.engine.options import check_host_link
from runner.model.graphs import captured, why_eager
from runner.model.hybrid import HybridModel
from runner.model.kv_scales import check_kv_options
from runner.model.tolerance import TOLERANCE
from runner.verify import plan as planning
from runner.verify.cold import Cold, Recording
from runner.verify.compare import Comparing
from runner.verify.plan import Plan
from runner.verify.report import Report, Result, Status
from runner.verify.scenarios import COLD, COLD_AGAIN, SCENARIOS, Evidence, Scenario
from runner.verify.serving import Serving, most_running

Progress = Callable[[str, int, int], None]
"""Called with (scenario that begins, scenarios done, scenarios)."""


def run(
    model: str | Path | HybridModel | None = None,
    device: str = "cpu",
    tokens: int | None = None,
    prompts: int = 3,
    new_tokens: int = planning.NEW_TOKENS,
    dtype: Any = None,
    tolerance: float | None = None,
    scenarios: Sequence[Scenario] = SCENARIOS,
    progress: Progress | None = None,
    kv_cache_dtype: Any = None,
    kv_scales: str | Path | Mapping[Any, Any] | None = None,
    attention: str = "auto",
    exact: bool = False,
) -> Report:
    """Runs the kit on ``model`` (a folder, a hub id, a loaded one; None: the bundled one).

    ``tokens``: of a prompt, at most; None: what the model can take, up to ``plan.TOKENS``. ``tolerance``: relative
    to the largest logit, where bits cannot be demanded; None: by dtype. ``kv_cache_dtype`` and ``kv_scales`` are as
    ``LLM`` takes them. ``exact``: the model is loaded so, and no bit may differ anywhere. Raises ``ConfigError`` and
    what loading a model and building a cache raise.
    """
    begun = time.perf_counter()
    scales = check_kv_options(kv_cache_dtype, kv_scales)
    if exact and tolerance:
        raise ConfigError("exact and a tolerance exclude each other: no bit may differ")
    if isinstance(model, HybridModel):
        hybrid = model
    else:
        if any(scenario.host is not None for scenario in scenarios):
            check_host_link(device, {})
        folder = needle.weights_path() if model is None else model
        hybrid = HybridModel.load(folder, device, dtype, attention=attention, exact=exact)
    spec = hybrid.spec(dtype=kv_cache_dtype, kv_scales=scales)
    hybrid.try_attention(spec)
    dtype, kv_dtype = str(hybrid.dtype).removeprefix("torch."), spec.groups[0].dtype
    if exact or tolerance is None:
        tolerance = 0.0 if exact else TOLERANCE[kv_dtype if DTYPE_BYTES[kv_dtype] == 1 else dtype]
    kit = _Kit(hybrid, planning.make(hybrid, spec, model is None, tokens, prompts, new_tokens), tolerance)
    every = (COLD, COLD_AGAIN, *scenarios)
    results = []
    for i, scenario in enumerate(every):
        if progress is not None:
            progress(scenario.name, i, len(every))
        results.append(kit.run(scenario))
    return Report(
        model="bundled needle model" if model is None else hybrid.name,
        device=str(hybrid.device),
        attention=hybrid.attention_stats(),
        graphs=kit.graphs(),
        dtype=dtype if kv_dtype == dtype else f"{dtype}, K and V in {kv_dtype}",
        prompt_tokens=[len(p) for p in kit.plan.prompts],
        new_tokens=new_tokens,
        chunk_tokens=kit.plan.chunk_tokens,
        block_tokens={g.name: g.block_tokens for g in kit.plan.spec.groups},
        tolerance=kit.tolerance,
        repeats=kit.repeats,
        results=results,
        wall_s=time.perf_counter() - begun,
    )


class _Kit:
    """A model, a plan, and what its cold run gave."""

    def __init__(self, model: HybridModel, plan: Plan, tolerance: float) -> None:
        self.plan = plan
        self.tolerance = tolerance
        self.repeats = True
        self._model = model
        self._lengths = [len(p) for p in plan.prompts]
        self._cold: list[Cold] = []
        self._replayed = self._eager = 0
        self._reasons = {reason} if (reason := why_eager(model)) is not None else set[str]()

    def graphs(self) -> dict[str, Any]:
        """Steps that were replayed from CUDA graphs, steps that ran eagerly beside them, and why if decodes did."""
        return {"replayed": self._replayed, "eager": self._eager, "reasons": sorted(self._reasons)}

    def run(self, scenario: Scenario) -> Result:
        """The cold run, or a scenario compared with it."""
        if scenario is COLD:
            recording = Recording(len(self._lengths))
            result = self._serve(scenario, recording)
            self._cold = recording.finish()
            return replace(result, compared=sum(len(cold.logits) for cold in self._cold))
        result = self._compare(scenario)
        if scenario is COLD_AGAIN and result.status is Status.DIFFERS and self.tolerance > 0:
            self.repeats = False
            result = self._compare(scenario)
        return result

    def _compare(self, scenario: Scenario) -> Result:
        watched = Comparing(self.plan.spec, self._cold, self._lengths, self.tolerance, self.repeats)
        result = self._serve(scenario, watched)
        return replace(
            result,
            status=result.status if watched.first is None else Status.DIFFERS,
            exact=watched.exact,
            compared=watched.compared,
            largest_difference=watched.largest_logits,
            largest_kv_difference=watched.largest_kv,
            other_tokens=watched.other_tokens,
            difference=watched.first,
        )

    def _serve(self, scenario: Scenario, observer: Recording | Comparing) -> Result:
        """Serves a scenario in a cache of its own, and asks whether what it is about has happened."""
        begun = time.perf_counter()
        plan = self.plan
        if scenario.chunk is not None:
            plan = replace(plan, chunk_tokens=scenario.chunk(plan))
        result = Result(
            name=scenario.name,
            about=scenario.about,
            device_blocks=scenario.device(plan),
            host_blocks=None if scenario.host is None else scenario.host(plan),
        )
        try:
            cache, engine = self._build(scenario, result)
        except ConfigError as problem:
            return replace(result, status=Status.NOT_EXERCISED, missing=[f"a cache for it: {problem}"])
        with cache:
            graphs = captured(self._model, cache, most_running(plan))
            serving = Serving(self._model, cache, plan, observer, engine, graphs)
            outcomes = list(scenario.serve(serving))
            serving.settle()
            same_steps = isinstance(observer, Comparing) and observer.same_steps
            evidence = Evidence(plan, outcomes, serving.transfers(), same_steps, serving.forgotten)
            missing = [what for what, holds in scenario.must.items() if not holds(evidence)]
            violations = [f"{v.invariant}: {v.detail}" for v in cache.audit()]
        if graphs is not None:
            self._replayed, self._eager = self._replayed + graphs.replayed, self._eager + graphs.eager
            self._reasons |= set(graphs.stats()["reasons"])
        violations += [f"not kept: {what}" for what, holds in scenario.keeps.items() if not holds(evidence)]
        violations += [
            f"prompt {o.prompt} ended by {o.finish_reason!r}" for o in outcomes if o.finish_reason != "length"
        ]
        violations += engine.missing_edges if engine is not None else []
        return replace(
            result,
            status=Status.UNSOUND if violations else Status.NOT_EXERCISED if missing else Status.EQUAL,
            missing=missing,
            violations=violations,
            outcomes=outcomes,
            transfers=evidence.transfers,
            wall_s=time.perf_counter() - begun,
        )

    def _build(self, scenario: Scenario, sizes: Result) -> tuple[KVCache, SimulatedEngine | None]:
        """The scenario's cache, and its copy engine if that is a simulated one."""
        options, device, faults = dict(scenario.options), str(self._model.device), scenario.faults
        made: list[SimulatedEngine] = []

        def simulated(memory: TierMemory) -> SimulatedEngine:
            made.append(SimulatedEngine(memory, seed=0, faults=faults))
            return made[-1]

        if faults is not None:
            own = engine_factory(None, device, True)
            options["copy_engine"] = simulated if self._simulates() else FaultyLink(own, faults)
        cache = KVCache(
            self.plan.spec,
            device=device,
            device_blocks=sizes.device_blocks,
            host_blocks=sizes.host_blocks,
            model_id=self._model.name,
            **options,
        )
        if faults is not None:
            cache.core.coordinator.connector.news.logs = False  # copies fail because they are told to
        return cache, made[0] if made else None

    def _simulates(self) -> bool:
        """Whether copies of the model's device can be simulated: the simulated engine moves bytes on a CPU only."""
        return self._model.device.type == "cpu"
