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

from kvtier.coordinator.boundaries import SLACK, End, needed_from
from kvtier.coordinator.returns import NEVER, Before
from kvtier.cpu_offload.transfer import Direction
from kvtier.geometry.spec import Kind
from kvtier.gpu_pool.row_state import Geo
from kvtier.host_tier.parts import HostHit, HostParts, Question
from kvtier.machine.arguments import NO_KEYS, KeyArray, block_ids, check_function, flag, joined_keys, whole
from kvtier.machine.errors import InvalidRequest, StepError
from kvtier.machine.integers import shown
from kvtier.pools.block_pool import Ids

Int64s = npt.NDArray[np.int64]
BlocksOf = Callable[[int, Int64s], Ids]
"""Device blocks of a group's logical blocks, int64 [n], ascending: int32 [n], negative for what is not there."""


class HostText:
    """A token sequence of the engine. ``keys``, uint64 [n, 2]: key i names the tokens up to (i + 1) * hash_tokens.

    No two keys are equal. Close each text: until then its hit stays held.
    """

    def __init__(self, parts: HostParts, keys: KeyArray, with_remote: bool = True) -> None:
        self._parts = parts
        self._with_remote = flag(with_remote, "with_remote")
        self._sought: Question | None = None  # what it has asked the remote
        self._keys = joined_keys(NO_KEYS, keys)
        self._epoch = parts.connector.ledger.epoch
        self._is_closed = False
        parts.num_texts += 1
        self._name = parts.num_texts
        self._hit: HostHit | None = None
        self._stored = 0  # tokens up to which the full groups' blocks were planned
        self._branches: set[int] = set()  # boundaries at which others part from it
        self._went_on_from = 0  # its hit, if no other text had wanted one there
        self._has_ended = False  # its prompt has: a further end is the answer's
        self._prompt_end = 0  # its prompt's last boundary
        self._is_guest = False  # others are kept whole instead of its content
        self._before: Before | None = None  # what it has in common with an earlier text, once it has matched
        self._last = 0  # the boundary before its prompt's last token
        self._hit_before = 0  # what it has begun with: windows before that one's are not there
        self._tail = NEVER  # from where on its full blocks are worth least
        self._ends: set[int] = set()  # boundaries from which later texts may go on
        self._passing: set[int] = set()  # boundaries whose windows no other text is known to want

    def extend(self, keys: KeyArray) -> None:
        """More keys, at the end."""
        self._keys = joined_keys(self._keys, keys)

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
        self.drop()
        num_tokens = min(num_tokens, len(self._keys) * parts.spec.hash_tokens + 1)
        nothing = HostHit(start, start, np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32))
        if start % unit or start >= num_tokens or self._is_outdated:
            return nothing
        remote = parts.door.remote if ask_remote and self._with_remote else None
        if remote is not None and self._sought is not None:
            remote.poll()
            if parts.door.is_waiting(self._sought):
                return replace(nothing, is_sought=True)
        found = parts.matcher.match(parts, self._keys, num_tokens, start=start)
        if remote is not None and self._sought is None and not found.pending:
            self._sought = Question(self._keys, range(num_tokens), found)
            if parts.door.is_waiting(self._sought):
                parts.asking.add(self._sought)
                return replace(nothing, is_sought=True)
        self._hit_before = max(self._hit_before, start, found.num_tokens)
        if self._before is None:
            self._learn(self._hit_before, found.full_tokens, num_tokens)
        if found.full_tokens > found.num_tokens:
            self._branches.add(found.full_tokens)
        if found.num_tokens <= start:
            return nothing
        had = found.num_tokens if self._sought is None else max(start, self._sought.found.num_tokens)
        new = max(0, found.num_tokens - had)
        hit = HostHit(start, found.num_tokens, found.groups, found.at, found.host, found.pending, from_remote=new)
        if not hit.is_pending:
            self._hold(hit)
        return hit

    def _learn(self, hit: int, full: int, num_tokens: int) -> None:
        """The first match, of a text of ``num_tokens`` tokens: what it tells of ends, and whether the text is a
        guest."""
        parts, unit = self._parts, self._parts.spec.hit_tokens
        self._last = (num_tokens - 1) // unit * unit
        missed = (self._key(full), full) if full > hit else None
        parts.boundaries.learn((self._key(hit), hit) if hit else None, missed if parts.has_full else None)
        each, keys = parts.sizes.of(num_tokens), self._keys[: num_tokens // parts.spec.hash_tokens]
        room = parts.sizes.room(parts.pools, each)
        guest, self._before = parts.returns.begin(keys, hit // unit, room, float(each.sum()))
        self._is_guest = guest and parts.door.remote is None
        self._tail = parts.returns.cold_from(self._before, hit)
        if (stem := self._before.stem * unit) > full:
            self._branches.add(stem)

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
        name = self._key(hit.end)
        goes_on = parts.boundaries.want(name) and hit.end < self._last and parts.boundaries.leave(name)
        if goes_on and not parts.boundaries.pays(End.LEFT):
            self._passing.add(hit.end)
            self._went_on_from = hit.end
        return ticket

    # --- what is given ----------------------------------------------------------------------------

    def computed(self, tables: Sequence[Ids], end: int, is_end: bool = False) -> None:
        """The engine has computed the tokens up to ``end``: plans the stores of blocks that other requests may ask for.

        ``tables[g]``: device blocks of group g by logical block, int32; a negative block is not there any more. Full
        groups store their full blocks. Window and chunk groups store the blocks of hits at the boundaries of parting
        prompts. With ``is_end`` (of the prompt, of the text) they also store the last boundaries' blocks. Full
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
        known = min(end, len(self._keys) * parts.spec.hash_tokens)
        boundaries = {b for b in self._branches if self._stored < b <= known}
        unit = parts.spec.hit_tokens
        ends = {n // unit * unit for n in (known, max(0, min(known, end - 1)))} - {0} if is_end else set()
        slack = ends if not self._has_ended and self._pays(End.PROMPT, End.SHORT) else set()
        worth = [] if self._is_guest else self._worth(boundaries | ends, slack, 0 if ends else self._stored, known)
        blocks = self._blocks(worth, blocks_of)
        for boundary in boundaries:
            parts.boundaries.want(self._key(boundary))
        self._branches -= boundaries
        self._stored = max(self._stored, known)
        if len(blocks[0]):
            self._store(*blocks)
        if ends:
            self._cool(ends)
        self._has_ended |= is_end
        if self._with_remote:
            seek = None if self._sought is None else self._sought.seek
            parts.door.offer(self._keys, sorted(boundaries | ends, reverse=True), seek)
            if self._went_on_from < min(ends, default=0):
                parts.door.supersede(self._keys, self._went_on_from, parts.boundaries.is_wanted)

    def _blocks(self, worth: list[tuple[int, Int64s]], blocks_of: BlocksOf) -> tuple[Ids, Int64s, Ids]:
        """The engine's blocks of these logical ones, as far as they are there: groups, logical blocks, blocks."""
        found = [(np.full(len(at), g, np.int32), at, block_ids(blocks_of(g, at))) for g, at in worth]
        for _, at, blocks in found:
            if len(blocks) != len(at):
                raise InvalidRequest(f"blocks_of was asked for {len(at)} blocks, and gave {len(blocks)}")
        if not found:
            return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
        groups, at, blocks = map(np.concatenate, zip(*found, strict=True))
        there = blocks >= 0
        if not there.all():
            groups, at, blocks = groups[there], at[there], blocks[there]
        self._parts.check_blocks(groups, blocks)
        return groups, at, blocks

    def _store(self, groups: Ids, at: Int64s, blocks: Ids) -> None:
        """Plans the stores. Full blocks of an answer, if nothing of answers is found again, and of a tail get what room
        is spare."""
        stores, names, last = self._parts.stores, self._names(groups, at), np.zeros(len(at), bool)
        tail = self._tail
        if self._has_ended and not self._pays(End.ANSWER) and not self._pays(End.PASSED):
            tail = min(tail, self._prompt_end)
        if tail < NEVER:
            kinds = np.array([group.attention.kind is Kind.FULL for group in self._parts.spec.groups])
            tokens = np.array([group.block_tokens for group in self._parts.spec.groups])
            last = kinds[groups] & (at >= tail // tokens[groups])
        stores.touch_or_store(groups[~last], blocks[~last], names[~last], np.zeros(int((~last).sum()), bool))
        stores.fill_spare(groups[last], blocks[last], names[last])

    def _pays(self, *ends: End) -> bool:
        return all(map(self._parts.boundaries.pays, ends))

    def _worth(
        self, boundaries: Collection[int], slack: Collection[int], since: int, known: int
    ) -> list[tuple[int, Int64s]]:
        """Groups with the logical blocks to store, each once: of full groups from token ``since`` to ``known``. Hits
        shortly before the boundaries in ``slack`` are to be found too."""
        worth = []
        for g, group in enumerate(self._parts.spec.groups):
            bt, see = group.block_tokens, group.attention.first_visible
            if group.attention.kind is Kind.FULL:
                worth.append((g, np.arange(since // bt, known // bt)))
            elif boundaries:
                least = {b: see(b) for b in boundaries}
                least |= {b: max(needed_from(group.attention, b), min(see(self._hit_before), least[b])) for b in slack}
                wanted = [np.arange(least[b] // bt, b // bt) for b in boundaries]
                worth.append((g, np.unique(np.concatenate(wanted))))
        return [(g, at) for g, at in worth if len(at)]

    def _cool(self, ends: Collection[int]) -> None:
        """Blocks for windows go first if only this text is known to want their boundary, and it has moved on."""
        parts, last = self._parts, min(ends)
        has_slack = not self._has_ended and self._pays(End.PROMPT, End.SHORT)
        for boundary in [b for b in self._passing if b < last]:
            self._passing.discard(boundary)
            for g, group in enumerate(parts.spec.groups):
                bt, see = group.block_tokens, group.attention.first_visible
                kept = needed_from(group.attention, last) if has_slack else see(last)
                at = np.arange(see(boundary) // bt, min(boundary, kept) // bt)
                if group.attention.kind is not Kind.FULL and len(at):
                    groups = np.full(len(at), g, np.int32)
                    parts.stores.touch(groups, self._names(groups, at), cold=True)
        end = End.ANSWER if self._has_ended else End.PROMPT
        for boundary in ends:
            parts.boundaries.end(self._key(boundary), end)
        self._ends |= {*ends}
        if end is End.PROMPT:
            self._prompt_end, unit = max(ends), parts.spec.hit_tokens
            short = range(max(unit, last - SLACK // unit * unit), last, unit)
            for boundary in short:
                parts.boundaries.end(self._key(boundary), End.SHORT)
            self._ends |= {*short}
        if end is End.ANSWER or not parts.boundaries.pays(end):
            self._passing |= {b for b in ends if not parts.boundaries.is_wanted(self._key(b))}

    def disown(self) -> set[int]:
        """Takes back the text, whose K and V are wrong: nothing under its keys is found again, here or in the remote.

        Returns the tickets of the copies under way that bring some of it: such a load fails.
        """
        parts, known = self._parts, len(self._keys) * self._parts.spec.hash_tokens
        parts.check_open()
        if self._is_outdated or not known:
            return set()
        counts = [known // group.block_tokens for group in parts.spec.groups]
        groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        outdated = parts.connector.disown(groups, self._names(groups, np.concatenate([np.arange(n) for n in counts])))
        if self._with_remote:
            parts.door.disown(self._keys)
        return outdated

    def close(self) -> None:
        """The engine follows the text no more. Its stored content stays; loads go on."""
        self.drop()
        if not self._is_closed and self._ends and self._before is not None and not self._is_outdated:
            parts, unit = self._parts, self._parts.spec.hit_tokens
            parts.returns.end(self._keys, self._prompt_end // unit, max(self._ends) // unit, self._before)
        self._is_closed = True

    def __enter__(self) -> HostText:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _names(self, groups: Ids, at: Int64s) -> KeyArray:
        units = self._parts.arrays.geometry[:, Geo.UNITS][groups]
        return self._keys.take((at + 1) * units - 1, axis=0)

    def _key(self, boundary: int) -> bytes:
        name: bytes = self._keys[boundary // self._parts.spec.hash_tokens - 1].tobytes()
        return name


def _taken(table: Ids, at: Int64s) -> Ids:
    """``BlocksOf`` a table."""
    blocks = np.full(len(at), -1, np.int32)
    end = int(np.searchsorted(at, len(table)))
    blocks[:end] = table[at[:end]]
    return blocks
