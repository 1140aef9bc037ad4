"""The explorer's store: names without bytes, and calls that end when told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import inside
import numpy as np

from kvtier import KVCache
from kvtier.geometry.keys import KeyArray
from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.moves import Move, Seek
from kvtier.remote.objects import Name, ObjectPlan, Objects
from kvtier.remote.tier import RemoteTier

ENDS = {"well": Outcome.OK, "badly": Outcome.FAILED, "gone": Outcome.MISS}


class StepwiseBackend:
    """``objects``: names that it has. Calls under way: what, and their names."""

    kind = "stepwise"

    def __init__(self) -> None:
        self.objects: set[Name] = set()
        self.calls: dict[int, tuple[str, tuple[Name, ...]]] = {}
        self.ended: list[Answer] = []
        self.on_news: Callable[[], None] = lambda: None

    def begin(self, what: str, ticket: int, names: Sequence[Name]) -> None:
        """A call."""
        self.calls[ticket] = what, tuple(names)

    def end(self, ticket: int, how: str) -> None:
        """All objects of the call end in the same way; a question that ends well is answered truly."""
        what, names = self.calls.pop(ticket)
        outcomes = [ENDS[how]] * len(names)
        if how == "well" and what in ("look", "get"):
            outcomes = [Outcome.OK if name in self.objects else Outcome.MISS for name in names]
        if how == "well" and what == "put":
            self.objects |= set(names)
        if how == "well" and what == "delete":
            self.objects -= set(names)
        self.ended.append(Answer(ticket, tuple(outcomes)))
        self.on_news()

    def poll(self) -> list[Answer]:
        ended, self.ended = self.ended, []
        return ended

    def close(self, timeout_s: float) -> bool:
        return True


class NamesOnly:
    """In place of a ``Wire``: there are no bytes."""

    def __init__(self, block_bytes: list[int]) -> None:
        self.block_bytes = np.array(block_bytes, np.int64)

    def look(self, store: StepwiseBackend, ticket: int, names: Sequence[Name], within_s: float) -> None:
        store.begin("look", ticket, names)

    def delete(self, store: StepwiseBackend, ticket: int, names: Sequence[Name], within_s: float) -> None:
        store.begin("delete", ticket, names)

    def put(self, store: StepwiseBackend, move: Move, within_s: float) -> None:
        store.begin("put", move.ticket, move.objects.names)

    def get(self, store: StepwiseBackend, move: Move, absent: Any, within_s: float) -> None:
        store.begin("get", move.ticket, move.objects.names)


class ListedPlan(ObjectPlan):
    """What it plans can be pickled half-way."""

    def parts(self, keys: KeyArray, n: int, most: int = 2**31) -> Iterator[Objects]:
        return iter(list(super().parts(keys, n, most)))


def open_stepwise(cache: KVCache, now: Callable[[], float]) -> StepwiseBackend:
    """Puts a store behind the cache's host tier. Whole texts are objects: so there are few."""
    coordinator, store = cache.core.coordinator, StepwiseBackend()
    wire: Any = NamesOnly([group.block_bytes for group in cache.spec.groups])
    plan, host = ListedPlan(cache.spec, least_bytes=10**6), inside.host(cache)
    assert host is not None
    remote = RemoteTier(store, wire, plan, host, now, deadline_s=50.0)  # type: ignore[arg-type]
    remote.on_end = coordinator.connector.ledger.note_end
    store.on_news = coordinator.connector.wake
    coordinator.door.open(remote)
    return store


# --- its part of a state --------------------------------------------------------------------------


def store_state(
    remote: RemoteTier, store: StepwiseBackend, block_of: Callable[[int, int], int], settled: int
) -> tuple[Any, ...]:
    """All that influences what happens next. Tickets count by their order; ``block_of``: new names of host blocks."""
    rank = _ranks(remote)

    def blocks(groups: np.ndarray, ids: np.ndarray) -> tuple[Any, ...]:
        return tuple((g, block_of(g, b)) for g, b in zip(groups.tolist(), ids.tolist(), strict=True))

    moves = [
        (
            *(rank[m.ticket], m.way.value, m.state.value, m.deadline_s < 0, m.keys.tobytes(), m.of.tobytes()),
            *(tuple(m.objects.names), blocks(m.groups, m.hosts), blocks(*m.pinned)),
        )
        for m in remote.moves()
    ]
    texts = [
        (text.keys.tobytes(), text.end, _names([text.next]), _names(copy.copy(text.parts)))
        for text in inside.texts_to_spill(remote)
    ]
    return (
        tuple(moves),
        tuple(texts),
        tuple(sorted(inside.known_objects(remote))),
        *(tuple(sorted(names)) for names in inside.unsure_objects(remote)),
        tuple(sorted(store.objects)),
        tuple((rank.get(ticket, -1), *call) for ticket, call in sorted(store.calls.items())),
        tuple((rank.get(answer.ticket, -1), tuple(o.value for o in answer.outcomes)) for answer in store.ended),
        tuple(inside.breaker_failures(remote)),
        tuple((rank[ticket], until_s < 0) for ticket, until_s in inside.questions(remote).items()),
        inside.spills_have_seen(remote, settled),
    )


def seek_state(remote: RemoteTier, seek: Seek | None) -> tuple[Any, ...] | None:
    """A request's part."""
    if seek is None:
        return None
    ticket = _ranks(remote).get(seek.ticket, -1)
    bounds = (seek.bound, seek.have, seek.end, seek.here, seek.low, seek.high)
    asked = (tuple(seek.samples), tuple(seek.ends), tuple(seek.sizes), tuple(sorted(seek.lacking)))
    late = (seek.until_s < 0, seek.is_late, seek.is_second)
    return (seek.state.value, ticket, bounds, asked, late, seek.fetched.tobytes())


def _names(parts: Iterable[Objects | None]) -> tuple[Name, ...]:
    return tuple(name for part in parts if part is not None for name in part.names)


def _ranks(remote: RemoteTier) -> dict[int, int]:
    tickets = sorted([m.ticket for m in remote.moves()] + [*inside.questions(remote)])
    return {ticket: i for i, ticket in enumerate(tickets)}
