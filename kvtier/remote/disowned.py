"""Texts whose content is wrong: their objects are deleted, and until that is certain nobody uses their names.

Promises   a name is used again only once a delete has ended well that began after every spill under it had ended.
           A delete that fails is tried again.
Does not   reach what another process reads before the delete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvtier.remote.backends.contract import Answer, Outcome

Name = tuple[str, bytes]

AGAIN_S, MOST_S = 1.0, 60.0
"""Until a delete that has failed is tried again: doubled each time, up to the second."""
HOPEFUL = 4
"""Tries after which nobody waits for a delete any more."""


@dataclass(eq=False)
class _Text:
    keys: frozenset[bytes]
    names: list[Name]
    spills: frozenset[int]
    due_s: float = 0.0
    is_under_way: bool = False
    was_deleted: bool = False
    tries: int = 0


class Disowned:
    """Names of one remote that are being deleted. ``delete(names, answered)`` asks for a delete."""

    def __init__(self, delete: Callable[[list[Name], Callable[[Answer], None]], None]) -> None:
        self._delete = delete
        self._texts: list[_Text] = []

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_hopeful(self) -> int:
        """Texts whose deletes are worth waiting for."""
        return sum(text.tries < HOPEFUL for text in self._texts)

    def has(self, key: bytes) -> bool:
        """Whether objects of this key must not be used."""
        return any(key in text.keys for text in self._texts)

    def add(self, keys: Iterable[bytes], names: Iterable[Name], spills: Iterable[int]) -> None:
        """``spills``: tickets of spills under way under these names."""
        self._texts.append(_Text(frozenset(keys), list(names), frozenset(spills)))

    def delete_due(self, live: Callable[[int], bool], now: float) -> None:
        """Asks for the deletes that are due. ``live(ticket)``: whether a spill is still under way."""
        for text in self._texts:
            left = frozenset(ticket for ticket in text.spills if live(ticket))
            if text.is_under_way or text.due_s > now or (text.was_deleted and left):
                continue
            text.is_under_way, text.spills = True, left
            self._delete(text.names, partial(self._answered, text, now))

    def next_s(self) -> float:
        """When the next delete is due; infinite if none is."""
        return min((text.due_s for text in self._texts if not text.is_under_way), default=float("inf"))

    def _answered(self, text: _Text, asked_s: float, answer: Answer) -> None:
        text.is_under_way = False
        if not answer.outcomes or any(outcome not in (Outcome.OK, Outcome.MISS) for outcome in answer.outcomes):
            text.due_s = asked_s + min(MOST_S, AGAIN_S * 2.0**text.tries)
            text.tries = min(text.tries + 1, 30)
        elif text.spills:
            text.was_deleted, text.due_s = True, 0.0  # once more, after the spills that were under way
        else:
            self._texts.remove(text)
