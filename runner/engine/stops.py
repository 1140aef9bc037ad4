"""Stop strings, looked for in a text as it grows.

Promises   a letter costs the same however many stop strings there are and however long they are. Many texts may share
           one ``StopStrings``: a place in it is a number that each of them keeps.

It is Aho's and Corasick's automaton. A place stands for the longest end of the text that some stop string begins with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

START = 0
"""The place of an empty text."""


class StopStrings:
    """Some strings that end a text."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [START]
        """The place of the next shorter such end."""
        self._found: list[str | None] = [None]
        self.held = [0]
        """Letters at a place's end that a stop string may still go on from."""
        for string in strings:
            self._insert(string)
        self._link()

    def _insert(self, string: str) -> None:
        place = START
        for letter in string:
            if letter not in self._next[place]:
                self._next[place][letter] = len(self._next)
                self._next.append({})
                self._shorter.append(START)
                self._found.append(None)
                self.held.append(self.held[place] + 1)
            place = self._next[place][letter]
        self._found[place] = string

    def _link(self) -> None:
        """Shorter places come before longer ones."""
        places = deque(self._next[START].values())
        while places:
            place = places.popleft()
            shorter = self._shorter[place]
            self._found[place] = self._found[place] or self._found[shorter]
            for letter, longer in self._next[place].items():
                self._shorter[longer] = self._step(shorter, letter)
                places.append(longer)
            if not self._next[place]:
                self.held[place] = self.held[shorter]

    def _step(self, place: int, letter: str) -> int:
        while letter not in self._next[place] and place != START:
            place = self._shorter[place]
        return self._next[place].get(letter, START)

    def follow(self, place: int, piece: str, search: bool) -> tuple[int, int, str | None]:
        """The place after ``piece``, or after its part up to the end of a stop string; the part's length; the string.

        If several strings end there, it is the longest. ``search`` False: none ends in this piece.
        """
        for read, letter in enumerate(piece, start=1):
            place = self._step(place, letter)
            if search and self._found[place] is not None:
                return place, read, self._found[place]
        return place, len(piece), None
