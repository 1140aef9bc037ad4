"""A token sequence of an engine with its own device memory: its hits, loads and stores in the host tier.

Owns       which parts of the sequence are stored, and which parts other sequences want.
Promises   the host tier keeps the window and chunk blocks that hits need. Hits end at the ends of prompts and of texts,
           and at the boundaries of parting prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.boundaries import needed_from
from kvtier.coordinator.keeping import Course, Text
from kvtier.coordinator.partings import SLACK
from kvtier.coordinator.returns import LOOK, NEVER, NOTHING, Before, Bytes
from kvtier.cpu_offload.transfer import Direction
from kvtier.geometry.kinds import BOUND, Kind
from kvtier.gpu_pool.row_state import Geo
from kvtier.host_tier.keys import Reads, TextKeys
from kvtier.host_tier.parts import HostHit, HostParts, Question
from kvtier.machine.arguments import NO_KEYS, KeyArray, block_ids, check_function, flag, whole
from kvtier.machine.errors import InvalidRequest, StepError
from kvtier.machine.integers import shown
from kvtier.pools.block_pool import Ids

Int64s = npt.NDArray[np.int64]
BlocksOf = Callable[[int, Int64s], Ids]
"""Device blocks of a group's logical blocks, int64 [n], ascending: int32 [n], negative for what is not there."""

_NO_IDS, _NO_PLACES = np.empty(0, np.int32), np.empty(0, np.int64)
ROOM = 0.9
"""The part of the tier that wanted content is reckoned to fill. In the rest lies what texts have left behind: until it
has aged, and in slabs that hold something else too, since the tier moves nothing."""


class HostText:
    """A token sequence of the engine. ``keys``, uint64 [n, 2]: key i names the tokens up to (i + 1) * hash_tokens.

    No two keys are equal; ``are_distinct``: that need not be looked at. Close each text: until then its hit stays held.
    """

    def __init__(self, parts: HostParts, keys: KeyArray, with_remote: bool = True, are_distinct: bool = False) -> None:
        self._parts = parts
        self._with_remote = flag(with_remote, "with_remote")
        self._sought: Question | None = None  # what it has asked the remote
        self._keys = TextKeys(flag(are_distinct, "are_distinct"))
        if keys is not NO_KEYS:
            self._keys.add(keys)
        self._epoch = parts.connector.ledger.epoch
        self._is_closed = False
        parts.num_texts += 1
        self._name = parts.num_texts
        self._hit: HostHit | None = None
        self._stored = 0  # tokens up to which the full groups' blocks were planned
        self._course = Course()  # what of it stays
        self._end = 0  # tokens at its last end so far, the prompt's or its own
        self._is_left = False  # that end is its own

    def extend(self, keys: KeyArray) -> None:
        """More keys, at the end."""
        self._check_open()
        self._keys.add(keys)

    def announce(self, count: int, read: Reads) -> None:
        """There are ``count`` keys now, not fewer than before, of fewer than 2**31 tokens.

        ``read(first, end)`` gives some of them, uint64 [end - first, 2], once they are needed. What needs them raises
        ``InvalidRequest`` if it gives anything else. No two may be equal: that is not looked at.
        """
        self._check_open()
        count = whole(count, "count")
        self._check_tokens(count * self._parts.spec.hash_tokens, "count")
        self._keys.announce(count, read)

    # --- what is there ----------------------------------------------------------------------------

    def match(self, start: int, num_tokens: int, ask_remote: bool = False) -> HostHit:
        """The longest hit beyond ``start``; at least one of ``num_tokens`` is left. The device has all tokens before
        ``start``.

        It is held, in place of the previous hit. A ``start`` that is not a multiple of hit_tokens has no hit.
        ``ask_remote``: if the hit is short of the text, the remote is asked, once. While it is asked (for
        half the time that the tokens take to compute, ``HostTier.estimate_compute``), or its blocks are being fetched,
        the hit is empty and ``is_sought``.
        """
        parts, unit = self._parts, self._parts.spec.hit_tokens
        self._check_open()
        start, num_tokens = whole(start, "start"), whole(num_tokens, "num_tokens")
        flag(ask_remote, "ask_remote")
        num_tokens = min(num_tokens, self._keys.count * parts.spec.hash_tokens + 1)
        nothing = HostHit(start, start, _NO_IDS, _NO_PLACES, _NO_IDS)
        if start % unit or start >= num_tokens or self._is_outdated:
            self.drop()
            return nothing
        remote = parts.door.remote if ask_remote and self._with_remote else None
        if start == 0 and remote is None and not self._course.has_begun and self._begins_like_none(num_tokens):
            return nothing  # nor has it held any: it has begun just now
        keys = self._keys.first(self._keys.count)
        self.drop()
        if remote is not None and self._sought is not None:
            remote.poll()
            if parts.door.is_waiting(self._sought):
                return replace(nothing, is_sought=True)
        found = parts.matcher.match(parts, keys, num_tokens, start=start)
        if remote is not None and self._sought is None and not found.pending:
            self._sought = Question(keys, range(num_tokens), found)
            if parts.door.is_waiting(self._sought):
                parts.asking.add(self._sought)
                return replace(nothing, is_sought=True)
        if not self._course.has_begun:
            self._begin(keys, max(start, found.num_tokens), found.full_tokens, num_tokens)
        if found.full_tokens > found.num_tokens:
            self._course.branches.add(found.full_tokens)
        if found.num_tokens <= start:
            return nothing
        had = found.num_tokens if self._sought is None else max(start, self._sought.found.num_tokens)
        new = max(0, found.num_tokens - had)
        hit = HostHit(start, found.num_tokens, found.groups, found.at, found.host, found.pending, from_remote=new)
        if not hit.is_pending:
            self._hold(hit)
        return hit

    def _begins_like_none(self, num_tokens: int) -> bool:
        """Whether the first keys alone tell that nothing of a long text is there, or remembered. Then it has begun."""
        parts, ht = self._parts, self._parts.spec.hash_tokens
        few = LOOK * parts.spec.hit_tokens // ht
        if self._keys.count <= 2 * few:
            return False
        keys, groups = self._keys.first(few)[:few], parts.full
        if not len(groups) or parts.pools.find(groups, keys[parts.first_of_full]).all():
            return False
        before = parts.keeping.returns.known(keys)
        if before is not NOTHING:
            return False
        self._begin(keys, 0, 0, num_tokens, before)
        return True

    def _begin(self, keys: KeyArray, hit: int, full: int, num_tokens: int, before: Before | None = None) -> None:
        """The first match, of a text of ``num_tokens`` tokens that begins with these keys."""
        parts = self._parts
        is_all = parts.door.remote is None

        def room(each: Bytes) -> float:
            return ROOM * (parts.room_of_slabs or parts.keeping.sizes.room(parts.pools, each))

        text = Text(keys, num_tokens, hit, full, may_be_guest=is_all, before=before)
        parts.keeping.begin(self._course, text, room)

    def _hold(self, hit: HostHit) -> None:
        self._hit = self._parts.held[self._name] = hit
        self._parts.connector.pin_host(hit.groups, hit.hosts)

    @property
    def held(self) -> HostHit | None:
        """The hit that is held; None if there is none."""
        return self._hit

    @property
    def _is_outdated(self) -> bool:
        """Whether the tier was reset since."""
        return self._epoch != self._parts.connector.ledger.epoch

    def _check_open(self) -> None:
        self._parts.check_open()
        if self._is_closed:
            raise StepError("this text is closed")

    def _check_tokens(self, tokens: int, name: str) -> None:
        if tokens >= BOUND:
            raise InvalidRequest(f"{name}: a text has fewer than 2**31 tokens, got {shown(tokens)}")

    def drop(self) -> None:
        """Ends the hold."""
        if self._hit is not None:
            hit, self._hit = self._hit, None
            del self._parts.held[self._name]
            self._parts.connector.unpin_host(hit.groups, hit.hosts)

    def load(self, blocks: Ids) -> int:
        """Starts to load the held hit into device blocks, int32 [n], one for each of the hit's; returns the ticket.

        The engine keeps these blocks, and reads none of them, until ``HostTier.poll`` reports the load's end.
        """
        parts, hit = self._parts, self._hit
        self._check_open()
        if hit is None or self._is_outdated:
            self.drop()
            raise StepError("nothing is held: match first" if hit is None else "the tier was reset since the match")
        blocks = block_ids(blocks)
        if len(blocks) != len(hit.hosts):
            raise InvalidRequest(f"the hit is {len(hit.hosts)} blocks; got {len(blocks)} to load them into")
        parts.check_blocks(hit.groups, blocks)
        places = np.sort(parts.device.entries(hit.groups, blocks))
        if np.any(places[1:] == places[:-1]):
            raise InvalidRequest("two of the hit's blocks are to be loaded into one device block")
        loads = [t for t in parts.connector.ledger.live() if t.direction is Direction.LOAD]
        if any(np.isin(parts.device.entries(t.groups, t.device), places).any() for t in loads):
            raise InvalidRequest("a load still writes to one of these device blocks; poll() tells of its release")
        parts.overwrite(hit.groups, blocks)
        keys = self._names(hit.groups, hit.at)
        ticket = parts.connector.load(hit.groups, hit.hosts, blocks, keys, np.zeros(len(blocks), bool))
        parts.loads[ticket] = False
        self.drop()
        return ticket

    def part(self, boundary: int) -> None:
        """Others are known to part from the text at this boundary: the blocks of hits there are stored as it passes.

        A boundary is a multiple of ``HostTier.hit_tokens``, below 2**31. One that has passed is too late, and ignored.
        """
        self._check_open()
        boundary, unit = whole(boundary, "boundary"), self._parts.spec.hit_tokens
        self._check_tokens(boundary, "boundary")
        if not boundary or boundary % unit:
            raise InvalidRequest(f"boundary must be a multiple of hit_tokens, {unit:,}, got {boundary:,}")
        if boundary > self._stored:
            self._course.branches.add(boundary)

    @property
    def next_parting(self) -> int:
        """The last boundary at which others are known to part from it and whose blocks it has not stored; 0: none."""
        return max(self._course.branches, default=0)

    # --- what is given ----------------------------------------------------------------------------

    def computed(self, tables: Sequence[Ids], end: int, is_end: bool = False) -> None:
        """The engine has computed the tokens up to ``end``: plans the stores of blocks that other requests may ask for.

        ``tables[g]``: device blocks of group g by logical block, int32; a negative block is not there any more. Full
        groups store their full blocks. Window, chunk and state groups store the blocks of hits at the boundaries of
        parting prompts. With ``is_end`` (of the prompt, of the text) they also store the last boundaries' blocks. Full
        groups then store earlier blocks that had found no room. Blocks that the tier has already count as used again.
        The next ``poll`` submits the stores.
        """
        self._check_open()
        if not isinstance(tables, (list, tuple)):
            raise InvalidRequest(f"tables must be a list of block ids by group, got {shown(tables)}")
        if len(tables) != len(self._parts.spec.groups):
            raise InvalidRequest(f"there are {len(self._parts.spec.groups)} groups, and {len(tables)} tables")
        known = [block_ids(table) for table in tables]
        self.computed_by(lambda g, at: _taken(known[g], at), end, is_end)

    def computed_by(self, blocks_of: BlocksOf, end: int, is_end: bool = False) -> None:
        """``computed`` for an engine whose tables are no arrays: it is asked for the blocks that matter only."""
        parts = self._parts
        self._check_open()
        end = whole(end, "end")
        check_function(blocks_of, "blocks_of")
        flag(is_end, "is_end")
        if self._is_outdated:
            return
        known, keeping, course = min(end, self._keys.count * parts.spec.hash_tokens), parts.keeping, self._course
        keys = self._keys.first(known // parts.spec.hash_tokens)
        end = end if end - known < parts.spec.hash_tokens else known
        parted, is_answer = keeping.parted(course, self._stored, known), course.prompt_end < NEVER
        ends = keeping.last_boundaries(end) - {0} if is_end else set()
        named = {*parted, *(ends if keeping.names_end(course, is_answer) else ())}
        slack = set() if is_answer or course.slack_from == NEVER else ends
        worth = [] if course.is_guest else self._worth(named, slack, 0 if ends else self._stored, known)
        blocks = self._blocks(worth, blocks_of)
        for boundary in parted:
            keeping.part(course, keys, boundary)
        self._stored = max(self._stored, known)
        if len(blocks[0]):
            self._store(*blocks)
        if is_end:
            self._note_end(keys, end, is_answer)
        if self._with_remote:
            seek = None if self._sought is None else self._sought.seek
            parts.door.offer(keys, sorted({*parted, *ends}, reverse=True), seek)

    def _note_end(self, keys: KeyArray, end: int, is_answer: bool) -> None:
        self._end, self._is_left = end, is_answer
        if not is_answer:
            self._parts.keeping.end_prompt(self._course, keys, end)
            return
        self._parts.keeping.end(self._course, keys, end, is_answer)
        self._leave(keys)

    def _leave(self, keys: KeyArray) -> None:
        """The text has gone on: what its end supersedes is the first to go, in the tier and on its way down."""
        parts, course = self._parts, self._course
        for g, (first, end) in enumerate(() if course.is_guest else parts.keeping.gone(course, self._stored)):
            if end > first:
                groups = np.full(end - first, g, np.int32)
                parts.stores.touch(groups, self._names(groups, np.arange(first, end)), cold=True)
        if self._with_remote and course.went_on_from:
            parts.door.supersede(keys, course.went_on_from, parts.keeping.boundaries.is_wanted)

    def _blocks(self, worth: list[tuple[int, Int64s]], blocks_of: BlocksOf) -> tuple[Ids, Int64s, Ids]:
        """The engine's blocks of these logical ones, as far as they are there: groups, logical blocks, blocks."""
        found = [(np.full(len(at), g, np.int32), at, block_ids(blocks_of(g, at))) for g, at in worth]
        for _, at, blocks in found:
            if len(blocks) != len(at):
                raise InvalidRequest(f"blocks_of was asked for {len(at)} blocks, and gave {len(blocks)}")
        if not found:
            return _NO_IDS, _NO_PLACES, _NO_IDS
        groups, at, blocks = map(np.concatenate, zip(*found, strict=True))
        there = blocks >= 0
        if not there.all():
            self._use_states(groups[~there], at[~there])
            groups, at, blocks = groups[there], at[there], blocks[there]
        self._parts.check_blocks(groups, blocks)
        return groups, at, blocks

    def _use_states(self, groups: Ids, at: Int64s) -> None:
        """The engine has gone on from states, but does not say where they lie: the tier's copies were used."""
        are_states = np.array([group.attention.kind is Kind.STATE for group in self._parts.spec.groups])[groups]
        if are_states.any():
            self._parts.stores.touch(groups[are_states], self._names(groups[are_states], at[are_states]))

    def _store(self, groups: Ids, at: Int64s, blocks: Ids) -> None:
        """Plans the stores. Full blocks of an answer, if nothing of answers is found again, and of a tail get what room
        is spare."""
        stores, names, last = self._parts.stores, self._names(groups, at), np.zeros(len(at), bool)
        course = self._course
        tail = min(course.gone_from, course.prompt_end if self._parts.keeping.answers_go(course) else NEVER)
        if tail < NEVER:
            kinds = np.array([group.attention.kind is Kind.FULL for group in self._parts.spec.groups])
            tokens = np.array([group.block_tokens for group in self._parts.spec.groups])
            last = kinds[groups] & (at >= tail // tokens[groups])
        stores.touch_or_store(groups[~last], blocks[~last], names[~last], np.zeros(int((~last).sum()), bool))
        stores.fill_spare(groups[last], blocks[last], names[last])

    def _worth(
        self, boundaries: Collection[int], slack: Collection[int], since: int, known: int
    ) -> list[tuple[int, Int64s]]:
        """Groups with the logical blocks to store, each once: of full groups from token ``since`` to ``known``. Hits
        shortly before the boundaries in ``slack`` are to be found too."""
        worth, reach = [], max(SLACK, self._course.reach)
        for g, group in enumerate(self._parts.spec.groups):
            bt, see = group.block_tokens, group.attention.first_visible
            if group.attention.kind is Kind.FULL:
                worth.append((g, np.arange(since // bt, known // bt)))
            elif boundaries:
                least = {b: see(b) for b in boundaries}
                there = see(self._course.begun_with)  # windows before it are not
                least |= {b: max(needed_from(group.attention, b, reach), min(there, least[b])) for b in slack}
                wanted = [np.arange(least[b] // bt, b // bt) for b in boundaries]
                worth.append((g, np.unique(np.concatenate(wanted))))
        return [(g, at) for g, at in worth if len(at)]

    def disown(self) -> set[int]:
        """Takes back the text, whose K and V are wrong: nothing under its keys is found again, here or in the remote.

        Returns the tickets of the copies under way that bring some of it: such a load fails.
        """
        parts, known = self._parts, self._keys.count * self._parts.spec.hash_tokens
        parts.check_open()
        if self._is_outdated or not known:
            return set()
        keys = self._keys.first(self._keys.count)
        counts = [known // group.block_tokens for group in parts.spec.groups]
        groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        outdated = parts.connector.disown(groups, self._names(groups, np.concatenate([np.arange(n) for n in counts])))
        if self._with_remote:
            parts.door.disown(keys)
        return outdated

    def close(self) -> None:
        """The engine follows the text no more. Its stored content stays; loads go on."""
        self.drop()
        keeping, course = self._parts.keeping, self._course
        if not self._is_closed and self._end and course.has_begun and not self._is_outdated:
            keys = self._keys.first(self._end // self._parts.spec.hash_tokens)
            if not self._is_left:
                keeping.end(course, keys, self._end, is_answer=False)
                self._leave(keys)
            keeping.leave(course, keys, course.prompt_end, self._end)
        self._is_closed = True

    def __enter__(self) -> HostText:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _names(self, groups: Ids, at: Int64s) -> KeyArray:
        units = self._parts.arrays.geometry[:, Geo.UNITS][groups]
        places = (at + 1) * units
        return self._keys.first(int(places.max(initial=0))).take(places - 1, axis=0)


def _taken(table: Ids, at: Int64s) -> Ids:
    """``BlocksOf`` a table."""
    blocks = np.full(len(at), -1, np.int32)
    end = int(np.searchsorted(at, len(table)))
    blocks[:end] = table[at[:end]]
    return blocks
