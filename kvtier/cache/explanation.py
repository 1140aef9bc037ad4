"""Why a request took as long as it did: its hits, loads, waits, preemptions and evictions, from a journal.

Promises   every line comes from events. Nothing is guessed, except what recomputing would have cost: the caller says
           how long tokens take.
Does not   keep anything: a request whose events are forgotten is explained as far as they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.machine.arguments import check_type
from kvtier.machine.journal import (
    Admitted,
    Arrived,
    Copied,
    Ended,
    Event,
    Fact,
    Gap,
    Prefilled,
    PushedOut,
    Runs,
    SentBack,
    Waits,
)

ComputeSeconds = Callable[[int, int], float | None]
"""How long it takes to compute the tokens from the first number up to the second, in seconds; None if not known."""


@dataclass
class Load:
    """Blocks that came from the host tier. ``seconds`` is None while they are under way."""

    blocks: Mapping[str, int]
    num_bytes: int
    seconds: float | None = None
    error: str = ""


MOST_TAKERS = 8
"""Requests that are named of those that content was pushed out for."""


@dataclass
class Missed:
    """Tokens that were not found: see ``kvtier.machine.journal.Gap``."""

    start: int
    end: int
    why: str
    """"not_kept": full attention had them, but windows and chunks were not kept at their end. "pushed_out": they were
    there. "parted": no text that is remembered goes on like this."""
    group: str
    ended: str
    pushed_for: list[str] = field(default_factory=list)
    """If they were pushed out: the requests that blocks of this group went to since, the newest first."""
    pushed_s: float | None = None
    """When that happened last, in seconds before the admission; None if nobody remembers."""


@dataclass
class Hit:
    """One admission. Tokens and blocks as in ``kvtier.machine.journal.Admitted``; ``at_s`` counts from the arrival."""

    at_s: float
    known_tokens: int
    tokens: int
    device_tokens: int
    host_tokens: int
    remote_tokens: int
    computed_tokens: int
    """Known tokens that it did not find."""
    full_tokens: int
    limited_by: str
    missing_from: int
    sources: list[tuple[int, int, str]]
    """The known tokens as runs (start, end, source): "device", "host", "remote" or "computed"."""
    load: Load | None
    recompute_s: float | None
    """Time that computing the hit's tokens would have taken; None if nobody knows."""
    runs_s: float = 0.0
    """When it ran, its load landed; from the arrival."""
    missed: list[Missed] = field(default_factory=list)
    prefill_s: float | None = None
    """Seconds from then until its known tokens were computed."""


@dataclass
class Wait:
    """A time without a row. ``seconds`` is None while it lasts."""

    reason: str
    why: str
    at_s: float
    seconds: float | None = None
    behind: str = ""
    lacking: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class GaveWay:
    """A request that had a row and was sent back."""

    at_s: float
    why: str
    group: str
    by: str


@dataclass
class Eviction:
    """Cached blocks that were given up for it, by group; ``beside``: how many requests shared in it."""

    tier: str
    blocks: Mapping[str, int]
    beside: int


@dataclass
class Explanation:
    """What became of one request. Seconds ``at_s`` count from its arrival, or from its first known event."""

    request_id: str
    state: str = "waiting"
    """"waiting", "loading", "running" or "finished"."""
    arrived_unix_s: float = 0.0
    is_whole: bool = False
    """False if its first events are forgotten."""
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    """Known at its end."""
    finish_reason: str | None = None
    seconds: float = 0.0
    """Until its end, or its newest event."""
    queue_s: float | None = None
    """Until it first ran."""
    first_token_s: float | None = None
    """Until its prompt was computed, so that its first token could be drawn."""
    hits: list[Hit] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    preemptions: list[GaveWay] = field(default_factory=list)
    pushed_out: list[Eviction] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON. ``hit``: the first admission."""
        found = asdict(self)
        return {**found, "hit": found["hits"][0] if found["hits"] else None, "lines": self.lines()}

    def lines(self) -> list[str]:
        """The explanation as lines for people."""
        from kvtier.cache.explanation_text import lines

        return lines(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def explain(
    events: Iterable[Event],
    request_id: str,
    compute_s: ComputeSeconds = lambda start, end: None,
    unix_s: float = 0.0,
    name_of: Callable[[str], str] = str,
) -> Explanation | None:
    """Explains a request from a journal's events (``Journal.since``); None if none of them is about it.

    ``unix_s``: ``Journal.unix_s``, to tell its arrival as a time. ``name_of``: how requests are called for the reader.
    If an id was used again, its last request is told. Raises ``InvalidRequest`` for an id that is no text.
    """
    check_type(request_id, str, "request_id")
    return explain_all(events, [request_id], compute_s, unix_s, name_of)[0]


def explain_all(
    events: Iterable[Event],
    request_ids: Sequence[str],
    compute_s: ComputeSeconds,
    unix_s: float,
    name_of: Callable[[str], str],
) -> list[Explanation | None]:
    """Explains several requests, as ``explain`` does one; the events are read once."""
    tellers = {name: _Teller(name, compute_s, name_of) for name in request_ids}
    loads: dict[int, _Teller] = {}
    pushed: list[Event] = []
    for event in events:
        fact = event.fact
        if event.request_id:
            teller = tellers.get(event.request_id)
            if teller is not None:
                teller.about_it(event)
                if isinstance(fact, Admitted):
                    teller.missed(fact, event.at_s, pushed)
                    if fact.ticket:
                        loads[fact.ticket] = teller
        elif isinstance(fact, PushedOut):
            pushed.append(event)
            for name in fact.by:
                if name in tellers:
                    tellers[name].about_all(fact)
        elif isinstance(fact, Copied):
            for teller in [loads[fact.ticket]] if fact.ticket in loads else tellers.values():
                teller.about_all(fact)
    for teller in tellers.values():
        teller.told.request_id = name_of(teller.name)
        teller.told.arrived_unix_s = (teller.start_s or 0.0) + unix_s
    return [tellers[name].told if tellers[name].start_s is not None else None for name in request_ids]


class _Teller:
    def __init__(self, request_id: str, compute_s: ComputeSeconds, name_of: Callable[[str], str]) -> None:
        self.name = request_id
        self.told = Explanation(request_id)
        self._name_of = name_of
        self.start_s: float | None = None
        self._compute_s = compute_s
        self._copied: dict[int, Copied] = {}  # loads that ended before their admission was told
        self._loads: dict[int, Load] = {}  # this request's, under way
        self._wait: Wait | None = None

    def _forget(self) -> None:
        self.told, self.start_s, self._wait = Explanation(self.name), None, None
        self._copied, self._loads = {}, {}

    def about_it(self, event: Event) -> None:
        if isinstance(event.fact, Arrived) and self.start_s is not None:
            self._forget()  # the id is used again
        told = self.told
        if self.start_s is None:
            self.start_s = event.at_s
            self._begin_wait("queue", "it was not looked at yet", 0.0)
        at_s = told.seconds = event.at_s - self.start_s
        self._one(event.fact, at_s)

    def _one(self, fact: Fact, at_s: float) -> None:
        told = self.told
        match fact:
            case Arrived():
                told.prompt_tokens, told.is_whole = fact.prompt_tokens, True
            case Waits():
                self._end_wait(at_s)
                behind = self._name_of(fact.behind) if fact.behind else ""
                why = f"request {behind} computes its prefix" if behind else fact.why
                self._begin_wait(fact.reason, why, at_s, behind, fact.lacking)
            case Admitted():
                self._end_wait(at_s)
                self._admitted(fact, at_s)
            case Runs():
                told.state = "running"
                if told.hits:
                    told.hits[-1].runs_s = at_s
                if told.queue_s is None and told.is_whole:
                    told.queue_s = at_s
            case Prefilled():
                if told.hits:
                    told.hits[-1].prefill_s = at_s - told.hits[-1].runs_s
                if told.first_token_s is None and told.is_whole:
                    told.first_token_s = at_s
            case SentBack():
                told.state = "waiting"
                told.preemptions.append(GaveWay(at_s, fact.why, fact.group, self._name_of(fact.by) if fact.by else ""))
                self._begin_wait("queue", "it was sent back, and was not looked at yet", at_s)
            case Ended():
                self._end_wait(at_s)
                told.state, told.finish_reason, told.generated_tokens = "finished", *fact

    def missed(self, fact: Admitted, at_s: float, pushed: Sequence[Event]) -> None:
        """It was admitted just now, after these events."""
        self.told.hits[-1].missed = [self._missed(gap, at_s, pushed) for gap in fact.gaps]

    def _missed(self, gap: Gap, at_s: float, pushed: Sequence[Event]) -> Missed:
        found = Missed(gap.start, gap.end, gap.why, gap.group, gap.ended)
        if gap.why == "pushed_out":
            names = dict[str, None]()
            for event in reversed(pushed):
                if event.number < gap.since or len(names) >= MOST_TAKERS:
                    break
                fact = event.fact
                if isinstance(fact, PushedOut) and gap.group in fact.blocks:
                    names |= dict.fromkeys(map(self._name_of, fact.by))
                    found.pushed_s = at_s - event.at_s if found.pushed_s is None else found.pushed_s
            found.pushed_for = [*names][:MOST_TAKERS]
        return found

    def about_all(self, fact: Fact) -> None:
        match fact:
            case PushedOut():
                self.told.pushed_out.append(Eviction(fact.tier, fact.blocks, len(fact.by)))
            case Copied(direction="load"):
                load = self._loads.pop(fact.ticket, None)
                if load is None:
                    self._copied[fact.ticket] = fact
                else:
                    load.seconds, load.error = fact.seconds, fact.error

    def _begin_wait(
        self, reason: str, why: str, at_s: float, behind: str = "", lacking: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        self._wait = Wait(reason, why, at_s, None, behind, lacking or {})
        self.told.waits.append(self._wait)

    def _end_wait(self, at_s: float) -> None:
        if self._wait is not None:
            self._wait.seconds = at_s - self._wait.at_s
            self._wait = None

    def _admitted(self, fact: Admitted, at_s: float) -> None:
        load = None
        if fact.ticket:
            load = Load(fact.host, fact.load_bytes)
            ended = self._copied.pop(fact.ticket, None)
            if ended is None:
                self._loads[fact.ticket] = load
            else:
                load.seconds, load.error = ended.seconds, ended.error
        self.told.state = "loading" if load else "running"
        sources = _runs(fact)
        by_tier = dict.fromkeys(("device", "host", "remote", "computed"), 0)
        for start, end, tier in sources:
            by_tier[tier] += end - start
        self.told.hits.append(
            Hit(
                at_s=at_s,
                known_tokens=fact.known_tokens,
                tokens=fact.hit_tokens,
                device_tokens=by_tier["device"],
                host_tokens=by_tier["host"],
                remote_tokens=by_tier["remote"],
                computed_tokens=fact.known_tokens - fact.hit_tokens,
                full_tokens=fact.full_tokens,
                limited_by=fact.limited_by,
                missing_from=fact.missing_from,
                sources=sources,
                load=load,
                recompute_s=self._compute_s(0, fact.hit_tokens) if fact.hit_tokens else None,
            )
        )


def _runs(fact: Admitted) -> list[tuple[int, int, str]]:
    runs, start = [], 0
    for end, tier in (*fact.sources, (fact.known_tokens, "computed")):
        runs.append((start, end, tier))
        start = end
    return runs
