"""Probabilities that add up to the same sum in any order, and the largest logits in one order.

Promises   a row's numbers depend on its own logits, bit by bit: not on the rows beside it.
Does not   sort the vocabulary, or loop over rows or tokens.

Weights are rounded to whole numbers before they are added up across a row. Whole numbers have one sum in any order, on
any device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

UNIT = 2.0**40
"""The weight of a row's likeliest token, as a whole number. int64 holds the sum of 2**22 of them."""

CHUNK = 64
"""Tokens that are added up, or compared, before the row is looked at as a whole."""

SLAB = {"cpu": 2**20, "cuda": 2**23}
"""Logits that are worked on at once, by device: few enough for caches, or enough for a kernel to be worth its
launch. It bounds the memory of a large batch over a large vocabulary beside its logits: some four times as many
bytes."""


def rows_at_once(vocabulary: int, device: torch.device) -> int:
    """How many rows make a slab."""
    return max(1, SLAB.get(device.type, 2**23) // vocabulary)


def weigh(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities relative to the likeliest token's, float32 in [0, 1]."""
    return (logits - best).div_(temperature).exp_()


def by_chunks(values: Tensor, filler: float) -> Tensor:
    """``values`` [m, vocab], filled up to whole chunks."""
    missing = -values.shape[1] % CHUNK
    return F.pad(values, (0, missing), value=filler) if missing else values


def chunk_masses(weights: Tensor) -> Tensor:
    """Sums of chunks as whole numbers: float32 [m, chunks * CHUNK] -> int64 [m, chunks].

    Chunk c has the tokens c, c + chunks, c + 2 * chunks, ...: it is added up in halves, one order on any device.
    """
    sums = weights.view(len(weights), CHUNK, -1)
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return (sums[:, 0] * UNIT).long()


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row, best first, of equal ones the lowest id: values float32 and ids int64 [m, k].

    They lie in the k chunks whose largest come first in the same order.
    """
    chunks = by_chunks(logits, -torch.inf).reshape(len(logits), -1, CHUNK)
    numbers = torch.arange(chunks.shape[1], device=logits.device)
    chosen = _in_order(chunks.amax(dim=-1), numbers).topk(min(k, len(numbers))).indices
    values = chunks.gather(1, chosen[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    ids = (chosen[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    first = _in_order(values, ids).topk(k).indices
    return values.gather(1, first), ids.gather(1, first)


def _in_order(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys that are larger for a larger float32 value, and of equal values for a lower id."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) - ids
