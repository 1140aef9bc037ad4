"""A sequence, for an engine with a scheduler of its own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from kvtier.coordinator.request import Request
from kvtier.coordinator.tracked import State, Tracked
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.machine.errors import StepError
from kvtier.machine.integers import integer, shown


@dataclass(frozen=True)
class Hit:
    """Tokens of a sequence that the cache has."""

    num_tokens: int
    host_tokens: int
    """The part of these tokens for which some group has to load a block."""
    is_pending: bool
    """A copy is still writing some of it: ``start`` has to wait for it."""
    limited_by: str
    """The group that kept it from being longer, "" if none did."""


class Sequence:
    """A request that a ``CacheManager`` knows. It holds nothing until it is started."""

    def __init__(self, tracked: Tracked, tables: BlockTables) -> None:
        self.tracked = tracked
        """Inside the coordinator."""
        self._tables = tables

    @property
    def request(self) -> Request:
        """What was opened."""
        return self.tracked.request

    @property
    def is_idle(self) -> bool:
        """Holds nothing: not started, stopped, or its load has failed."""
        return self.tracked.state is State.WAITING

    @property
    def is_loading(self) -> bool:
        """Its hit is being loaded."""
        return self.tracked.state is State.LOADING

    @property
    def is_running(self) -> bool:
        """Can be part of a step."""
        return self.tracked.state is State.RUNNING

    @property
    def is_finished(self) -> bool:
        """Has ended."""
        return self.tracked.state is State.FINISHED

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V are there."""
        row = self.tracked.row
        return 0 if row < 0 else int(self._tables.arrays.computed[row])

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt, and the sampled tokens."""
        row = self.tracked.row
        return len(self.tracked.tokens) if row < 0 else int(self._tables.arrays.total[row])

    @property
    def cached_tokens(self) -> dict[str, int] | None:
        """Prompt tokens that its first start found on "device" and "host"; None before that."""
        return self.tracked.cached_tokens

    @property
    def problem(self) -> str:
        """Why its last load failed; "" if none did."""
        return self.tracked.wait_reason if self.tracked.state is State.WAITING else ""


def counted(wants: Many[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    """Pairs of a sequence and a number of tokens, as plain ints. Raises ``StepError`` for anything else."""
    if not isinstance(wants, (list, tuple)) or not all(isinstance(w, tuple) and len(w) == 2 for w in wants):
        raise StepError("plan() takes a list of (sequence, number of tokens)")
    counts = [integer(n) for _, n in wants]
    if None in counts:
        raise StepError(f"a number of tokens is no integer: {shown([n for _, n in wants])}")
    return [(sequence, n or 0) for (sequence, _), n in zip(wants, counts, strict=True)]
