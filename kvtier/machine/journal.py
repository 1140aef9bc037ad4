"""What happens to requests and copies, as events: the newest of them, for explanations and traces.

Owns       a ring of the newest events.
Promises   a journal of size 0 keeps nothing and costs one comparison an occasion. No event is made per token.
           Any thread may read while the scheduling thread writes.
Does not   count (``kvtier.machine.stats``), or decide anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sized
from typing import Any, NamedTuple, Protocol, get_args

from kvtier.machine.arguments import whole
from kvtier.machine.errors import ConfigError, InvalidRequest
from kvtier.machine.integers import integer, shown

Blocks = Mapping[str, int]
"""Numbers of blocks by group; groups without any are left out."""


class _Request(Protocol):
    @property
    def tokens(self) -> Sized: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def priority(self) -> int: ...


class Arrived(NamedTuple):
    """The scheduler has queued a request."""

    prompt_tokens: int
    max_new_tokens: int
    priority: int

    @classmethod
    def of(cls, request: _Request) -> Arrived:
        """The arrival of a ``Request``."""
        return cls(len(request.tokens), request.max_new_tokens, request.priority)


class Waits(NamedTuple):
    """A request was looked at, and waits for a new reason."""

    reason: str
    """A value of ``Wait``."""
    why: str
    """The same for people."""
    lacking: Mapping[str, tuple[int, int]]
    """By group, blocks (needed, available), if blocks are short."""
    behind: str
    """The request that computes its prefix, if it waits for one."""


class Gap(NamedTuple):
    """Tokens that a request did not find."""

    start: int
    end: int
    why: str
    """A value of ``Why``."""
    group: str
    """The group that lacked them; "" if none ever had them."""
    ended: str
    """What had ended at ``end``: "prompt", "answer" or "parting"; "" if nothing had."""
    since: int
    """The event before which they were there last, if they were pushed out."""


class Admitted(NamedTuple):
    """A request has got its row and the blocks of its hit."""

    known_tokens: int
    """Its prompt, and the tokens generated before a preemption."""
    hit_tokens: int
    full_tokens: int
    """The hit that the full-attention groups alone would have allowed."""
    limited_by: str
    """The group that kept the hit from being longer; "" if none did."""
    missing_from: int
    """The first token of the block that this group lacked; -1 if none was lacking."""
    sources: tuple[tuple[int, str], ...]
    """The hit's tokens by tier: (end, tier) of each run. The tier is "remote" if a block was fetched for this request,
    "host" if any group had to load one, else "device"."""
    device: Blocks
    """Blocks that the device had."""
    host: Blocks
    """Blocks to load."""
    load_bytes: int
    ticket: int
    """The load's; 0 without one."""
    gaps: tuple[Gap, ...] = ()
    """What is left beyond the hit, from there on; not the last tokens, which are always computed."""


class Runs(NamedTuple):
    """All content of a request's hit is on the device."""


class Prefilled(NamedTuple):
    """All known tokens of a request are computed: its next token is drawn."""

    tokens: int


class SentBack(NamedTuple):
    """A request with a row waits again. If blocks were short, ``group`` lacked the most bytes."""

    why: str
    group: str = ""
    by: str = ""
    """The request that got the blocks or the row; "" if none did."""


class Ended(NamedTuple):
    """A request has ended."""

    reason: str
    generated_tokens: int


class PushedOut(NamedTuple):
    """Cached content was given up for the blocks that the requests ``by`` took, or stored."""

    tier: str
    blocks: Blocks
    by: tuple[str, ...]


class Copied(NamedTuple):
    """A load has ended, or a store has gone wrong."""

    ticket: int
    direction: str
    """"load" or "store"."""
    blocks: Blocks
    num_bytes: int
    seconds: float
    """The time from its submission until its end was seen."""
    error: str
    """"" if all is well."""
    bad_blocks: int
    """Blocks that did not arrive whole."""


Fact = Arrived | Waits | Admitted | Runs | Prefilled | SentBack | Ended | PushedOut | Copied
_FACTS = frozenset(get_args(Fact))


class Event(NamedTuple):
    """One occasion."""

    number: int
    """Events are numbered from 0 on."""
    at_s: float
    """On the clock of ``time.perf_counter``."""
    request_id: str
    """"" if the event belongs to no single request."""
    fact: Fact

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**self._asdict(), "fact": {"what": type(self.fact).__name__, **self.fact._asdict()}}


MOST_EVENTS = 2**24


def num_events(events: object, name: str = "journal_events") -> int:
    """``events`` as a plain int; raises ``ConfigError`` for a number of events that no journal can keep."""
    count = integer(events)
    if count is None or not 0 <= count <= MOST_EVENTS:
        raise ConfigError(f"{name} must be an integer in 0..{MOST_EVENTS:,}, got {shown(events)}")
    return count


class Journal:
    """The newest ``size`` events. Raises ``ConfigError``."""

    def __init__(self, size: int) -> None:
        size = num_events(size, "a journal's size")
        self.is_on = size > 0
        self.unix_s = time.time() - time.perf_counter()
        """What to add to an event's ``at_s`` for seconds since 1970."""
        self._ring: list[Event | None] = [None] * size
        self._count = 0

    @property
    def count(self) -> int:
        """Events so far: the number of the next one."""
        return self._count

    def add(self, request_id: str, fact: Fact) -> None:
        """Notes an event; the oldest one is forgotten. From the scheduling thread, while ``is_on``."""
        if not self.is_on:
            raise InvalidRequest("a journal of size 0 keeps nothing")
        _check(fact)
        number = self._count
        self._ring[number % len(self._ring)] = Event(number, time.perf_counter(), request_id, fact)
        self._count = number + 1

    def tell(self, request_id: str, make: Callable[..., Fact], *facts: Any) -> None:
        """Adds ``make(*facts)``, if the journal is on."""
        if self.is_on:
            self.add(request_id, make(*facts))

    def replace(self, number: int, fact: Fact) -> None:
        """Event ``number``, which is among the newest, tells more."""
        number = whole(number, "number")
        _check(fact)
        event = self._ring[number % len(self._ring)] if self.is_on else None
        if event is not None and event.number == number:
            self._ring[number % len(self._ring)] = event._replace(fact=fact)

    def since(self, number: int = 0) -> list[Event]:
        """The events from ``number`` on that are still there, oldest first; from any thread."""
        size, end = len(self._ring), self._count
        found = ((n, self._ring[n % size]) for n in range(max(whole(number, "number"), end - size), end))
        return [event for n, event in found if event is not None and event.number == n]


def _check(fact: object) -> None:
    if type(fact) not in _FACTS:
        raise InvalidRequest(f"a journal keeps facts such as journal.Runs(), not {shown(fact)}")
