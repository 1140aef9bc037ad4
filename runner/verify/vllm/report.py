"""What the kit found inside vLLM, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from runner.verify.report import Status
from runner.verify.vllm.compare import Comparing, Difference
from runner.verify.vllm.plan import Plan
from runner.verify.vllm.served import Answer, Counts, Facts, Happened

_NAMES = ("device", "host", "offered", "preemptions", "computed", "resumed_device", "resumed_host")


@dataclass(frozen=True)
class Result:
    """One scenario. ``counts``: of the servings that it is about."""

    name: str
    status: Status
    has_connector: bool
    counts: Counts
    recomputed: int | None
    """Tokens that went through the model though they had been found or computed before: preempted requests'."""
    compared: int
    largest_difference: float
    swapped: int
    """Answers that went on otherwise after a near tie."""
    difference: Difference | None
    missing: list[str]
    violations: list[str]
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return asdict(self) | {"status": self.status.value}


@dataclass
class Report:
    """All scenarios on one model. ``blocks``: of the device pool of the engine with the connector."""

    model: str
    connector: str
    vllm: str
    dtype: str
    block_tokens: int
    blocks: int
    prompt_tokens: list[int]
    new_tokens: int
    crowd: int
    crowd_new_tokens: int
    chunk_tokens: int
    limit: float
    results: list[Result] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Every scenario happened, and none made a difference."""
        return all(result.status is Status.EQUAL for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return vars(self) | {"results": [result.to_dict() for result in self.results], "ok": self.ok}


def report_of(model: str, connector: str, facts: Facts, plan: Plan, limit: float) -> Report:
    """The report of an engine that has served nothing yet."""
    return Report(
        model=model,
        connector=connector,
        vllm=facts.version,
        dtype=facts.dtype,
        block_tokens=facts.block_tokens,
        blocks=facts.blocks,
        prompt_tokens=[len(p) for p in plan.prompts.values()],
        new_tokens=plan.new_tokens,
        crowd=len(plan.crowd),
        crowd_new_tokens=plan.crowd_new_tokens,
        chunk_tokens=plan.chunk_tokens,
        limit=limit,
    )


def result_of(happened: Happened, reference: dict[str, Answer], dtype: str, limit: float) -> Result:
    """A scenario that has ended, compared with the reference."""
    comparing = Comparing(reference, dtype, limit)
    for served in happened.served:
        for answer in served.answers:
            comparing.add(answer)
    about = [s for s in happened.served if s.about]
    recomputed = [s.recomputed for s in about if s.recomputed is not None]
    return Result(
        name=happened.name,
        status=_status(comparing, happened),
        has_connector=happened.has_connector,
        counts=_sum([s.counts for s in about]),
        recomputed=sum(recomputed) if len(recomputed) == len(about) else None,
        compared=comparing.compared,
        largest_difference=comparing.largest,
        swapped=comparing.swapped,
        difference=comparing.first,
        missing=happened.missing,
        violations=happened.violations,
        wall_s=happened.wall_s,
    )


def _status(comparing: Comparing, happened: Happened) -> Status:
    if comparing.first is not None:
        return Status.DIFFERS
    if happened.violations:
        return Status.UNSOUND
    return Status.NOT_EXERCISED if happened.missing or not comparing.compared else Status.EQUAL


def _sum(counts: list[Counts]) -> Counts:
    columns = [[getattr(c, name) for c in counts] for name in _NAMES]
    return Counts(*(None if None in column else sum(column) for column in columns))  # type: ignore[arg-type]
