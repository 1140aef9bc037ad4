"""A step of one group in FlashInfer's form, and its captured form.

Owns       index arrays and slots: pinned copies on the CPU, and their parts on the device.
Promises   a batch outlives the step's own arrays. Memory that a copy still reads is never written again. With
           ``check``, an array that breaks I15 is found before anything is planned.
Does not   plan or run (flashinfer.py, _flashinfer_plan.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.attention._flashinfer_plan import GraphBuffers, Indices, Key, Lane, Wrappers
from kvtier.attention.kernels import words
from kvtier.attention.paged import Bounds, Int64s, Paged, faults
from kvtier.geometry.spec import GroupSpec
from kvtier.machine.errors import InvariantBroken

NO_SLOT = -1
"""The slot of padding rows: they write nowhere."""
_WASTE = 1.5
"""Work on tiles of queries, in those of the queries that are there, up to which they are nearly full."""


class Batch(ABC):
    """One step of one group: index arrays, slots, and the wrappers planned for it so far, by their keys."""

    def __init__(self, group: GroupSpec, device: torch.device | str) -> None:
        self.group = group
        self.device = torch.device(device)
        self.lanes: dict[Key, Lane] = {}
        self.tokens = 0
        self.blocks = 0
        self.null_entries = 0
        self.slot_mapping: Tensor
        self.indices: Indices
        self._slots: Int64s
        self._paged: Paged

    def take(self, paged: Paged, slots: Int64s) -> tuple[Tensor, Tensor]:
        """Copies a step's arrays; returns kv_indices and the slots on the CPU, pinned if the device is CUDA.

        Fresh memory each step: torch gives pinned memory back only after the copies from it have run.
        """
        ends = np.cumsum([len(array) for array in paged])
        memory = words.staged(int(ends[-1]), torch.int32, self.device)
        qo, kv, pages, last = memory.tensor_split(ends[:-1].tolist())
        for target, array in zip((qo, kv, pages, last), paged, strict=True):
            target.numpy()[:] = array
        slot_memory = words.staged(len(slots), torch.int64, self.device)
        slot_memory.numpy()[:] = slots
        self.tokens = len(slots)
        self._slots, self._paged = slot_memory.numpy(), (qo.numpy(), kv.numpy(), pages.numpy(), last.numpy())
        self.indices = Indices(qo, kv, last, pages)
        return pages, slot_memory

    def check(self) -> None:
        """Raises ``InvariantBroken`` unless the index arrays are sound (I15)."""
        group = self.group
        bounds = Bounds(group.attention, group.block_tokens, self.blocks, self.tokens, self.null_entries)
        found = faults(self._paged, self._slots, bounds)
        if found:
            raise InvariantBroken(
                f"exporting group {group.name!r} to FlashInfer; nothing was planned",
                [f"I15: {fault}" for fault in found],
            )

    def fills(self, tile: int) -> bool:
        """Whether tiles of ``tile`` queries would be nearly full, counted by the work that they cause."""
        return False

    @abstractmethod
    def lane(self, wrappers: Wrappers, key: Key) -> Lane:
        """A wrapper for ``key``, planned for this step."""


class PagedBatch(Batch):
    """A batch of an eager step. Built once and used by every layer of the group."""

    @classmethod
    def from_step(cls, step: Any, group: GroupSpec, device: torch.device | str) -> PagedBatch:
        """``group``'s part of a scheduled step. Copies its arrays: the batch outlives the step's arrays."""
        batch = cls(group, device)
        view = step.group(group.name)
        pages, slots = batch.take(view.paged(), view.slot_mapping)
        batch.slot_mapping = words.sent(slots, batch.device)
        batch.indices = batch.indices._replace(kv_indices=words.sent(pages, batch.device))
        return batch

    def fills(self, tile: int) -> bool:
        queries, pages = np.diff(self._paged[0]).astype(np.int64), np.diff(self._paged[1])
        return bool((-(-queries // tile) * tile * pages).sum() <= _WASTE * (queries * pages).sum())

    def lane(self, wrappers: Wrappers, key: Key) -> Lane:
        """The next wrapper of the ring."""
        return wrappers.eager(key, self, self.indices)


class GraphBatch(Batch):
    """A batch of decode steps of ``rows`` entries, padded, whose kernels are captured once and replayed.

    ``kv_indices``: int32 on the device; room for the pages of one step, and shared by batches that never run at once.
    It begins with null rows only. Between steps, ``FlashInfer.refill`` brings in the changes and plans again.
    """

    def __init__(self, group: GroupSpec, rows: int, kv_indices: Tensor) -> None:
        super().__init__(group, kv_indices.device)
        self.rows = rows
        qo, kv, last = (torch.zeros(n, dtype=torch.int32, device=self.device) for n in (rows + 1, rows + 1, rows))
        self._buffers = GraphBuffers(qo, kv, kv_indices, last)
        self.slot_mapping = torch.full((rows,), NO_SLOT, dtype=torch.int64, device=self.device)
        every = np.arange(rows + 1, dtype=np.int32)
        self.fill((every, every, np.zeros(rows, np.int32), np.ones(rows, np.int32)), np.zeros(0, np.int64))

    def has_room(self, paged: Paged) -> bool:
        """Whether a step's pages, and the null rows' pages, fit."""
        return len(paged[2]) + self.rows - len(paged[3]) <= len(self._buffers.kv_indices)

    def fill(self, padded: Paged, slots: Int64s) -> None:
        """Takes the arrays of a step: ``GroupView.padded(rows)``, and the slots [n] of its n <= rows new tokens."""
        self.null_entries = self.rows - len(slots)
        nowhere = np.full(self.null_entries, NO_SLOT, np.int64)
        pages, slot_memory = self.take(padded, np.concatenate([slots, nowhere]))
        words.send(slot_memory, self.slot_mapping)
        self.indices = self.indices._replace(kv_indices=words.sent(pages, self.device))

    def let_go(self) -> None:
        """Gives the step's arrays back: no further plan will be made of them.

        There is a batch for each captured size, and each would keep the arrays of its last step.
        """
        del self.indices, self._slots, self._paged

    def lane(self, wrappers: Wrappers, key: Key) -> Lane:
        """A wrapper of this batch's own, which reads its buffers."""
        return wrappers.graphed(key, self, self.indices, self._buffers)
