"""Scenarios for cached content, as data: the cache, the served prompts, and the events that must have happened.

To add a scenario, append it to ``SCENARIOS``. Its pools come from the plan, so it happens with any model. Its claims
are read from reports of the cache and the scheduler, so it cannot pass without having happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvtier.machine.stats import TransferStats
from kvtier.testing import Faults
from runner.verify.plan import Blocks, Plan
from runner.verify.serving import Outcome, Serving

_ONE_PIECE = 8_192
"""Prompts up to this many tokens are computed in one step if they are cut otherwise than in the cold run."""
_FAULTS = Faults(fail=0.1, tear=0.1, corrupt=0.1, max_delay_s=20.0)  # so late that blocks are wanted while copied
_ROUNDS = 20
"""Copies fail by chance: after so many rounds at most, all that can happen to one has happened."""
_SALT, _OTHER_SALT = "a salt", "another salt"


@dataclass(frozen=True)
class Evidence:
    """What is known once a scenario has been served."""

    plan: Plan
    outcomes: Sequence[Outcome]
    """The outcomes of the servings that the scenario is about."""
    transfers: TransferStats
    """Transfers of the whole scenario."""
    same_steps: bool
    """Every step computed what one of the cold run's steps did."""
    forgotten: Sequence[Outcome] = ()
    """Each prompt as it was found just before a reset, and the last one once more."""


Holds = Callable[[Evidence], bool]


@dataclass(frozen=True)
class Scenario:
    """``serve`` returns the outcomes that ``must`` (what to call it -> whether it happened) is about.

    ``keeps``: likewise what the cache has promised; it is unsound where that does not hold.
    ``host``: no host tier if None. ``chunk``: tokens a step computes at most; None keeps the plan's.
    """

    name: str
    about: str
    serve: Callable[[Serving], Sequence[Outcome]]
    must: Mapping[str, Holds]
    keeps: Mapping[str, Holds] = field(default_factory=dict)
    device: Callable[[Plan], Blocks] = Plan.roomy
    host: Callable[[Plan], Blocks] | None = None
    chunk: Callable[[Plan], int] | None = None
    faults: Faults | None = None
    """Faults of its copies: simulated copies on a CPU, the device's own copies elsewhere."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the cache."""


# --- what must have happened --------------------------------------------------------------------------


def _every(holds: Callable[[Plan, Outcome], bool]) -> Holds:
    return lambda e: bool(e.outcomes) and all(holds(e.plan, outcome) for outcome in e.outcomes)


def _with_salt(salt: str, holds: Holds) -> Holds:
    return lambda e: holds(replace(e, outcomes=[o for o in e.outcomes if o.salt == salt]))


_nothing_found = _every(lambda _, o: o.device + o.host + o.loaded_blocks == 0)
_all_from_device = _every(lambda plan, o: (o.device, o.host, o.loaded_blocks) == (plan.hit_tokens(o.prompt), 0, 0))
NOTHING_FOUND = {"nothing was found in either tier": _nothing_found}
ALL_FROM_DEVICE = {"each prompt was found on the device, but for its end": _all_from_device}
ALL_FROM_HOST = {
    "every block of each prompt's hit came from the host": _every(
        lambda plan, o: o.loaded_blocks == plan.hit_blocks(o.prompt) and o.host == plan.hit_cover(o.prompt)
    )
}
FROM_BOTH = {
    "each prompt was found, but for its end": _every(lambda plan, o: o.device + o.host == plan.hit_tokens(o.prompt)),
    "of one hit, some blocks came from the host and some were on the device": lambda e: any(
        0 < o.loaded_blocks < max(2, e.plan.hit_blocks(o.prompt)) for o in e.outcomes
    ),
}
"""A hit of states alone is one block, which can only come whole."""


def _started_over(plan: Plan, o: Outcome) -> bool:
    return o.loaded_blocks == 0 and o.recomputed >= plan.interrupt_tokens


PREEMPTED = {"each prompt was preempted twice": _every(lambda _, o: o.preemptions == 2)}


# --- what is served -----------------------------------------------------------------------------------


def _twice(serving: Serving) -> Sequence[Outcome]:
    serving.each()
    return serving.each()


def _after_flood(serving: Serving) -> Sequence[Outcome]:
    serving.each()
    serving.flood()
    return serving.each()


def _each_flooded(serving: Serving) -> Sequence[Outcome]:
    outcomes = []
    for prompt in range(len(serving.plan.prompts)):
        serving.serve(prompt)
        serving.flood()
        outcomes.append(serving.serve(prompt))
    return outcomes


def _under_two_salts(serving: Serving) -> Sequence[Outcome]:
    outcomes = []
    for prompt in range(len(serving.plan.prompts)):
        serving.serve(prompt, _SALT)
        outcomes += [serving.serve(prompt, _OTHER_SALT), serving.serve(prompt, _SALT)]
    return outcomes


def _until_copies_fail(serving: Serving) -> Sequence[Outcome]:
    outcomes = list(serving.each())
    for _ in range(_ROUNDS):
        serving.flood()
        outcomes += serving.each()
        if all(holds(serving.transfers()) for holds in _FAILURES.values()):
            break
    return outcomes


def _around_reset(serving: Serving) -> Sequence[Outcome]:
    serving.each()
    serving.flood()
    last_first = range(len(serving.plan.prompts))[::-1]
    serving.forgotten = serving.each()
    serving.read(last_first[0])
    serving.forgotten.append(serving.serve(last_first[0]))
    serving.reset()
    return [serving.serve(i) for i in last_first]  # the others would push out what the device had


_FAILURES: dict[str, Callable[[TransferStats], bool]] = {
    "stores failed": lambda t: t.failed_stores > 0,
    "loads failed": lambda t: t.failed_loads > 0,
    "checksums found damage": lambda t: t.corrupt_blocks > 0,
    "other loads succeeded": lambda t: t.loaded_blocks > 0,
}


_FORGOTTEN: dict[str, tuple[slice, Mapping[str, Holds]]] = {
    "the host had every block of each prompt's hit": (slice(None, -1), ALL_FROM_HOST),
    "the device had the last prompt": (slice(-1, None), ALL_FROM_DEVICE),
}


def _forgotten(at: slice, holds: Mapping[str, Holds], evidence: Evidence) -> bool:
    before = replace(evidence, outcomes=evidence.forgotten[at])
    return all(claim(before) for claim in holds.values())


def _seen(holds: Callable[[TransferStats], bool], evidence: Evidence) -> bool:
    return holds(evidence.transfers)


def _other_chunk(plan: Plan) -> int:
    return max(2 * plan.chunk_tokens, min(plan.longest, _ONE_PIECE))


# --- the scenarios ------------------------------------------------------------------------------------

COLD = Scenario(
    "cold", "each prompt alone, nothing cached: what all others are compared with", Serving.each, NOTHING_FOUND
)
COLD_AGAIN = Scenario(
    "cold again",
    "the same in a new cache: if this forward pass repeats itself bit by bit, bits are demanded where steps are equal",
    Serving.each,
    NOTHING_FOUND | {"prompts were cut as in the cold run": lambda e: e.same_steps},
)
SCENARIOS = (
    Scenario(
        "other chunks",
        "nothing cached, prompts in larger pieces: what rounding does, and whether a layer loses sight of a chunk",
        Serving.each,
        NOTHING_FOUND | {"prompts were cut otherwise than in the cold run": lambda e: not e.same_steps},
        chunk=_other_chunk,
    ),
    Scenario("device hit", "each prompt again, all of it on the device", _twice, ALL_FROM_DEVICE, device=Plan.ample),
    Scenario(
        "host hit",
        "each prompt again after other content has filled the device, so that all of it comes from the host",
        _after_flood,
        ALL_FROM_HOST,
        device=Plan.tight,
        host=Plan.host,
    ),
    Scenario(
        "mixed hit",
        "each prompt again after other content has taken the place of half of it",
        _each_flooded,
        FROM_BOTH,
        device=Plan.partly,
        host=Plan.host,
    ),
    Scenario(
        "salts",
        "each prompt under another cache_salt, under which nothing may be found, and again under its own",
        _under_two_salts,
        {"each prompt was found under its own salt, but for its end": _with_salt(_SALT, _all_from_device)},
        keeps={"nothing is found under another salt": _with_salt(_OTHER_SALT, _nothing_found)},
        device=Plan.ample,
    ),
    Scenario(
        "batch",
        "all prompts at once, in pools that hold the prompts and a block more: somebody may have to give way",
        Serving.together,
        {"requests shared steps": lambda e: any(o.beside for o in e.outcomes)},
        device=Plan.crowded,
    ),
    Scenario(
        "recompute",
        "others take each running prompt's memory, amid its prompt and amid its answer; it starts over",
        Serving.interrupted,
        PREEMPTED | {"what was lost was computed again, none of it loaded": _every(_started_over)},
        device=Plan.single,
    ),
    Scenario(
        "resume",
        "the same with a host tier, from which each prompt goes on where it was",
        Serving.interrupted,
        PREEMPTED
        | {
            "what was lost came from the host": _every(lambda _, o: o.loaded_blocks > 0),
            "all but the last block of it": _every(lambda plan, o: o.recomputed < 2 * plan.spec.hit_tokens),
        },
        device=Plan.single,
        host=Plan.host,
    ),
    Scenario(
        "bad copies",
        f"a bad link: of the copies {_FAULTS.fail:.0%} fail, {_FAULTS.tear:.0%} tear, {_FAULTS.corrupt:.0%} arrive "
        "damaged, on a CPU also late and out of order",
        _until_copies_fail,
        {what: partial(_seen, holds) for what, holds in _FAILURES.items()},
        device=Plan.tight,
        host=Plan.host,
        faults=_FAULTS,
        options={"verify": "full"},
    ),
    Scenario(
        "lazy stores",
        "as host hit, but blocks are stored only when they are about to be evicted",
        _after_flood,
        ALL_FROM_HOST | {"nothing was lost on the way": lambda e: e.transfers.dropped_blocks == 0},
        device=Plan.tight,
        host=Plan.host,
        options={"store": "lazy"},
    ),
    Scenario(
        "reset",
        "each prompt again after reset(), with both tiers full of it",
        _around_reset,
        {f"before the reset, {what}": partial(_forgotten, at, holds) for what, (at, holds) in _FORGOTTEN.items()},
        keeps={"nothing is found after a reset": _nothing_found},
        device=Plan.tight,
        host=Plan.host,
    ),
)
