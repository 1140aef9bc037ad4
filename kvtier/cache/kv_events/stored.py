"""Which hits the remote tier allows, by what is known to lie there.

Owns       nothing: what is known of the remote stands in the runs.
Promises   the boundaries at which a hit can end whose blocks come from all three tiers. ``seek`` finds the same ones
           once the remote has said what it has. The full-attention blocks up to the last tile are here or in tiles.
           What the boundary needs beyond them lies under the boundary's own name, or in blocks by themselves. Of these
           the remote has those that ``seek`` asks for (``ObjectPlan.signs_of_end``), though they may be here as well.
Does not   know whether the fetch would be worth its time, or whether the remote still has what it was seen to have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.cache.kv_events.texts import Run
from kvtier.remote.objects import KeptGroup, Name, ObjectPlan

Mask = npt.NDArray[np.bool_]

TILE, END = 1, 2
"""Bits of ``Run.stored``: a tile, or an end, has the key of this block. Group g's own object has ``4 << g``."""


@dataclass(frozen=True, eq=False)
class RemoteNews:
    """Objects that the remote has now, or may not have any more; and whether requests are asked for there."""

    changes: Mapping[Name, bool]
    is_used: bool


class Needs:
    """Blocks before each boundary of a local group that a hit there needs."""

    def __init__(self, group: KeptGroup) -> None:
        self._group = group
        self._table = np.zeros(0, np.int64)

    def of(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """The needs of hits that end with the blocks start .. end - 1 of a text."""
        if end > len(self._table):
            bt, attention = self._group.block_tokens, self._group.attention
            more = range(len(self._table) + 1, 2 * end + 1)
            needs = [i - attention.first_visible(i * bt) // bt for i in more]
            self._table = np.concatenate([self._table, np.array(needs, np.int64)])
        return self._table[start:end]


def runs_of(there: Mask, before: int) -> npt.NDArray[np.int64]:
    """How many blocks in a row are there up to each one, itself included; ``before`` more are ahead of the first."""
    places = np.arange(len(there))
    last = np.maximum.accumulate(np.where(there, -1, places))
    return np.where(last < 0, places + 1 + before, places - last)


class RemoteRule:
    """Rule of hits from the remote, for caches whose texts ``plan`` cuts into objects."""

    def __init__(self, plan: ObjectPlan) -> None:
        self._stride = plan.stride // plan.unit
        self._tile = plan.tile_tokens // plan.unit
        self._big_full = [g for g, _ in plan.big_full]
        self._big_local = [(g, Needs(group)) for g, group in plan.big_local]
        self._small_local = [Needs(group) for _, group in plan.small_local]
        self.num_big_local = len(self._big_local)
        self._bits = {"t": TILE, "e": END} | {f"b{g}": 4 << g for g, _ in plan.big}

    def place(self, name: Name) -> tuple[int, int]:
        """An object's name as (64 bits of the key, bit of ``Run.stored``)."""
        kind, key = name
        return int(np.frombuffer(key, np.uint64)[0]), self._bits[kind]

    def go_down(self, run: Run, there: Callable[[Run, int], Mask]) -> Mask:
        """Brings up to date where hits can end thanks to the remote; returns which blocks matter to followers anew.

        ``there(run, g)``: whether a tier here has the blocks of group g. Wants ``run.complete`` and those before it up
        to date.
        """
        n, before = len(run), run.after
        at = np.arange(run.start + 1, run.start + n + 1)  # boundaries, in blocks
        strided = at % self._stride == 0
        told = TILE if self._tile else 0
        for g in self._big_full:
            told |= 4 << g
        short = strided & ~run.complete & ((run.stored & np.uint64(told)) != told)
        reach = np.logical_and.accumulate(~short) & (before is None or bool(before.reach[run.at]))
        have = np.full(n, before is None or bool(before.big[run.at]))
        for g in self._big_full:
            have &= there(run, g) | self._has(run, 4 << g)
        have = np.logical_and.accumulate(have)
        hit, big_runs, signs = reach & have, np.empty_like(run.big_runs), list[Mask]()
        by_end = self._needs_end(run, at)
        hit &= self._has(run, END) | ~by_end
        for k, (g, needs) in enumerate(self._big_local):
            own, need = self._has(run, 4 << g), needs.of(run.start, run.start + n)
            carried = 0 if before is None else int(before.big_runs[k, run.at])
            big_runs[k] = runs_of(there(run, g) | own, carried)
            behind = self._behind(run, 4 << g, max(0, int(need[0]) - 1))
            signs.append(np.concatenate([behind, own]))
            first = signs[k][len(behind) + np.arange(n) + 1 - np.maximum(need, 1)]
            hit &= (big_runs[k] >= need) & ((first & own) | by_end | (need == 0))
        differs: Mask = (reach != run.reach) | (have != run.big) | (big_runs != run.big_runs).any(0)
        for new, old in zip(signs, run.signs, strict=False):
            differs |= np.logical_or.accumulate(new != old)[-n:]
        run.signs = signs
        run.reach, run.big, run.big_runs, run.by_remote = reach, have, big_runs, hit
        return differs

    def _needs_end(self, run: Run, at: npt.NDArray[np.int64]) -> Mask:
        """``ObjectPlan.needs_end`` of these boundaries."""
        found: Mask = at % self._tile != 0 if self._tile else np.zeros(len(run), bool)
        for needs in self._small_local:
            found = found | (needs.of(run.start, run.start + len(run)) > 0)
        return found

    def _behind(self, run: Run, bit: int, count: int) -> Mask:
        """``_has`` of the ``count`` blocks before the run."""
        found, after, end = [np.zeros(0, bool)], run.after, run.at + 1
        while count and after is not None:
            found.append(self._has(after, bit)[max(0, end - count) : end])
            count -= len(found[-1])
            end, after = after.at + 1, after.after
        return np.concatenate(found[::-1])

    def _has(self, run: Run, bit: int) -> Mask:
        there: Mask = (run.stored & np.uint64(bit)) != 0
        return there
