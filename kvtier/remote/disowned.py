"""Texts whose content is wrong: their objects are deleted, and until that is certain nobody uses their names.

Promises   a name is used again only once a delete has ended well that began after every spill under it had ended.
           A delete that fails is tried again.
Does not   reach what another process reads before the delete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.remote.block_store import Answer, Outcome

Name = tuple[str, bytes]

AGAIN_S = 1.0


@dataclass(eq=False)
class _Text:
    keys: frozenset[bytes]
    names: list[Name]
    spills: frozenset[int]
    due_s: float = 0.0
    is_under_way: bool = False


class Disowned:
    """Of one store. ``delete(names, answered)`` asks for a delete."""

    def __init__(self, delete: Callable[[list[Name], Callable[[Answer], None]], None]) -> None:
        self._delete = delete
        self._texts: list[_Text] = []

    def __len__(self) -> int:
        return len(self._texts)

    def has(self, key: bytes) -> bool:
        """Whether objects of this key must not be used."""
        return any(key in text.keys for text in self._texts)

    def add(self, keys: Iterable[bytes], names: Iterable[Name], spills: Iterable[int]) -> None:
        """``spills``: tickets of spills under way under these names."""
        self._texts.append(_Text(frozenset(keys), list(names), frozenset(spills)))

    def delete_due(self, live: Callable[[int], bool], now: float) -> None:
        """Asks for the deletes that are due. ``live(ticket)``: whether a spill is still under way."""
        for text in self._texts:
            if text.is_under_way or text.due_s > now:
                continue
            text.is_under_way, text.due_s = True, now + AGAIN_S
            begun_under = frozenset(ticket for ticket in text.spills if live(ticket))

            def answered(answer: Answer, text: _Text = text, begun_under: frozenset[int] = begun_under) -> None:
                text.is_under_way = False
                text.spills = begun_under
                is_well = all(outcome in (Outcome.OK, Outcome.MISS) for outcome in answer.outcomes)
                if is_well and not begun_under:
                    self._texts.remove(text)

            self._delete(text.names, answered)
