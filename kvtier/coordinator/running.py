"""What runs: the row of each request, the step under way, and the effect of its end on the rows.

Owns       the roster, the entries of the step that is being made, and the step.
Promises   the same few compiled loops serve both drivers: ``Scheduler``, and an engine's own scheduler by
           ``CacheManager``. A step is committed or cancelled before the next one is made.
Does not   decide which request runs, and how much of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.advance import GOES_ON, STOPPED, advance
from kvtier.coordinator.coming import Coming
from kvtier.coordinator.core import Core
from kvtier.coordinator.entries import Entries
from kvtier.coordinator.plan import extend_rows, valid_ids
from kvtier.coordinator.request import FinishReason
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.step import Step
from kvtier.coordinator.tracked import Tracked
from kvtier.machine.errors import ConfigError, MemoryUnavailable, StepError
from kvtier.machine.integers import integer, shown

MOST = 2**24
"""Rows, and tokens per step, for which work arrays are set up: far more than any engine runs."""


def check_limits(max_batched_tokens: object, max_running: object) -> tuple[int, int]:
    """Both as plain ints; raises ``ConfigError`` for values that a driver does not take."""
    return _at_most(max_batched_tokens, "max_batched_tokens"), _at_most(max_running, "max_running")


def _at_most(value: object, name: str) -> int:
    most = integer(value)
    if most is None or not 1 <= most <= MOST:
        raise ConfigError(f"{name} must be an integer in 1..{MOST:,}, got {shown(value)}")
    return most


def named(resting: object) -> frozenset[str]:
    """The ids of requests that are to rest; raises ``StepError`` for what is no collection of text."""
    if isinstance(resting, Collection) and not isinstance(resting, str):  # of which any part would be an id
        try:
            names = frozenset(resting)
        except TypeError as problem:  # lists in it, or an array of no dimension
            raise StepError(f"resting must be a set of request ids: {problem}") from None
        if all(isinstance(name, str) for name in names):
            return names
    raise StepError(f"resting must be a set of request ids, got {shown(resting)}")


class Running:
    """The requests that one driver runs: ``max_running`` rows, steps of ``max_batched_tokens`` tokens at most."""

    def __init__(self, core: Core, max_batched_tokens: int, max_running: int) -> None:
        """Raises ``MemoryUnavailable``."""
        self._core = core
        self._coordinator = core.coordinator
        self._num_groups = len(core.spec.groups)
        self._most_generated = 0  # no row has sampled more tokens than this
        self.step: Step | None = None
        """The step that is neither committed nor cancelled."""
        try:
            self.roster = Roster(max_running)
            self.entries = Entries(len(core.spec.groups), max_running, max_batched_tokens)
            self._ended = np.empty(max_running, np.uint8)
        except MemoryError as problem:
            setting = "max_running" if max_running > max_batched_tokens else "max_batched_tokens"
            raise MemoryUnavailable(
                f"work arrays for {max_batched_tokens:,} tokens of {max_running:,} requests do not fit into memory "
                f"({problem or 'out of memory'}); lower {setting}"
            ) from problem
        tiers = [core.coordinator.pools] if core.host is None else [core.coordinator.pools, core.host]
        self.coming = Coming(core.coordinator, self.roster, tiers)
        """Keeps warm what requests that wait will hit."""

    def refuse_step(self) -> NoReturn:
        """The last step was neither committed nor cancelled."""
        raise StepError("the last step is not committed; call commit(step, ids) or cancel(step) first")

    def extend(self, rows: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], need: npt.NDArray[np.int64]) -> bool:
        """Takes the blocks need[G] that ``rows`` lack for tokens up to ``ends``, in all groups and for all of them.

        False if some cannot be had, since a copy holds them: then none is taken. The rows are marked as placed.
        """
        coordinator = self._coordinator
        if not coordinator.room.make_clean(need):
            return False
        coordinator.tables.reserve(int(ends.max()))
        arrays = *coordinator.pools.arrays, *coordinator.tables.arrays
        extend_rows(*arrays, self.entries.placed, rows, ends, need)
        return True

    def let_rest(self, request_ids: Collection[str]) -> None:
        """These sit out the step that is being made, if they run and have computed something since they came."""
        for seq in self.roster.running:
            if seq.request.request_id in request_ids and self._coordinator.has_run(seq):
                self.entries.placed[seq.row] = 1

    def make_step(self) -> Step:
        """The step that the entries make; it is under way from now on."""
        self.step = self.entries.step(self._coordinator.tables, self.roster)
        return self.step

    def check_under_way(self, step: Step) -> None:
        """Raises ``StepError`` for a step that is not under way."""
        if step is not self.step or step is None:
            raise StepError("this step is not under way (committed, cancelled, or of another scheduler)")

    def check_ids(self, step: Step, next_token_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The sampled tokens, int64, one for each sample row. Raises ``StepError``; then nothing changed."""
        self.check_under_way(step)
        try:
            ids: npt.NDArray[Any] = np.asarray(next_token_ids)
        except Exception as problem:  # torch refuses tensors of other devices
            raise StepError(f"token ids must be a flat list of integers: {problem}") from None
        samples = self.entries.due.samples
        if ids.shape != samples.shape:
            raise StepError(f"commit needs {len(samples)} token ids (one per sample row), got {ids.shape}")
        if not (ids.dtype == np.int64 and ids.flags.carray):  # the loops are compiled for nothing else
            if ids.size and ids.dtype.kind not in "iu":
                raise StepError(f"token ids must be integers, got {ids.dtype}")
            ids = np.array(ids, np.int64)
        if not valid_ids(ids):
            raise StepError("token ids must be in [0, 2**31)")
        return ids

    def end_step(self, step: Step) -> None:
        """The step is committed or cancelled."""
        step.close()
        self.step = None

    def advance(
        self, ids: npt.NDArray[np.int64], asked: Sequence[tuple[Tracked, FinishReason]]
    ) -> Iterator[tuple[Tracked, FinishReason]]:
        """The forward of the last step made is done: its tokens are counted, its blocks published.

        Yields the requests that end with it, and why. Tokens sampled for requests whose end was ``asked`` for are
        not part of their text. Nothing that failed requests have computed is sealed.
        """
        coordinator, ended, counts = self._coordinator, self._ended, self._coordinator.counts
        rows, ends, samples = self.entries.due
        tables, sealed = coordinator.tables, coordinator.tables.sealed
        ended_rows = [seq.row for seq, _ in asked if seq.row >= 0] if asked else []
        if ended_rows:
            ids = np.where(np.isin(rows[samples], ended_rows), -1, ids)
        for seq, reason in asked:
            if reason == "error":
                coordinator.distrust(seq)
        counts.generated_tokens += int(np.count_nonzero(ids >= 0)) if ended_rows else len(ids)
        for k in self.entries.prefills:  # names their full blocks
            coordinator.seal_prefill(self.roster.of_row(rows[k]), int(ends[k]))
        if self._most_generated >= tables.arrays.generated.shape[1]:
            self._most_generated = int(tables.arrays.num_generated.max())  # rows that sit this step out go on later
            tables.reserve_generated(self._most_generated + 1)
        self._most_generated += 1
        if sealed.count + len(rows) * self._num_groups > sealed.room:
            sealed.reserve(len(rows) * self._num_groups)
        sealed.count, num_ended = advance(
            *coordinator.pools.arrays,
            *tables.arrays,
            coordinator.chain.secret,
            self._core.spec.hit_tokens,
            rows,
            ends,
            samples,
            ids,
            ended,
            sealed.count,
            *sealed.arrays,
        )
        if sealed.count:
            coordinator.plan_stores()
        if num_ended:
            for i in np.flatnonzero(ended[: len(rows)] != GOES_ON):
                yield self.roster.of_row(rows[i]), "stop" if ended[i] == STOPPED else "length"

    def due(self) -> list[Tracked]:
        """The requests of the last step made."""
        return [self.roster.of_row(row) for row in self.entries.due.rows]

    def leave(self, seq: Tracked, comes_back: bool = False) -> None:
        """It gives up its row and its blocks; their content stays findable."""
        row = seq.row
        self._coordinator.leave(seq, comes_back)
        self.roster.leave(seq, row)
        self.coming.is_stale = True
