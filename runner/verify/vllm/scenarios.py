"""Scenarios for an engine with a connector, as data: what is served, and what must have happened.

Every claim is read from vLLM's own counts, so it holds for any connector. None passes without having happened: vLLM has
said where the tokens came from, and that it has computed only the rest.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from runner.verify.vllm.plan import Plan
from runner.verify.vllm.served import Engine, Happened, Served

RAISED = "the engine raised"
"""The violation of an engine that serves no more begins so."""
_RESET_S = 10.0
"""A reset is tried so long: copies may still hold blocks."""
_SETTLE_S = 0.5
"""Stores that end late do so in this time, or while other content is served."""


class Serving:
    """One engine, and how much of it a prompt takes."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self.plan = plan
        self.engine = engine
        self.has_reset = False
        self._peak = 1.0  # of one prompt alone: the smallest seen
        self._floods = itertools.count()

    def one(self, name: str, about: bool = True) -> Served:
        """One prompt, alone."""
        served = self.engine.serve({name: self.plan.prompts[name]}, self.plan.new_tokens)
        self._peak = min(self._peak, max(served.peak, 0.01))
        return replace(served, about=about)

    def crowd(self, new_tokens: int) -> Served:
        """All short prompts at once."""
        return self.engine.serve(self.plan.crowd, new_tokens)

    def half(self, name: str) -> None:
        """The first half of a prompt, which the device then has."""
        self.engine.serve({"half": self.plan.half(name)}, 1)

    def flood(self) -> None:
        """Other content takes every block of the device's pool; it comes back only once it has been pushed out."""
        time.sleep(_SETTLE_S)
        needed = math.ceil(1 / self._peak)
        for _ in range(needed):
            number = next(self._floods) % (needed + 1)
            self.engine.serve({"flood": self.plan.flood(number)}, 1)

    def reset(self) -> None:
        """Forgets everything; tried until copies have let go of their blocks."""
        end = time.monotonic() + _RESET_S
        while not (done := self.engine.reset()) and time.monotonic() < end:
            time.sleep(0.1)
        self.has_reset = done


@dataclass(frozen=True)
class Evidence:
    """What is known once a scenario has been served: of the servings that it is about."""

    served: Sequence[Served]
    block_tokens: int
    has_reset: bool


Holds = Callable[[Evidence], bool]


@dataclass(frozen=True)
class Scenario:
    """``serve`` yields the servings that ``must`` (what to call it -> whether it happened) is about.

    ``keeps``: likewise what must not fail if the scenario happened.
    """

    name: str
    serve: Callable[[Serving], Iterator[Served]]
    must: Mapping[str, Holds]
    keeps: Mapping[str, Holds] = field(default_factory=dict)

    def run(self, serving: Serving) -> Happened:
        """Serves it, and asks whether it has happened. What the engine raises is a violation."""
        happened, begun = Happened(self.name), time.monotonic()
        try:
            happened.served = list(self.serve(serving))
        except Exception as problem:  # of any kind: the engine, the connector and their libraries raise what they like
            happened.violations = [f"{RAISED} {type(problem).__name__}: {problem}"]
        else:
            about = [s for s in happened.served if s.about]
            evidence = Evidence(about, serving.engine.facts.block_tokens, serving.has_reset)
            happened.missing = [what for what, holds in self.must.items() if not holds(evidence)]
            happened.missing += [f"{n:,} tokens of hits were used: vLLM computed them" for n in _unused(about)]
            happened.violations = [f"not kept: {what}" for what, holds in self.keeps.items() if not holds(evidence)]
            happened.violations += _wrong_ends(happened.served)
        happened.wall_s = time.monotonic() - begun
        return happened


def _unused(served: Sequence[Served]) -> Iterator[int]:
    """Tokens that were counted as found, but computed: their load failed. A request may begin a step too many."""
    for s in served:
        if not s.counts.preemptions and s.recomputed is not None and s.recomputed > len(s.answers):
            yield s.recomputed


def _wrong_ends(served: Sequence[Served]) -> list[str]:
    answers = [answer for s in served for answer in s.answers]
    return [f"{a.name} ended by {a.finish_reason!r}" for a in answers if a.finish_reason != "length"]


# --- what must have happened --------------------------------------------------------------------------


def _each(holds: Callable[[Served, int], bool]) -> Holds:
    return lambda e: bool(e.served) and all(holds(s, e.block_tokens) for s in e.served)


def _prompt_tokens(s: Served) -> int:
    return sum(answer.prompt_tokens for answer in s.answers)


_nothing_found = _each(lambda s, _: s.counts.device + s.counts.host == 0)
NOTHING_FOUND = {"nothing was found on the device or by the connector": _nothing_found}
FROM_DEVICE = {
    "each prompt was found on the device, but for its end": _each(
        lambda s, block: s.counts.device + 2 * block > _prompt_tokens(s)
    )
}
FROM_HOST = {
    "nothing of a prompt was on the device any more": _each(lambda s, _: s.counts.device == 0),
    "the connector brought at least half of each prompt": _each(lambda s, _: 2 * s.counts.host >= _prompt_tokens(s)),
}
FROM_BOTH = {
    "a part of each prompt was on the device": _each(lambda s, _: s.counts.device > 0),
    "the connector brought a part of each prompt": _each(lambda s, _: s.counts.host > 0),
}
SHARED = {"requests shared steps": _each(lambda s, _: s.together > 1)}
RESUMED = {
    "requests were preempted": _each(lambda s, _: s.counts.preemptions > 0),
    "the connector brought tokens of preempted requests": _each(lambda s, _: (s.counts.resumed_host or 0) > 0),
}


# --- what is served -----------------------------------------------------------------------------------


def _cold(serving: Serving) -> Iterator[Served]:
    for name in serving.plan.prompts:
        yield serving.one(name)


def _twice(serving: Serving) -> Iterator[Served]:
    for name in serving.plan.prompts:
        yield serving.one(name, about=False)
        yield serving.one(name)


def _flooded(serving: Serving) -> Iterator[Served]:
    for name in serving.plan.prompts:
        serving.flood()
        yield serving.one(name)


def _half_flooded(serving: Serving) -> Iterator[Served]:
    for name in serving.plan.prompts:
        serving.flood()
        serving.half(name)
        yield serving.one(name)


def _together(serving: Serving) -> Iterator[Served]:
    yield serving.crowd(serving.plan.new_tokens)


def _crowded(serving: Serving) -> Iterator[Served]:
    yield serving.crowd(serving.plan.crowd_new_tokens)


def _after_reset(serving: Serving) -> Iterator[Served]:
    for name in serving.plan.prompts:
        yield serving.one(name, about=False)
    time.sleep(_SETTLE_S)
    serving.reset()
    for name in serving.plan.prompts:
        yield serving.one(name)


COLD = Scenario("cold", _cold, NOTHING_FOUND)
DEVICE_HIT = Scenario("device hit", _twice, FROM_DEVICE)
BATCH = Scenario("batch", _together, SHARED)
REFERENCE = (replace(DEVICE_HIT, name="bare device hit"), replace(BATCH, name="bare batch"))
"""What rounding alone does: the engine without a connector against its own cold run."""
SCENARIOS = (
    COLD,
    DEVICE_HIT,
    Scenario("host hit", _flooded, FROM_HOST),
    Scenario("mixed hit", _half_flooded, FROM_BOTH),
    BATCH,
    Scenario("preempted", _crowded, RESUMED),
    Scenario(
        "reset",
        _after_reset,
        {"reset_prefix_cache(reset_connector=True) succeeded": lambda e: e.has_reset},
        {"nothing is found after a reset": lambda e: not e.has_reset or _nothing_found(e)},
    ),
)


def reference(engine: Engine, plan: Plan) -> tuple[Happened, float]:
    """The cold answers of an engine without a connector, each prompt alone, and the part of its pool that one takes."""
    cold, begun = Happened("reference", has_connector=False), time.monotonic()
    for prompts, new_tokens in ((plan.prompts, plan.new_tokens), (plan.crowd, plan.crowd_new_tokens)):
        for name, tokens in prompts.items():
            engine.reset()
            cold.served.append(engine.serve({name: tokens}, new_tokens))
    cold.wall_s = time.monotonic() - begun
    return cold, max(s.peak for s in cold.served[: len(plan.prompts)])
