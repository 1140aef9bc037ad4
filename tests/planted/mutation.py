"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass

from .structure import Code

Change = tuple[str, str, str]
"""A place, what stands there, and what takes its turn: fragments of Python (``structure``)."""


@dataclass(frozen=True)
class Mutation:
    """A mistake, the invariants that it breaks (docs/ARCHITECTURE.md), and the test modules most likely to see it, in
    the order in which they are run."""

    name: str
    invariants: str
    breaks: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]
    hangs: bool = False
    """Whether the mistake may show as a test that never ends."""

    def apply(self, code: Code) -> dict[str, str]:
        """The files that have it, with it; ``NotFound`` if the code does not say any more what it replaces."""
        return code.changed([(code.find(place, old), new) for place, old, new in self.changes])


def mutation(name: str, invariants: str, breaks: str, tests: str, *changes: Change, hangs: bool = False) -> Mutation:
    """``tests`` are words: "core/coordinator/step" is tests/core/coordinator/test_step.py."""
    modules = (word.rpartition("/") for word in tests.split())
    files = tuple(f"tests/{folder}/test_{stem}.py" for folder, _, stem in modules)
    return Mutation(name, invariants, breaks, files, changes, hangs)
