"""What stays warm in the rows of a cache: acts on what ``Keeping`` decides of each request's text.

Owns       what each row has superseded.
Promises   what windows pass on their way is never stored. What is superseded goes to the cold end when it is released.
Does not   decide which content that is (``Keeping``), nor what is stored (``StorePolicy``). It caches and evicts
           nothing: ``superseded`` of rows and of transfers carries the answer to the release of the blocks.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.keeping import Keeping, Mask, Text
from kvtier.coordinator.match import Match
from kvtier.coordinator.returns import Bytes, TextBytes
from kvtier.coordinator.tracked import Tracked
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.geometry.keys import KeyArray
from kvtier.geometry.kinds import Kind
from kvtier.geometry.options import StoreMode
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.pools.block_pool import BlockPools, Col, Ids

LONG = 2**17
"""Tokens of a text that is mostly full attention's."""


class Retention:
    """Which content of requests stays warm: on the device and, if ``mode`` stores blocks, in the host."""

    def __init__(self, tables: BlockTables, host: BlockPools | None, stores: StorePolicy, mode: StoreMode) -> None:
        spec = tables.spec
        self._spec = spec
        self._pools = tables.pools
        self._tables = tables
        self._stores = stores
        self._mode = mode
        self._laundered = np.empty(0, np.int64)  # the pools' counts when the margin was last refilled
        self._is_local = np.array([group.attention.kind is not Kind.FULL for group in spec.groups])
        self._block_tokens = np.array([g.block_tokens for g in spec.groups], np.int64)
        self._host = host
        self._sizes = TextBytes(spec.groups)
        passes = not mode.before_eviction  # else what is passed would be stored
        whole = self._room(self._sizes.of(LONG), np.int64(0))
        self.keeping = Keeping(spec.groups, spec.hit_tokens, spec.hash_tokens, whole, passes, tables.has_states)
        """What is decided."""

    # --- a request's way --------------------------------------------------------------------------

    def start(self, seq: Tracked, match: Match, is_all: bool) -> None:
        """The request begins in its row with this hit. ``is_all``: there is no tier behind the host, so the request may
        be a guest."""
        held = self._pools.column(Col.HELD)
        told, salt = seq.request.boundaries, seq.request.cache_salt
        text = Text(seq.keys, len(seq.tokens), match.num_tokens, match.full_tokens, told, is_all, tenant=_tenant(salt))
        self.keeping.begin(seq.course, text, lambda each: self._room(each, held))
        self._mark(seq)

    def _mark(self, seq: Tracked) -> None:
        course = seq.course
        self._tables.arrays.superseded[seq.row] = course.cold_from, course.cold_to, course.gone_from

    def _room(self, each: Bytes, held: npt.NDArray[np.int64] | np.int64) -> float:
        """Bytes for texts of which ``each`` group has such a part, beside the blocks that are ``held``, by group."""
        room = 0.0 if self._host is None else self._sizes.room(self._host, each)
        if not self._mode.keeps_copies:  # else what is on the device is in the host too
            room += self._sizes.room(self._pools, each, held)
        return room

    def superseded(self, seq: Tracked, groups: Ids, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which blocks of the request's hit are superseded, bool [n]. Block n is logical block ``at`` [n] of its group.

        They are the blocks that hits at the request's own end, or shortly before it, will not need either.
        """
        course, gone = seq.course, np.array(self.keeping.needed(seq.course, len(seq.tokens))) // self._block_tokens
        first = at * self._block_tokens[groups]
        superseded: npt.NDArray[np.bool_] = (
            self._is_local[groups] & (at < gone[groups]) & (course.cold_from <= first) & (first < course.cold_to)
        )
        return superseded

    def keep_in_host(self, seq: Tracked, groups: Ids, blocks: Ids, at: npt.NDArray[np.int64]) -> None:
        """If the mode ``keeps_copies``: a hit on the device counts as use in the host tier too. Content that the host
        has evicted is stored again. ``at`` as in ``superseded``. A preempted request hits its own blocks here too."""
        if self._mode.keeps_copies:
            keys = self._pools.arrays.key[self._pools.entries(groups, blocks)]
            self._stores.touch_or_store(groups, blocks, keys, self.superseded(seq, groups, at))

    def seal_branches(self, seq: Tracked, computed: int, end: int) -> list[int]:
        """Tokens from ``computed`` to ``end`` are there now: names the blocks of hits at branches, which others want,
        and at the boundaries that the caller has told of. Returns them."""
        parted = self.keeping.parted(seq.course, computed, end)
        for boundary in parted:
            self._tables.seal_anchors(seq.row, [boundary], seq.keys)
            self.keeping.part(seq.course, seq.keys, boundary)
            self._mark(seq)
        return parted

    def seal_passing(self, seq: Tracked, end: int) -> None:
        """Tokens up to ``end``, which is beyond ``named_from``, are computed: names what windows let go of and hits may
        need.

        Up to ``behind_to``, and from ``slack_from`` on, shortly before the prompt's end, that is all. Between the two
        it is superseded content.
        """
        course, lo = seq.course, self._tables.arrays.lo[:, seq.row]
        anchor = (end - 1) // self._spec.hit_tokens * self._spec.hit_tokens
        for g, group in enumerate(self._spec.groups):
            if self._is_local[g]:
                bt, see = group.block_tokens, group.attention.first_visible
                first, passed = max(int(lo[g]), course.cold_from // bt), min(course.cold_to, see(anchor)) // bt
                if passed > first and self._pools.num_spare(g) >= passed - first:
                    self._tables.seal(seq.row, g, first, passed, seq.keys, is_told=False)
                for start, stop in ((course.behind_from, course.behind_to), (course.slack_from, end)):
                    first, last = max(int(lo[g]), start // bt), min(stop, end) // bt
                    if first < last:
                        self._tables.seal(seq.row, g, first, last, seq.keys)

    def seal_prompt(self, seq: Tracked, end: int) -> None:
        """All ``end`` known tokens are computed, and the request decodes from here on: names the blocks of hits at
        their end."""
        self._seal_anchors(seq, end)
        self.keeping.end_prompt(seq.course, seq.keys, end)
        self._mark(seq)

    def seal_end(self, seq: Tracked, comes_back: bool) -> None:
        """The request is about to leave its row: names the blocks that hits at the end of its text need, if that end is
        kept."""
        end, prompt = int(self._tables.arrays.computed[seq.row]), len(seq.request.tokens)
        if self.keeping.names_end(seq.course, end > prompt, comes_back):
            self._seal_anchors(seq, end)
        self.keeping.end(seq.course, seq.keys, end, end > prompt, comes_back)
        if not comes_back:
            self.keeping.leave(seq.course, seq.keys, min(prompt, end), end)
        self._mark(seq)

    def cool_states(self, seq: Tracked, end: int) -> None:
        """The request's text has ended after ``end`` tokens. Of its states before that, one is as young as its K and V
        from now on; the others go first, unless others want them."""
        states = np.array(self._tables.state_groups, np.int32)

        def there(names: KeyArray) -> tuple[Mask, Mask]:
            found = self._pools.find(*_of_each(states, names)) > 0
            if self._host is not None and self._mode.keeps_copies:
                found |= self._host.find(*_of_each(states, names)) > 0
            by_group = found.reshape(len(states), len(names))
            return np.logical_and.reduce(by_group), np.logical_or.reduce(by_group)

        kept, cold = self.keeping.outrun(seq.course, seq.keys, end, end > len(seq.request.tokens), there)
        self._use(*_of_each(states, kept))
        self._use(*_of_each(states, cold), cold=True)

    def _use(self, groups: Ids, keys: KeyArray, cold: bool = False) -> None:
        """Content with these keys that nobody holds becomes the newest, or the oldest, as do copies if the mode
        ``keeps_copies``."""
        if self._mode.keeps_copies:
            self._stores.touch(groups, keys, cold)
        blocks = self._pools.find(groups, keys)
        free = (blocks > 0) & (self._pools.arrays.refs[self._pools.entries(groups, blocks)] == 0)
        self._pools.acquire(groups[free], blocks[free])
        self._pools.release(groups[free], blocks[free], cold)

    def cool_in_host(self, seq: Tracked) -> None:
        """If the mode ``keeps_copies``: the host's copies of what the request's end supersedes become the oldest."""
        if not self._mode.keeps_copies or seq.course.is_guest:
            return
        computed, hash_tokens = int(self._tables.arrays.computed[seq.row]), self._spec.hash_tokens
        for g, (first, end) in enumerate(self.keeping.gone(seq.course, computed)):
            if end > first:
                units = self._spec.groups[g].block_tokens // hash_tokens
                keys = np.ascontiguousarray(seq.keys[(first + 1) * units - 1 : end * units : units])
                self._stores.touch(np.full(len(keys), g, np.int32), keys, cold=True)

    # --- ahead of need ----------------------------------------------------------------------------

    def launder(self, margin_tokens: int) -> None:
        """Mode ``before_eviction``: starts copies of the coldest blocks. A margin of clean ones is ready ahead of need.

        Only after blocks have changed hands: else there is nothing new to copy.
        """
        if not self._mode.before_eviction:
            return
        seen = np.stack([self._pools.free, self._pools.column(Col.EMPTY), self._pools.column(Col.EVICTED)])
        if np.array_equal(seen, self._laundered):
            return
        self._laundered = seen
        margin = np.maximum(self._pools.owned // 20, -(-margin_tokens // self._block_tokens))
        lacking = margin - self._pools.column(Col.EMPTY) - self._pools.unused
        coldest = self._pools.coldest_of(np.minimum(lacking, self._pools.owned))
        self._stores.launder(self._pools, *coldest)

    # --- names -----------------------------------------------------------------------------------

    def _seal_anchors(self, seq: Tracked, computed: int) -> None:
        """Names the blocks of hits at the last boundary, and at the last boundary before the last token."""
        if seq.anchored_at == computed:
            return
        seq.anchored_at = computed
        self._tables.seal_anchors(seq.row, self.keeping.last_boundaries(computed), seq.keys)


def _of_each(groups: Ids, keys: KeyArray) -> tuple[Ids, KeyArray]:
    """These keys in each of the groups."""
    return np.repeat(groups, len(keys)), np.tile(keys, (len(groups), 1))


def _tenant(salt: str | None) -> bytes | None:
    """A name of 16 bytes for a salt of any length, which need not be Unicode text."""
    return None if salt is None else blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
