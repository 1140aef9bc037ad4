"""What an engine has served, as plain values: answers, and what vLLM itself has counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Prompts = Mapping[str, list[int]]
"""Token ids by name."""


@dataclass(frozen=True)
class Answer:
    """One request's.

    ``logprobs``: of each generated token, (token id, logprob) of the likeliest, and of the token itself.
    """

    name: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: list[list[tuple[int, float]]]
    finish_reason: str = "length"


@dataclass(frozen=True)
class Counts:
    """What vLLM has counted while it served. ``computed`` and ``resumed_*`` are None if this vLLM does not tell.

    ``device`` and ``host``: prompt tokens that were found in vLLM's own prefix cache, and that the connector brought.
    ``offered``: tokens that the connector has promised to bring, failed loads and all.
    ``computed``: tokens that went through the model. ``preemptions``: of requests.
    ``resumed_device`` and ``resumed_host``: tokens that preempted requests found again.
    """

    device: int = 0
    host: int = 0
    offered: int = 0
    preemptions: int = 0
    computed: int | None = None
    resumed_device: int | None = None
    resumed_host: int | None = None

    def __sub__(self, before: Counts) -> Counts:
        pairs = [(getattr(self, name), getattr(before, name)) for name in asdict(self)]
        return Counts(*(None if now is None else now - (then or 0) for now, then in pairs))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Served:
    """Requests that were served together. ``together``: requests in one step; ``peak``: used part of the pool; both at
    most."""

    answers: Sequence[Answer]
    counts: Counts
    together: int = 1
    peak: float = 0.0
    about: bool = True
    """Whether the scenario is about this serving; else it only prepares that."""

    @property
    def needed(self) -> int:
        """Tokens that go through the model if nothing is found: the last generated one never does."""
        return sum(a.prompt_tokens + len(a.token_ids) - 1 for a in self.answers)

    @property
    def recomputed(self) -> int | None:
        """Tokens that went through the model though they had been found or computed before."""
        c = self.counts
        return None if c.computed is None else max(0, c.computed + c.device + c.host - self.needed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``Served.of`` reads them."""
        return asdict(self)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Served:
        """Made of what ``to_dict`` gave, by way of JSON."""
        answers = [
            Answer(**{**a, "logprobs": [[(int(t), float(p)) for t, p in row] for row in a["logprobs"]]})
            for a in given["answers"]
        ]
        return Served(**{**given, "answers": answers, "counts": Counts(**given["counts"])})


@dataclass(frozen=True)
class Facts:
    """Facts of an engine. ``blocks``: of its device pool. ``has_states``: whether layers keep recurrent states."""

    version: str
    dtype: str
    block_tokens: int
    blocks: int
    has_states: bool = False


class Engine(Protocol):
    """What the scenarios need of an engine."""

    @property
    def facts(self) -> Facts:
        """Facts of the started engine."""

    def serve(self, prompts: Prompts, new_tokens: int) -> Served:
        """All at once, greedily; returns when all have ended."""

    def reset(self) -> bool:
        """Forgets all cached content, the connector's too; False if it cannot."""


@dataclass
class Happened:
    """One scenario, as the engine's process reports it."""

    name: str
    served: list[Served] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What should have happened and did not."""
    violations: list[str] = field(default_factory=list)
    """What must not happen and did."""
    wall_s: float = 0.0
    has_connector: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``Happened.of`` reads them."""
        return asdict(self)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Happened:
        """Made of what ``to_dict`` gave, by way of JSON."""
        return Happened(**{**given, "served": [Served.of(s) for s in given["served"]]})
