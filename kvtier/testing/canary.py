"""The canary engine: no neural network, but every wrong, stale, torn, missing or foreign slot changes the text.

Owns       the requests' texts, and the content of every slot of both tiers.
Promises   a forward writes the KV of its new tokens and samples as ``oracle`` has it. It also checks all content that
           its queries see, old and new, against the expected content. A difference goes into the KV that the forward
           writes, and into every later sample of the request. Slots are read through the step's exports: its block
           tables, its page lists, or its padded page lists, in turn. A state is one slot, written after a token: what a
           step goes on from is read, and what its segments leave is written. Free blocks and the unused slots of last
           pages are poisoned, with another value at every forward, in both tiers.
Does not   judge a text: the caller compares it with ``oracle.expected_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.cache.facade import KVCache
from kvtier.coordinator.request import FinishedRequest, Request
from kvtier.coordinator.scheduler import Scheduler
from kvtier.coordinator.step import GroupView, Step
from kvtier.cpu_offload.engines.simulated import SimulatedEngine
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import GroupSpec
from kvtier.pools.block_pool import BlockPools
from kvtier.pools.pool_state import Col, Place
from kvtier.testing._canary_loops import (
    digest_pages,
    poison_blocks,
    poison_tails,
    read_pages,
    residuals,
    write_slots,
)
from kvtier.testing.device import SimulatedDevice
from kvtier.testing.oracle import U64, VOCABULARY, CanaryText, Int64s, digest_of, first_read, places, seed_of

if TYPE_CHECKING:
    from torch import Tensor

Ids = npt.NDArray[np.int32]

POISON = 0x7FF8DEAD7FF80000
_EMPTY = int(Place.EMPTY)


def _words(k: Tensor, v: Tensor) -> tuple[U64, ...]:
    """K and V of a layer, or the parts of its state, as uint64 [blocks, slots of a block] views of their arena; K alone
    if there is no V."""
    words = [x.numpy().view(np.uint64) for x in (k, v) if x.shape[-1]]
    return tuple(x if x.ndim == 2 else x[:, :, 0, 0] for x in words)


def _empty(pools: BlockPools, g: int) -> Ids:
    """Group g's free blocks."""
    base, rows = pools.arrays.meta[g, Col.BASE], pools.arrays.meta[g, Col.ROWS]
    return np.flatnonzero(pools.is_own(g) & (pools.arrays.place[base : base + rows] == _EMPTY)).astype(np.int32)


@dataclass(frozen=True)
class _Text:
    """What a group keeps of the step's texts, entry by entry: of each token, or of several together."""

    chain: U64  # [N] of the new ones
    row_of: Int64s  # [N]
    known: U64  # chain values of all up to the last new one, row after row; row r's begin at offsets[r]
    offsets: Int64s  # [R]
    starts: Int64s  # [R]
    ends: Int64s  # [R]


@dataclass(frozen=True)
class _Work:
    """Reads and writes of one forward; a device may get to it long after the step was committed."""

    texts: tuple[CanaryText, ...]  # [R]
    of: tuple[_Text, ...]  # by group
    starts: Int64s  # [R]
    written: tuple[Int64s, ...]  # by group, those of its new ones with a slot: all, or after which a state is written
    slots: tuple[Int64s, ...]  # by group, theirs
    tables: tuple[Ids, ...]  # by group; of states each block is one token's
    empty: tuple[Ids, ...]  # blocks to poison
    ends: Int64s  # [R]
    samples: npt.NDArray[np.int32]
    digests: U64  # one per sample; filled by the forward
    poison: np.uint64


class CanaryEngine:
    """Runs steps on a cache whose spec comes from ``canary_spec``.

    With ``device``, forwards run on its compute stream, and forwards without samples are not waited for. Raises
    ``ValueError`` if the cache's pools share an arena and it has no host tier. Such a cache knows no copy engine, hence
    no device. It moves blocks at once, which a forward that has not run yet cannot foresee.
    """

    def __init__(self, cache: KVCache, poison: bool = True, device: SimulatedDevice | None = None) -> None:
        if device is not None and cache.copy_engine is None and cache.core.coordinator.pools.shared:
            raise ValueError("a simulated device needs a cache with a host tier, or pools that do not share an arena")
        self._cache = cache
        self._poison = poison
        self._device = device
        self._texts: dict[str, CanaryText] = {}
        self._forwards = 0
        self._are_states = [group.attention.kind is Kind.STATE for group in cache.spec.groups]
        self._views = [
            tuple(
                _words(*(cache.state if is_state else cache.kv)(group.name, layer)) for layer in range(group.num_layers)
            )
            for group, is_state in zip(cache.spec.groups, self._are_states, strict=True)
        ]
        self._all_words = [  # (place, group, words) of K and V of every layer
            (place + i, g, words)
            for place, g, layer in places(cache.spec)
            for i, words in enumerate(self._views[g][layer])
        ]
        host = cache.arenas[1] if poison else None
        self._host_words = (
            []
            if host is None
            else [[words for layer in host.views(g) for words in _words(*layer)] for g in range(len(cache.spec.groups))]
        )

    def add(self, request: Request) -> None:
        """Tells the engine a request's prompt; call it along with ``scheduler.add``."""
        self._texts[request.request_id] = CanaryText(request.tokens, seed_of(request.adapter, request.extra_keys))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._texts.pop(request_id, None)

    def forward(self, step: Step) -> Int64s:
        """Writes every new token's KV, reads every visible slot; returns the next token of each sample row."""
        work = self._prepare(step)
        self._run(work)
        ids = (work.digests % np.uint64(VOCABULARY)).astype(np.int64)
        for k, r in enumerate(step.sample_rows):
            text = self._texts[step.request_ids[r]]
            right = digest_of(self._cache.spec, text.chain[: text.count])
            if (text.misread or work.digests[k] != right) and ids[k] == right % VOCABULARY:
                ids[k] = (ids[k] + 1) % VOCABULARY  # two hashes may agree in so few tokens; a wrong slot must show
            text.append(ids[k : k + 1])
        return ids

    def take_back(self, step: Step) -> None:
        """The step whose forward has run is cancelled: its samples are no text."""
        for r in step.sample_rows:
            self._texts[step.request_ids[r]].count -= 1

    def write(self, step: Step) -> None:
        """A forward that fails after all its writes: it adds nothing to the text."""
        self._run(self._prepare(step))

    def _poison_host(self, poison: np.uint64) -> None:
        """The host's free blocks, here and now: no copy reads or writes them."""
        pools = self._cache.core.host
        if pools is None:
            return
        for g, views in enumerate(self._host_words):
            empty = _empty(pools, g)
            for words in views:
                poison_blocks(words, empty, poison)

    def _prepare(self, step: Step) -> _Work:
        self._forwards += 1
        poison = np.uint64(POISON | self._forwards & 0xFFFF)
        self._poison_host(poison)
        spec, pools = self._cache.spec, self._cache.core.coordinator.pools
        views = [step.group(group.name) for group in spec.groups]
        empty = []
        for g in range(len(spec.groups)):
            empty.append(_empty(pools, g) if self._poison else np.empty(0, np.int32))
        starts, ends = step.starts.copy(), step.seq_lens.copy()
        row_of = np.repeat(np.arange(len(starts)), ends - starts)
        texts = tuple(self._texts[name] for name in step.request_ids)
        chain, of = self._chain_of(step), dict[int, _Text]()
        for m in {group.entry_tokens for group in spec.groups}:
            known = [text.chain[m - 1 : n : m] for text, n in zip(texts, ends, strict=True)]
            last = (step.positions + 1) % m == 0
            of[m] = _Text(
                chain[last],
                row_of[last],
                np.concatenate([np.empty(0, np.uint64), *known]),
                np.cumsum(ends // m) - ends // m,
                starts // m,
                ends // m,
            )
        written, slots, tables = zip(
            *(self._places(group, view, step, row_of) for group, view in zip(spec.groups, views, strict=True)),
            strict=True,
        )
        return _Work(
            texts,
            tuple(of[group.entry_tokens] for group in spec.groups),
            starts,
            written,
            slots,
            tables,
            tuple(empty),
            ends,
            step.sample_rows.copy(),
            np.zeros(len(step.sample_rows), np.uint64),
            poison,
        )

    def _chain_of(self, step: Step) -> U64:
        """Chain values of the new tokens, which must be the requests' own."""
        chain = np.empty(step.num_tokens, np.uint64)
        for r, request_id in enumerate(step.request_ids):
            text, at = self._texts[request_id], slice(int(step.query_start[r]), int(step.query_start[r + 1]))
            start, end = int(step.positions[at.start]), int(step.seq_lens[r])
            if end > text.count or not np.array_equal(text.tokens[start:end], step.token_ids[at]):
                raise AssertionError(f"{request_id}: the step's tokens {start}..{end} are not the request's")
            chain[at] = text.chain[start:end]
        return chain

    def _places(self, group: GroupSpec, view: GroupView, step: Step, row_of: Int64s) -> tuple[Int64s, Int64s, Ids]:
        """The group's ``written``, ``slots`` and table."""
        if group.attention.kind is Kind.STATE:
            return self._states(group, view, step)
        slots = self._checked(group, view).copy()
        return np.arange(len(slots)), slots, self._table(group, view, step, row_of)

    def _states(self, group: GroupSpec, view: GroupView, step: Step) -> tuple[Int64s, Int64s, Ids]:
        """The same of a group of states: as they are or, in two forwards of three, padded."""
        count, ends = len(step.seq_lens), step.seq_lens
        rows = count + self._forwards % 4 if self._forwards % 3 else None
        source, entry, end, target = view.states(rows)
        is_real, spare = entry < count, len(self._views[self._cache.spec.index(group.name)][0][0]) - 1
        wrong = source[count:].any() or (end[~is_real] != 1).any() or (target[~is_real] != spare).any()
        source, entry, end, target = source[:count], entry[is_real], end[is_real], target[is_real]
        lasts = np.flatnonzero(np.diff(entry, append=-1))
        wrong |= not np.array_equal(entry[lasts], np.arange(count)) or not np.array_equal(end[lasts], ends)
        wrong |= not np.array_equal(source > 0, step.starts > 0) or (target < 1).any() or (target >= spare).any()
        if wrong:
            raise AssertionError(f"group {group.name}: states() makes no sense")
        table = np.zeros((count, int(ends.max(initial=0))), np.int32)
        going_on = np.flatnonzero(source)
        table[going_on, step.starts[going_on] - 1] = source[going_on]
        table[entry, end - 1] = target
        return step.query_start[entry] + end - step.starts[entry] - 1, target.astype(np.int64), table

    def _table(self, group: GroupSpec, view: GroupView, step: Step, row_of: Int64s) -> Ids:
        """The group's block table, int32 [R, W]: as exported or, in two forwards of three, from page lists."""
        form = "block_table" if group.entry_tokens > 1 else ("block_table", "paged", "padded")[self._forwards % 3]
        if form == "block_table":
            return view.block_table.copy()
        paged = view.paged()
        if form == "padded":
            paged = view.padded(len(paged[3]) + self._forwards % 4)
        table = np.zeros((len(step.seq_lens), -(-int(step.seq_lens.max(initial=0)) // group.block_tokens)), np.int32)
        chunk = group.attention.span_tokens if group.attention.kind is Kind.CHUNK else 0
        entry = int(read_pages(*paged, row_of, step.positions, chunk, group.block_tokens, table))
        if entry >= 0:
            raise AssertionError(f"group {group.name}: {form}() makes no sense at entry {entry}")
        return table

    @staticmethod
    def _checked(group: GroupSpec, view: GroupView) -> Int64s:
        slots = view.slot_mapping if group.entry_tokens == 1 else view.entries().slot
        if len(slots) and slots.min() < group.block_entries:
            raise AssertionError(f"a new token of group {group.name} goes to the null block")
        return slots

    def _run(self, work: _Work) -> None:
        """Here and now, or on the device's compute stream; waits for it if something is sampled."""
        device, engine = self._device, self._cache.copy_engine
        if device is not None:
            event = device.launch(*self._touched(work), lambda: self._compute(work))
            if len(work.samples):
                device.synchronize(event)
            return
        if isinstance(engine, SimulatedEngine):
            reads, writes = (
                set(zip(g.tolist(), b.tolist(), strict=True)) for g, b in self._touched(work, with_poison=False)
            )
            engine.compute(reads, writes)
        self._compute(work)

    def _touched(self, work: _Work, with_poison: bool = True) -> tuple[tuple[Ids, Ids], tuple[Ids, Ids]]:
        """(blocks that the forward reads, blocks that it writes), each as (groups, block ids)."""
        reads, writes = [], []
        for g, group in enumerate(self._cache.spec.groups):
            table = np.unique(work.tables[g])
            reads.append(table[table > 0])
            size = 1 if self._are_states[g] else group.block_entries
            written = np.unique(work.slots[g] // size).astype(np.int32)
            writes.append(np.concatenate([written, work.empty[g]]) if with_poison else written)
        return _flat(reads), _flat(writes)

    def _compute(self, work: _Work) -> None:
        error, groups = np.zeros(len(work.starts), np.uint64), self._cache.spec.groups
        firsts = [_first_seen(group, work.starts) for group in groups]
        for p, g, words in self._all_words:
            poison_blocks(words, work.empty[g], work.poison)
            of = work.of[g]
            residuals(words, work.tables[g], firsts[g], of.starts, of.known, of.offsets, p, error)
        for p, g, words in self._all_words:
            self._write(work, p, g, words, error)
            if self._poison:
                poison_tails(words, work.tables[g], work.of[g].ends, work.poison)
        lasts = [
            np.array([first_read(group.attention, n - 1) // group.entry_tokens for n in work.ends.tolist()], np.int64)
            for group in groups
        ]
        firsts = [
            last if is_state else first for first, last, is_state in zip(firsts, lasts, self._are_states, strict=True)
        ]
        self._look_again(work, firsts, lasts, error)
        for p, g, words in self._all_words:
            seen, ends = lasts[g][work.samples], work.of[g].ends[work.samples]
            digest_pages(words, work.tables[g], work.samples, seen, ends, p, work.digests)

    def _write(self, work: _Work, p: int, g: int, words: U64, error: U64) -> None:
        """Writes the new tokens of one place of group g."""
        at = work.written[g]
        write_slots(words, work.slots[g], work.of[g].chain[at], p, work.of[g].row_of[at], error)

    def _look_again(self, work: _Work, firsts: list[Int64s], lasts: list[Int64s], error: U64) -> None:
        """Compares all content that the new tokens see, after all writes. A sample's digest has its last token's
        content."""
        late, stops = np.zeros_like(error), [of.ends.copy() for of in work.of]
        for stop, last in zip(stops, lasts, strict=True):
            stop[work.samples] = last[work.samples]
        is_more = [bool((first < stop).any()) for first, stop in zip(firsts, stops, strict=True)]
        for p, g, words in self._all_words:
            if is_more[g]:
                residuals(words, work.tables[g], firsts[g], stops[g], work.of[g].known, work.of[g].offsets, p, late)
        if late.any():
            for p, g, words in self._all_words:
                self._write(work, p, g, words, error + late)
        for r in np.flatnonzero(error | late):
            work.texts[r].misread = True

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


def _first_seen(group: GroupSpec, positions: Int64s) -> Int64s:
    """The first entry that each of these positions sees."""
    return np.array([group.attention.first_visible(n) // group.entry_tokens for n in positions.tolist()], np.int64)


def _flat(by_group: Sequence[Ids]) -> tuple[Ids, Ids]:
    groups = np.repeat(np.arange(len(by_group), dtype=np.int32), [len(blocks) for blocks in by_group])
    return groups, np.concatenate(by_group).astype(np.int32)
