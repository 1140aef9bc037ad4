"""What the kit found, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kvtier.machine.stats import TransferStats
from runner.verify.compare import Difference
from runner.verify.plan import Blocks
from runner.verify.serving import Outcome


class Status(StrEnum):
    """How a scenario went: the worst that applies, in this order."""

    DIFFERS = "differs"
    UNSOUND = "unsound"  # an invariant or a promise is broken, or a request did not end as it should
    NOT_EXERCISED = "not exercised"  # what it is about did not happen
    EQUAL = "equal"


@dataclass(frozen=True)
class Result:
    """One scenario."""

    name: str
    about: str
    device_blocks: Blocks
    host_blocks: Blocks | None
    status: Status = Status.EQUAL
    exact: bool = True
    """Bits were compared; else the tolerance holds."""
    compared: int = 0
    """Generated tokens."""
    largest_difference: float = 0.0
    """The largest difference of any logit."""
    largest_kv_difference: float = 0.0
    other_tokens: int = 0
    """Generated tokens that are not the likeliest any more."""
    difference: Difference | None = None
    missing: list[str] = field(default_factory=list)
    """What should have happened and did not."""
    violations: list[str] = field(default_factory=list)
    outcomes: Sequence[Outcome] = ()
    """The outcomes of the servings that it is about."""
    transfers: TransferStats | None = None
    wall_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        outcomes = [{k: v for k, v in asdict(o).items() if not k.startswith("_")} for o in self.outcomes]
        return asdict(self) | {"status": self.status.value, "outcomes": outcomes}


@dataclass(frozen=True)
class Report:
    """All scenarios on one model."""

    model: str
    device: str
    attention: dict[str, Any]
    """The backend that attended, and why."""
    graphs: dict[str, Any]
    """Steps replayed from CUDA graphs, steps run eagerly beside them, and why decode steps ran eagerly if they did."""
    dtype: str
    prompt_tokens: list[int]
    new_tokens: int
    chunk_tokens: int
    block_tokens: dict[str, int]
    tolerance: float
    repeats: bool
    """The forward pass gives the same bits for the same steps."""
    results: list[Result]
    wall_s: float

    @property
    def ok(self) -> bool:
        """Every scenario happened, and none made a difference."""
        return all(result.status is Status.EQUAL for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return vars(self) | {"results": [result.to_dict() for result in self.results], "ok": self.ok}
