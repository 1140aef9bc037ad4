"""What stays warm: which content of a request's row is superseded, and goes to the cold end when it is released.

Owns       what each row has superseded. ``Boundaries`` knows which ends pay, ``Returns`` whether whole texts stay.
Promises   no block that a kept end of the row needs is superseded. What windows pass on their way is never stored.
Does not   decide what is stored: ``StorePolicy`` does. It caches and evicts nothing: ``superseded`` of rows and of
           transfers carries its answer to the release of the blocks.

A conversation's boundary is hit once, by its next turn. Then this turn's own boundary supersedes it. The boundary of a
prompt that many share is hit over and over. Windows make the difference costly: for a short turn, most of the kept
content is the windows' content at its end. So content is *superseded* if a request has moved on from it, no other
request is known to want it, and ends of its kind do not pay. All content of a *guest* is. So are an
answer's full blocks, if nothing of answers is found again. The pools and the host give superseded content up first.
Columns, flags and signs of that name say which blocks it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.boundaries import SLACK, Boundaries, End, needed_from
from kvtier.coordinator.match import Match
from kvtier.coordinator.returns import NEVER, NOTHING, Bytes, Returns, TextBytes
from kvtier.coordinator.tracked import Tracked
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.geometry.options import StoreMode
from kvtier.geometry.spec import Kind
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.pools.block_pool import BlockPools, Col, Ids

LONG = 2**17
"""Tokens of a text that is mostly full attention's."""
MOST_TOLD = 32
"""Of a request's boundaries: the last ones."""


class Retention:
    """Which content of requests stays warm: on the device and, if ``mode`` stores blocks, in the host."""

    def __init__(self, tables: BlockTables, host: BlockPools | None, stores: StorePolicy, mode: StoreMode) -> None:
        spec = tables.spec
        self._spec = spec
        self._pools = tables.pools
        self._tables = tables
        self._stores = stores
        self._mode = mode
        self.boundaries = Boundaries()
        """Where prompts were found again."""
        self._passes = not mode.before_eviction  # else what is passed would be stored
        self._laundered = np.empty(0, np.int64)  # the pools' counts when the margin was last refilled
        self._is_local = np.array([group.attention.kind is not Kind.FULL for group in spec.groups])
        self._has_full = not self._is_local.all()
        self._local = [group for group in spec.groups if group.attention.kind is not Kind.FULL]
        self._block_tokens = np.array([g.block_tokens for g in spec.groups], np.int64)
        self._host = host
        self._sizes = TextBytes(spec.groups)
        whole = self._room(self._sizes.of(LONG), 0)
        self.returns = Returns(self._sizes, spec.hit_tokens, spec.hash_tokens, whole)
        """What came back, and after how much else."""

    # --- a request's way --------------------------------------------------------------------------

    def start(self, seq: Tracked, match: Match, is_all: bool) -> None:
        """The request begins in its row with this hit: the hit's boundary is wanted from now on.

        ``is_all``: there is no tier behind the host, so the request may be a guest.

        If no request has wanted it before, the request is a conversation that goes on. Then the windows' content at
        this boundary is superseded by the content that the request leaves at its own end, unless such ends pay.
        """
        n, known, stop = match.num_tokens, self.boundaries, match.num_tokens
        hit, full = (self._key(seq, n), n) if n else None, match.full_tokens if self._has_full else n
        if not seq.has_begun:  # else it finds what it has left itself
            known.learn(hit, (self._key(seq, full), full) if full > n else None)
        length = len(seq.tokens)
        last = min(self.last_boundaries(length))
        goes_on = hit is not None and known.want(hit[0]) and n < last and known.leave(hit[0])
        seq.named_from = seq.slack_from = NEVER
        if self._local:
            passes, slack = self._passes and known.pays(End.PASSED), known.pays(End.PROMPT) and known.pays(End.SHORT)
            if passes or slack:
                first = min(needed_from(g.attention, last) for g in self._local)
                seq.slack_from = first if slack else NEVER
                seq.named_from, stop = (n, max(n, self._kept_from(seq, last))) if passes else (first, stop)
        if seq.request.boundaries:
            seq.told = self._told(seq, n)
        seq.went_on_from = n if goes_on and not known.pays(End.LEFT) else 0
        gone = NEVER if seq.has_begun else self._note_return(seq, length, n, full, is_all)
        cold = (n, NEVER, n) if seq.is_guest else (0 if seq.went_on_from else n, stop, gone)
        self._tables.arrays.superseded[seq.row] = cold
        seq.has_begun = True

    def _note_return(self, seq: Tracked, length: int, hit: int, full: int, is_all: bool) -> int:
        """Learns what it has in common with earlier texts, and after how much else it comes. Returns the first
        token of its tail, if tails go first, else NEVER.

        If the stem is no longer there, it is kept now as it is where prompts are seen to part.
        """
        each, unit = self._sizes.of(length), self._spec.hit_tokens
        room = self._room(each, self._pools.column(Col.HELD))
        is_guest, seq.before = self.returns.begin(seq.keys, hit // unit, room, float(each.sum()))
        seq.is_guest = is_guest and is_all
        stem = 0 if seq.before.goes_on else seq.before.units * unit
        if self._local and stem > full:
            seq.branches.add(stem)
        return self.returns.cold_from(seq.before, hit) if stem else NEVER

    def _room(self, each: Bytes, held: Any) -> float:
        """Bytes for texts of which ``each`` group has such a part, beside the blocks that are ``held``, by group."""
        room = 0.0 if self._host is None else self._sizes.room(self._host, each)
        if not self._mode.keeps_copies:  # else what is on the device is in the host too
            room += self._sizes.room(self._pools, each, held)
        return room

    def has_lost(self, seq: Tracked, match: Match) -> bool:
        """Whether a hit is less than half of what the waiting request has in common with an earlier text."""
        if seq.before is None:  # each step asks anew
            seq.before = self.returns.known(seq.keys)
        unit = self._spec.hit_tokens
        return 2 * match.num_tokens < min(seq.before.units, (len(seq.tokens) - 1) // unit) * unit

    def _told(self, seq: Tracked, hit: int) -> set[int]:
        """The boundaries beyond the hit that the request's caller has told of, if it is worth to keep them."""
        unit = self._spec.hit_tokens
        told = {n // unit * unit for n in seq.request.boundaries[-MOST_TOLD:] if n // unit * unit > hit}
        for boundary in told:
            self.boundaries.end(self._key(seq, boundary), End.STEM)
        return told if self.boundaries.pays(End.STEM) else set()

    def superseded(self, seq: Tracked, groups: Ids, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which blocks of the request's hit are superseded, bool [n]. Block n is logical block ``at`` [n] of its group.

        They are the blocks that hits at the request's own end, or shortly before it, will not need either.
        """
        start, stop, _ = self._tables.arrays.superseded[seq.row]
        last = min(self.last_boundaries(len(seq.tokens)))
        needed = [min(g.attention.first_visible(last), seq.slack_from) for g in self._spec.groups]
        gone = np.array(needed) // self._block_tokens
        first = at * self._block_tokens[groups]
        superseded: npt.NDArray[np.bool_] = (
            self._is_local[groups] & (at < gone[groups]) & (start <= first) & (first < stop)
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
        superseded = self._tables.arrays.superseded
        sealed = [b for b in sorted(seq.branches | seq.told) if computed < b <= end]
        for boundary in sealed:
            self._tables.seal_anchors(seq.row, [boundary], seq.keys)
            name = self._key(seq, boundary)
            if boundary in seq.branches:
                self.boundaries.want(name)
            if not (seq.is_guest and self.boundaries.is_end(name)):  # else it is a guest's own end, which has gone
                superseded[seq.row] = np.maximum(superseded[seq.row], boundary)
            seq.branches.discard(boundary)
            seq.told.discard(boundary)
        return sealed

    def seal_passing(self, seq: Tracked, end: int) -> None:
        """Tokens up to ``end``, which is beyond ``named_from``, are computed: names what windows let go of and hits may
        need.

        From ``slack_from`` on, shortly before the prompt's end, that is all. Before that, it is superseded content.
        """
        lo, (start, stop) = self._tables.arrays.lo[:, seq.row], self._tables.arrays.superseded[seq.row, :2].tolist()
        anchor = (end - 1) // self._spec.hit_tokens * self._spec.hit_tokens
        for g, group in enumerate(self._spec.groups):
            if self._is_local[g]:
                bt, see = group.block_tokens, group.attention.first_visible
                first, passed = max(int(lo[g]), start // bt), min(stop, see(anchor)) // bt
                if passed > first and self._pools.num_spare(g) >= passed - first:
                    self._tables.seal(seq.row, g, first, passed, seq.keys, is_told=False)
                if end > seq.slack_from:
                    first = max(int(lo[g]), seq.slack_from // bt)
                    self._tables.seal(seq.row, g, first, end // bt, seq.keys)

    def seal_prompt(self, seq: Tracked, end: int) -> None:
        """All ``end`` known tokens are computed, and the request decodes from here on: names the blocks of hits at
        their end.

        The content at the request's own end will supersede them, unless other requests have wanted them, or prompts'
        ends pay.
        """
        self._seal_anchors(seq, end)
        ends, superseded = self._note_ends(seq, end, End.PROMPT), self._tables.arrays.superseded
        unit = self._spec.hit_tokens
        for b in range(max(unit, ends[0] - SLACK // unit * unit), ends[0], unit) if ends else ():
            self.boundaries.end(self._key(seq, b), End.SHORT)
        if seq.is_guest or not self._local:
            return
        if ends and any(self.boundaries.is_wanted(self._key(seq, b)) for b in ends):
            superseded[seq.row, :2] = ends[-1]
        elif ends and self.boundaries.pays(End.PROMPT):
            superseded[seq.row, :2] = np.minimum(superseded[seq.row, :2], self._kept_from(seq, ends[0]))
        elif ends:
            superseded[seq.row, 1] = ends[-1]

    def seal_end(self, seq: Tracked, comes_back: bool) -> None:
        """The request is about to leave its row: names the blocks that hits at the end of its text need.

        They stay warm if it comes back, or if such ends pay. If nothing of answers is found again, the answer's full
        blocks are superseded too.
        """
        end, pays = int(self._tables.arrays.computed[seq.row]), self.boundaries.pays
        is_answer = end > len(seq.request.tokens)
        stays = comes_back or pays(End.ANSWER) or (pays(End.PROMPT) and not is_answer)
        if stays or not is_answer:
            self._seal_anchors(seq, end)
        if comes_back:
            seq.is_guest, self._tables.arrays.superseded[seq.row, 2] = False, NEVER
        else:
            unit = self._spec.hit_tokens
            self.returns.end(seq.keys, min(len(seq.request.tokens), end) // unit, end // unit, seq.before or NOTHING)
            if is_answer and not stays and not pays(End.PASSED):
                cold = self._tables.arrays.superseded[:, 2]
                cold[seq.row] = min(cold[seq.row], max(self.last_boundaries(len(seq.request.tokens))))
        if stays and self._local and not seq.is_guest:
            stop = self._tables.arrays.superseded[:, 1]
            last = min(self.last_boundaries(end))
            stop[seq.row] = min(stop[seq.row], *(g.attention.first_visible(last) for g in self._local))
        if is_answer and not comes_back:
            self._note_ends(seq, end, End.ANSWER)

    def _note_ends(self, seq: Tracked, num_tokens: int, end: End) -> list[int]:
        """The last boundaries of these tokens, which are ends from now on."""
        boundaries = sorted(self.last_boundaries(num_tokens) - {0})
        for boundary in boundaries:
            self.boundaries.end(self._key(seq, boundary), end)
        return boundaries

    def _kept_from(self, seq: Tracked, boundary: int) -> int:
        """The first token that a hit at the prompt's end, ``boundary``, needs in any local group; and if slack is kept,
        hits shortly before it."""
        return min(seq.slack_from, *(group.attention.first_visible(boundary) for group in self._local))

    def cool_in_host(self, seq: Tracked) -> None:
        """If the mode ``keeps_copies``: the host's copies of what the request's end supersedes become the oldest."""
        start, stop, gone = self._tables.arrays.superseded[seq.row].tolist()
        if not self._mode.keeps_copies or seq.is_guest:
            return
        for g, group in enumerate(self._spec.groups):
            bt, see = group.block_tokens, group.attention.first_visible
            first, end = max(start, see(stop)), stop
            if not self._is_local[g]:
                first, end = gone, int(self._tables.arrays.computed[seq.row])
            first, end = first // bt, end // bt
            if end > first:
                units = bt // self._spec.hash_tokens
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
        self._stores.launder(self._pools, *coldest, ahead=True)

    # --- names -----------------------------------------------------------------------------------

    def _seal_anchors(self, seq: Tracked, computed: int) -> None:
        """Names the blocks of hits at the last boundary, and at the last boundary before the last token."""
        if seq.anchored_at == computed:
            return
        seq.anchored_at = computed
        self._tables.seal_anchors(seq.row, self.last_boundaries(computed), seq.keys)

    def last_boundaries(self, num_tokens: int) -> set[int]:
        """The last hits on these tokens: on all of them, and on the same tokens sent again, less the last token."""
        unit = self._spec.hit_tokens
        return {num_tokens // unit * unit, max(0, num_tokens - 1) // unit * unit}

    def _key(self, seq: Tracked, boundary: int) -> bytes:
        """The name of the request's tokens up to ``boundary``, a positive multiple of hit_tokens."""
        name: bytes = seq.keys[boundary // self._spec.hash_tokens - 1].tobytes()
        return name
