"""The states of one step: what each of its entries goes on from, and where it leaves what.

Owns       a group's part of a step as recurrent layers want it: segments of prompts, and entries of one token together.
Promises   the blocks of entries of one token are on the device: of a captured step at fixed places.
Does not   compute: ``states`` has the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.attention.kernels import words
from kvtier.geometry.spec import GroupSpec


@dataclass(frozen=True)
class Segment:
    """The next tokens [start, end) of a step; the state after them goes to block ``target``.

    ``is_kept``: they end at a boundary, so others may find it.
    """

    start: int
    end: int
    target: int
    is_kept: bool


@dataclass(frozen=True)
class StatesOfStep:
    """A group's states in one step: what each entry goes on from (0: nothing), and its segments.

    ``before``: tokens of each entry's text before the step. ``unsound``: entries that have left a state which is not
    finite where others may find it.
    """

    source: list[int]
    before: list[int]
    segments: list[list[Segment]]
    single: list[int]
    """The entries of one token that go on from a state: they are computed together."""
    rows: Tensor
    """int32 [3, n] on the device: of these the tokens in the step, and their blocks before and after."""
    unsound: set[int] = field(default_factory=set)

    @classmethod
    def from_step(cls, step: Any, group: GroupSpec, device: torch.device) -> StatesOfStep:
        """``group``'s part of a scheduled step."""
        found, starts = step.group(group.name).states(), step.query_start.tolist()
        before = (step.seq_lens - _counts(step)).tolist()
        segments: list[list[Segment]] = [[] for _ in before]
        for k, end, target in zip(found.entry.tolist(), found.end.tolist(), found.target.tolist(), strict=True):
            start = segments[k][-1].end if segments[k] else starts[k]
            segments[k].append(Segment(start, starts[k] + end - before[k], target, end % group.block_tokens == 0))
        source = found.source.tolist()
        single = [k for k, of in enumerate(segments) if source[k] and of[-1].end - of[0].start == 1]
        staged = words.staged(3 * _aligned(len(single)), torch.int32, device)
        rows = [(segments[k][0].start, source[k], segments[k][0].target) for k in single]
        staged.view(3, -1).numpy()[:, : len(single)] = np.array(rows, np.int32).reshape(-1, 3).T
        sent = words.sent(staged, device).view(3, -1)[:, : len(single)]
        return cls(source, before, segments, single, sent)


class StatesOfDecode:
    """A group's states in a captured step of ``rows`` entries of one token: their blocks, in fixed places."""

    def __init__(self, rows: int, spare: int, device: torch.device) -> None:
        """``spare``: the block that null rows write to; until ``fill``, all are null rows."""
        self._sent = torch.zeros(2 * _aligned(rows), dtype=torch.int32, device=device)
        self.blocks = self._sent.view(2, -1)[:, :rows]
        """int32 [2, rows]: what each row goes on from, and where its state goes."""
        self.blocks[1] = spare

    def fill(self, group: Any) -> None:
        """Brings in a step's group: each entry goes on from a state."""
        rows = self.blocks.shape[1]
        found, staged = group.states(rows), words.staged(len(self._sent), torch.int32, self._sent.device).zero_()
        staged.view(2, -1).numpy()[:, :rows] = found.source, found.target
        words.send(staged, self._sent)


def _aligned(rows: int) -> int:
    """So many int32 that the next row begins at a multiple of 16 bytes, as kernels demand."""
    return -(-rows // 4) * 4


def unsound(step: Any, cache: Any, group: GroupSpec) -> list[int]:
    """The entries of a step of one token each that have left a state which is not finite where others may find it."""
    found = step.group(group.name).states()
    kept = np.flatnonzero(found.end % group.block_tokens == 0)
    if not len(kept):
        return []
    layers = [cache.state(group.name, i) for i in range(group.num_layers)]
    at = torch.from_numpy(found.target[kept].astype(np.int64)).to(layers[0][0].device)
    sound = [part[at].isfinite().flatten(1).all(1) for parts in layers for part in parts]
    bad: list[int] = kept[~torch.stack(sound).all(0).cpu().numpy()].tolist()
    return bad


def _counts(step: Any) -> Any:
    return step.query_start[1:].astype("int64") - step.query_start[:-1]
