"""An engine of recurrent layers over real memory: a state is a fold of all tokens before it, in any order of steps.

Owns       the fold, and what it says of a text (``state_after``, ``next_token``).
Promises   reads and writes states as ``Step.group("state").states()`` says, and nothing else. A token it samples tells
           of every token of the text. K and V of a full group have the tokens themselves, which are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier import CacheSpec, FinishedRequest, FullAttention, GroupSpec, KVCache, Part, RecurrentState, Scheduler, Step

PRIME = 16_381
STATE = RecurrentState((Part("conv0", (3,), "bfloat16"), Part("recurrent0", (2, 2), "float32")))


def spec_of(block_tokens: int = 4, full_tokens: int | None = None, layers: int = 2) -> CacheSpec:
    """Full attention and states; ``full_tokens``: blocks of full attention, 0 for none."""
    state = GroupSpec("state", STATE, layers, block_tokens=block_tokens)
    if full_tokens == 0:
        return CacheSpec([state])
    return CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 2, "float32", full_tokens or block_tokens), state])


def fold(state: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        state = (state * 5 + int(token) + 1) % PRIME
    return state


def next_token(state: int) -> int:
    return state % 89 + 1


def text_of(prompt: Sequence[int], count: int) -> list[int]:
    """What an engine without a cache generates."""
    state, made = fold(0, prompt), list[int]()
    for _ in range(count):
        made.append(next_token(state))
        state = fold(state, made[-1:])
    return made


class Engine:
    """Runs a scheduler's steps on a cache on the CPU."""

    def __init__(self, cache: KVCache, scheduler: Scheduler) -> None:
        self.cache, self.scheduler = cache, scheduler
        self.has_full = "full" in cache.spec.names
        self.steps = self.segments = self.taken = 0

    def forward(self, step: Step) -> np.ndarray:
        states = step.group("state").states(len(step.rows) + self.steps % 3)  # with null rows, as graphs have them
        assert len(states.source) == len(step.rows) + self.steps % 3
        found = np.zeros(len(step.rows), np.int64)
        for k in range(len(step.rows)):
            self._entry(step, k, states, found)
        for k in range(len(step.rows), len(states.source)):
            (i,) = np.flatnonzero(states.entry == k)
            assert (int(states.source[k]), int(states.end[i])) == (0, 1)
            self.write(int(states.target[i]), k)
        self.segments += int((states.entry < len(step.rows)).sum())
        if self.has_full:
            self._full(step)
        return np.array([next_token(int(found[r])) for r in step.sample_rows], np.int64)

    def _entry(self, step: Step, k: int, states, found) -> None:
        tokens = step.token_ids[step.query_start[k] : step.query_start[k + 1]].tolist()
        at, source = int(step.starts[k]), int(states.source[k])
        assert (source > 0) == (at > 0)
        state = self.read(source) if source else 0
        mine = np.flatnonzero(states.entry == k)
        assert states.end[mine[-1]] == step.seq_lens[k]
        for i in mine:
            end = int(states.end[i])
            assert end > at
            state = fold(state, tokens[at - int(step.starts[k]) : end - int(step.starts[k])])
            self.write(int(states.target[i]), state)
            at = end
        found[k] = state

    def read(self, block: int) -> int:
        """The state in a block, which all layers and parts agree on."""
        of_layers = []
        for layer in range(self.cache.spec.group("state").num_layers):
            conv, recurrent = self.cache.state("state", layer)
            values = (recurrent[block] - layer).flatten().tolist()
            assert len(set(values)) == 1
            assert conv[block].tolist() == [values[0] % 128] * 3
            of_layers.append(int(values[0]))
        assert len(set(of_layers)) == 1
        return of_layers[0]

    def write(self, block: int, state: int) -> None:
        for layer in range(self.cache.spec.group("state").num_layers):
            conv, recurrent = self.cache.state("state", layer)
            recurrent[block] = float(state + layer)
            conv[block] = float(state % 128)

    def _full(self, step: Step) -> None:
        """Writes the tokens, and reads all tokens of each text."""
        view, k = step.group("full"), self.cache.kv("full", 0)[0]
        bt, slots = view.block_tokens, view.slot_mapping.copy()
        k[slots // bt, slots % bt] = k.new_tensor(step.token_ids.copy())[:, None, None]
        for r in range(len(step.rows)):
            at = np.arange(int(step.seq_lens[r]))
            read = k[view.block_table[r][at // bt].astype(np.int64), at % bt, 0, 0].numpy().astype(np.int64)
            state = self.scheduler.roster.holders[int(step.rows[r])]
            assert state is not None
            known = np.concatenate([state.tokens, self.generated(int(step.rows[r]))])[: len(at)]
            assert np.array_equal(read, known)

    def generated(self, row: int) -> np.ndarray:
        t = self.cache.core.coordinator.tables.arrays
        return t.generated[row, : t.num_generated[row]]

    def run(self, before_commit: Callable[[Step], bool] = lambda step: True) -> list[FinishedRequest]:
        """Until nothing is left; ``before_commit``: False cancels the step."""
        reports: list[FinishedRequest] = []
        while self.scheduler.has_work():
            step = self.scheduler.schedule()
            if step.num_tokens == 0:
                reports += self.scheduler.commit(step, np.empty(0, np.int64))
                self.scheduler.wait(0.01)
                continue
            ids = self.forward(step)
            self.steps += 1
            if before_commit(step):
                reports += self.scheduler.commit(step, ids)
            else:
                self.scheduler.cancel(step)
        return reports
