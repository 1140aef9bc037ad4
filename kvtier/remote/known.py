"""Names that are known to be stored, the newest of them."""

from __future__ import annotations

from collections import OrderedDict

MOST_KNOWN = 2**18


class Known:
    """A bounded set of names. What it has forgotten is stored once more than it need be."""

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def __contains__(self, name: tuple[str, bytes]) -> bool:
        return name in self._names

    def add(self, name: tuple[str, bytes]) -> None:
        """The store has it, or is about to."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > MOST_KNOWN:
            self._names.popitem(last=False)

    def forget(self, name: tuple[str, bytes]) -> None:
        """The store may not have it."""
        self._names.pop(name, None)
