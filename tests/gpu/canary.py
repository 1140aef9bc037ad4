"""A canary for devices: its forwards run on a GPU's compute stream, and the host does not wait for them.

As ``kvtier.testing.CanaryEngine``, but every slot that a forward sees is compared on the device, and what is wrong is
counted there. The text follows from the tokens alone, so the host schedules, commits and frees blocks while forwards
that used them are still queued: every wait that copies and forwards owe each other matters. It runs on a CPU as well,
where forwards have ended when they return, unless ``launch`` puts them off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvtier import FinishedRequest, KVCache, Request, Scheduler
from kvtier.coordinator.step import Step
from kvtier.pools.pool_state import Col, Place
from kvtier.testing.oracle import VOCABULARY, CanaryText, seed_of

ODD = -0x61C8864680B583EB
Slots = tuple[torch.Tensor, torch.Tensor]
"""Blocks and offsets in them."""
POISON = -0x2152_4110_2152_4111


class DeviceCanary:
    """``spin_cycles``: each forward first keeps the compute stream busy for up to so many cycles.

    ``launch``: gives the device a part of a forward, in order; by default it is called at once, and torch enqueues it.
    """

    def __init__(
        self,
        cache: KVCache,
        seed: int = 0,
        spin_cycles: int = 0,
        launch: Callable[[Callable[[], None]], None] = lambda part: part(),
    ) -> None:
        self._cache = cache
        self._launch = launch
        self.empty: list[np.ndarray] = []
        """Share of each group's blocks that were empty when a step was scheduled, float64 [groups]."""
        self._random = np.random.default_rng(seed)
        self._spin_cycles = spin_cycles
        self._texts: dict[str, CanaryText] = {}
        self._arena = cache.arenas[0]
        self.device = self._arena.storage.device
        self.mismatches = torch.zeros((), dtype=torch.int64, device=self.device)
        """Words that were not what they should have been."""
        self._words = [self._group(g) for g in range(len(cache.spec.groups))]
        self._marks = [
            torch.arange(1, 2 * group.num_layers + 1, device=self.device).view(1, group.num_layers, 2) * 0x10001
            for group in cache.spec.groups
        ]

    def _group(self, g: int) -> torch.Tensor:
        """A group's blocks as words, int64 [blocks, layers, K and V, block_tokens]; a slot is one word in each."""
        group, arena = self._cache.spec.groups[g], self._arena
        rows, layers, tokens = int(arena.rows[g]), group.num_layers, group.block_tokens
        words = arena.storage.view(torch.int64)
        step, first = int(arena.strides[g]) // 8, int(arena.origins[g]) // 8
        return words.as_strided((rows, layers, 2, tokens), (step, 2 * tokens, tokens, 1), first)

    def add(self, request: Request) -> None:
        self._texts[request.request_id] = CanaryText(request.prompt_token_ids, seed_of(None, ()))

    def forward(self, step: Step) -> np.ndarray:
        """Checks what every query sees of earlier tokens, writes the new ones; returns the next tokens."""
        if self._spin_cycles and self.device.type == "cuda":
            torch.cuda._sleep(int(self._random.integers(0, self._spin_cycles)))
        chains = [self._texts[name].chain for name in step.request_ids]
        starts = step.starts.copy()
        new = [chain[a:b].view(np.int64) for chain, a, b in zip(chains, starts, step.seq_lens, strict=True)]
        values = self._up(np.concatenate([np.empty(0, np.int64), *new]))
        for g, group in enumerate(self._cache.spec.groups):
            view, words, marks = step.group(group.name), self._words[g], self._marks[g]
            first = [group.attention.first_visible(int(s)) for s in starts]
            at = [np.arange(a, b) for a, b in zip(first, starts, strict=True)]
            table = view.block_table
            bt = group.block_tokens
            blocks = self._up(_flat([table[r, p // bt] for r, p in enumerate(at)]))
            offsets = self._up(_flat([p % bt for p in at]))
            seen = self._up(_flat([chain[p].view(np.int64) for chain, p in zip(chains, at, strict=True)]))
            self._launch(partial(self._check, words, (blocks, offsets), seen, marks))
            self._launch(partial(self._poison, words, self._up(self._empty_blocks(g))))
            slots = self._up(view.slot_mapping.copy())
            self._launch(partial(self._write, words, (slots // bt, slots % bt), values, marks))
        ids = []
        for r in step.sample_rows:
            text = self._texts[step.request_ids[r]]
            ids.append(int(text.chain[text.count - 1]) % VOCABULARY)
            text.append(np.array(ids[-1:], np.int64))
        return np.array(ids, np.int64)

    def _check(self, words: torch.Tensor, at: Slots, chain: torch.Tensor, marks: torch.Tensor) -> None:
        self.mismatches += (words[at[0], :, :, at[1]] != chain[:, None, None] * ODD + marks).sum()

    def _poison(self, words: torch.Tensor, blocks: torch.Tensor) -> None:
        words.index_fill_(0, blocks, POISON)  # `words[blocks] = POISON` would wait for the device: a copy of the number

    def _write(self, words: torch.Tensor, at: Slots, chain: torch.Tensor, marks: torch.Tensor) -> None:
        words[at[0], :, :, at[1]] = chain[:, None, None] * ODD + marks

    def _empty_blocks(self, g: int) -> np.ndarray:
        """They hold what nobody has written; whoever takes one may write it at any time from now on."""
        arrays = self._cache.core.coordinator.pools.arrays
        base, rows = arrays.meta[g, Col.BASE], arrays.meta[g, Col.ROWS]
        return np.flatnonzero(arrays.place[base : base + rows] == int(Place.EMPTY))

    def _note_empty(self) -> None:
        empty = [len(self._empty_blocks(g)) for g in range(len(self._words))]
        self.empty.append(np.array(empty) / (self._arena.rows - 1))

    def _up(self, array: np.ndarray) -> torch.Tensor:
        """To the device, without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array, np.int64))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def run(
        self,
        scheduler: Scheduler,
        requests: list[Request],
        ahead: int = 8,
        after_step: Callable[[], None] = lambda: None,
    ) -> list[FinishedRequest]:
        """Serves all of them; the host is at most ``ahead`` forwards ahead of the device."""
        for request in requests:
            scheduler.add(request)
            self.add(request)
        done: list[FinishedRequest] = []
        events: list[torch.cuda.Event] = []
        while scheduler.has_work():
            step = scheduler.schedule()
            self._note_empty()
            ids = self.forward(step) if step.num_tokens else np.empty(0, np.int64)
            done += scheduler.commit(step, ids)
            after_step()
            if not step.num_tokens:
                scheduler.wait(0.01)
            elif self.device.type == "cuda":
                events.append(torch.cuda.Event())
                events[-1].record()
                if len(events) > ahead:
                    events.pop(0).synchronize()
        return done


def _flat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])
