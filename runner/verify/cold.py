"""The cold run: every prompt's logits, tokens, K and V without any cached content."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import GroupSpec

Place = tuple[str, int]
"""Group, and index of a layer in it."""
Entry = tuple[int, int]
"""Entry of a step, and the prompt that it computes."""


@dataclass
class Cold:
    """One prompt's reference. Tensors are on the CPU."""

    logits: list[Tensor] = field(default_factory=list)
    """float32 [vocab] of each generated token."""
    token_ids: list[int] = field(default_factory=list)
    """The generated tokens, greedily chosen."""
    ranges: set[tuple[int, int]] = field(default_factory=set)
    """[start, end) of the tokens that each step computed."""
    kv: dict[Place, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """K and V [tokens, heads, head size] of every layer."""


class Recording:
    """Watches the cold run and keeps what it computes."""

    def __init__(self, prompts: int) -> None:
        """``prompts``: how many."""
        self.cold = [Cold() for _ in range(prompts)]
        self._kv: dict[tuple[int, Place, int], list[Tensor]] = defaultdict(list)

    def watch(self, step: Any, cache: Any, logits: Tensor, ids: np.ndarray, entries: list[Entry]) -> None:
        """Looks after a forward: keeps what it wrote, and what it led to."""
        for row, prompt in entries:
            start, end = bounds(step, row)
            self.cold[prompt].ranges.add((start, end))
            new = slice(int(step.query_start[row]), int(step.query_start[row + 1]))
            for group in cache.spec.groups:
                if group.attention.kind is Kind.STATE:
                    continue  # a state is judged by what follows from it
                slots = torch.from_numpy(new_slots(step, group, new))
                for layer in range(group.num_layers):
                    for which, pool in enumerate(cache.kv(group.name, layer)):
                        kv = read_slots(pool, slots, group)
                        self._kv[prompt, (group.name, layer), which].append(kv)
        for (_, prompt), sample in samples(step, entries):
            self.cold[prompt].logits.append(logits[sample].to("cpu", copy=True))
            self.cold[prompt].token_ids.append(int(ids[sample]))

    def finish(self) -> list[Cold]:
        """The reference of each prompt."""
        for (prompt, place, which), parts in self._kv.items():
            if which == 0:
                v = self._kv[prompt, place, 1]
                self.cold[prompt].kv[place] = torch.cat(parts), torch.cat(v)
        self._kv.clear()
        return self.cold


def bounds(step: Any, row: int) -> tuple[int, int]:
    """[start, end) of the tokens that entry ``row`` computes in ``step``."""
    end = int(step.seq_lens[row])
    return end - int(step.query_start[row + 1] - step.query_start[row]), end


def samples(step: Any, entries: list[Entry]) -> list[tuple[Entry, int]]:
    """The sampled ``entries``, with their row of the logits."""
    at = {int(row): k for k, row in enumerate(step.sample_rows)}
    return [(entry, at[entry[0]]) for entry in entries if entry[0] in at]


def new_slots(step: Any, group: GroupSpec, tokens: slice = slice(None)) -> npt.NDArray[np.int64]:
    """Where these tokens of the step write, int64 [n]: one slot for each of them, or for each entry they complete."""
    view = step.group(group.name)
    if group.entry_tokens == 1:
        return np.array(view.slot_mapping[tokens])
    made = view.entries()
    at = np.arange(step.num_tokens)[tokens]
    return np.array(made.slot[np.isin(made.token, at)])


def read_slots(pool: Tensor, slots: Tensor, group: GroupSpec) -> Tensor:
    """K or V [n, heads, head size] of n slots of ``pool`` [blocks, block_entries, heads, head size], on the CPU."""
    slots = slots.to(pool.device)
    read: Tensor = pool[slots // group.block_entries, slots % group.block_entries].cpu()
    return read
