"""The canary engine: no neural network, but every wrong, stale, torn, missing or foreign slot changes the text.

The KV of a token is a 64-bit value that depends on all tokens up to it, on the group and on the layer. The next token
is a hash over *every* slot that each group's mask can see, read through the step's block tables. The oracle,
``expected_tokens``, computes the same from the tokens alone, with no cache at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.cache import KVCache
from kvtier.coordinator.request import FinishedRequest, Request
from kvtier.coordinator.scheduler import Scheduler
from kvtier.coordinator.step import Step
from kvtier.cpu_offload.engines.simulated import SimulatedEngine
from kvtier.gpu_pool.block_pool import Place
from kvtier.spec import Attention, CacheSpec, GroupSpec

U64 = npt.NDArray[np.uint64]

POISON = np.uint64(0x7FF8DEAD7FF8DEAD)
VOCABULARY = 97


def canary_spec(groups: Mapping[str, tuple[Attention, int]], num_layers: int = 2) -> CacheSpec:
    """A spec whose slots hold one 64-bit value for K and one for V: name -> (attention, block_tokens)."""
    return CacheSpec(
        [
            GroupSpec(name, attention, num_layers, 1, 2, dtype="float32", block_tokens=block_tokens)
            for name, (attention, block_tokens) in groups.items()
        ]
    )


def _mix(x: U64) -> U64:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _chain(tokens: Iterable[int], start: int = 0) -> U64:
    """A value per token that depends on all tokens up to it."""
    out, value = [], start
    for token in tokens:
        value = (value * 6364136223846793005 + int(token) * 1442695040888963407 + 1) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 29
        out.append(value)
    return np.array(out, np.uint64)


def _slot_values(chain: U64, place: int) -> U64:
    """What the KV of these tokens is in one place (a group's layer, K or V)."""
    return _mix(chain + np.uint64(place * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF))


def _digest(values: U64, first: int, place: int) -> int:
    """Sums slot values, each bound to its position and place."""
    positions = np.arange(first, first + len(values), dtype=np.uint64)
    bound = _mix(values ^ _mix(positions * np.uint64(1_000_003) + np.uint64(place)))
    return int(np.add.reduce(bound, dtype=np.uint64)) if len(values) else 0


def _places(spec: CacheSpec) -> list[tuple[int, int, int]]:
    """(place, group, layer) of K; V's place is the next number."""
    out, place = [], 1
    for g, group in enumerate(spec.groups):
        for layer in range(group.num_layers):
            out.append((place, g, layer))
            place += 2
    return out


def expected_tokens(spec: CacheSpec, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """The oracle: the text of a request computed without a cache."""
    tokens = [int(t) for t in prompt]
    while len(tokens) < len(prompt) + max_new_tokens:
        chain, total = _chain(tokens), 0
        for place, g, _ in _places(spec):
            first = spec.groups[g].attention.first_visible(len(tokens) - 1)
            for p in (place, place + 1):
                total += _digest(_slot_values(chain[first:], p), first, p)
        tokens.append(int(total & 0xFFFFFFFFFFFFFFFF) % VOCABULARY)
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class CanaryEngine:
    """Runs steps on a cache whose spec comes from ``canary_spec``."""

    def __init__(self, cache: KVCache, poison: bool = True) -> None:
        self._cache = cache
        self._poison = poison
        self._history: dict[str, list[int]] = {}
        self._views = [
            tuple(self._words(cache, group, layer) for layer in range(group.num_layers)) for group in cache.spec.groups
        ]

    @staticmethod
    def _words(cache: KVCache, group: GroupSpec, layer: int) -> tuple[U64, U64]:
        """K and V as uint64 [blocks, block_tokens] views of the arena."""
        k, v = (x.numpy().view(np.uint64)[:, :, 0, 0] for x in cache.kv(group.name, layer))
        return k, v

    def add(self, request: Request) -> None:
        """Tells the engine a request's prompt; call it along with ``scheduler.add``."""
        self._history[request.request_id] = request.prompt_token_ids.tolist()

    def forward(self, step: Step) -> npt.NDArray[np.int64]:
        """Writes every new token's KV, reads every visible slot; returns the next token of each sample row."""
        if self._poison:
            self._poison_empty()
        self._tell(step)
        self._write(step)
        return np.array([self._sample(step, int(r)) for r in step.sample_rows], np.int64)

    def _poison_empty(self) -> None:
        pools = self._cache._pools  # the engine plays the hardware here, so it looks where no user would
        for g, layers in enumerate(self._views):
            base = int(pools.arrays.meta[g, 0])
            rows = layers[0][0].shape[0]
            empty = np.flatnonzero(pools.arrays.place[base : base + rows] == Place.EMPTY)
            for k, v in layers:
                k[empty] = POISON
                v[empty] = POISON

    def _tell(self, step: Step) -> None:
        """A simulated copy engine hears which blocks this forward touches, to find orders that are missing."""
        engine = self._cache._connector._engine
        if not isinstance(engine, SimulatedEngine):
            return
        reads: set[tuple[int, int]] = set()
        writes: set[tuple[int, int]] = set()
        for g, group in enumerate(self._cache.spec.groups):
            view = step.group(group.name)
            reads |= {(g, int(b)) for b in np.unique(view.block_table) if b}
            writes |= {(g, int(b)) for b in np.unique(view.slot_mapping // group.block_tokens)}
        engine.compute(reads, writes)

    def _write(self, step: Step) -> None:
        for r, request_id in enumerate(step.request_ids):
            history = self._history[request_id]
            at = slice(int(step.query_start[r]), int(step.query_start[r + 1]))
            start, end = int(step.positions[at][0]), int(step.seq_lens[r])
            tokens = step.token_ids[at].tolist()
            if history[start:end] != tokens[: len(history) - start] or len(history) < end:
                raise AssertionError(f"{request_id}: the step's tokens {start}..{end} are not the request's")
            chain = _chain(history[:end])[start:]
            for place, g, layer in _places(self._cache.spec):
                group = self._cache.spec.groups[g]
                slots = step.group(group.name).slot_mapping[at]
                blocks, offsets = np.divmod(slots, group.block_tokens)
                if np.any(blocks <= 0):
                    raise AssertionError(f"{request_id}: a new token of group {group.name} goes to the null block")
                k, v = self._views[g][layer]
                k[blocks, offsets] = _slot_values(chain, place)
                v[blocks, offsets] = _slot_values(chain, place + 1)

    def _sample(self, step: Step, r: int) -> int:
        length, total = int(step.seq_lens[r]), 0
        for place, g, layer in _places(self._cache.spec):
            group = self._cache.spec.groups[g]
            first = group.attention.first_visible(length - 1)
            blocks, offsets = np.divmod(np.arange(first, length), group.block_tokens)
            ids = step.group(group.name).block_table[r][blocks]
            for p, words in zip((place, place + 1), self._views[g][layer], strict=True):
                total += _digest(words[ids, offsets], first, p)
        token = int(total & 0xFFFFFFFFFFFFFFFF) % VOCABULARY
        self._history[step.request_ids[r]].append(token)
        return token

    def run(self, scheduler: Scheduler, requests: Sequence[Request], **watch: Any) -> dict[str, FinishedRequest]:
        """Adds ``requests`` and steps until all is done; ``watch["each_step"](step)`` is called after each commit."""
        for request in requests:
            scheduler.add(request)
            self.add(request)
        done: dict[str, FinishedRequest] = {}
        while scheduler.has_work():
            step = scheduler.schedule()
            ids = self.forward(step) if step.num_tokens else np.empty(0, np.int64)
            done |= {f.request_id: f for f in scheduler.commit(step, ids)}
            if "each_step" in watch:
                watch["each_step"](step)
            if not step.num_tokens:
                scheduler.wait(0.05)
        return done
