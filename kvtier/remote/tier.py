"""``RemoteTier``: the host tier's blocks in a store behind it.

Owns       every spill and fetch from plan to end: its pins, its deadline; what is known to be stored; the breaker.
Promises   a fetched block is findable only once its bytes are there and verified. Failure, miss and lateness are all a
           miss. A store that hangs or lies costs a request at most ``look_s``, and blocks until the store lets go of
           them. The scheduling thread never waits for the store. Content that a reset has outdated, or that was
           disowned, is not published. Keeps I13, I18, I19.
Does not   move bytes (``BlockStore``), know the form of objects on the wire (``envelope``), or decide who waits
           (``seek`` says what it waits for).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvtier.cpu_offload.transfer import TransferState
from kvtier.keys import KeyArray
from kvtier.pools.block_pool import BlockPools, Ids, Mark, Words
from kvtier.remote.block_store import DAMAGED, Answer, BlockStore, Outcome
from kvtier.remote.breaker import Breaker
from kvtier.remote.counts import RemoteCounts
from kvtier.remote.moves import Move, Way
from kvtier.remote.objects import ObjectPlan, StoredObject
from kvtier.remote.wire import Wire
from kvtier.stats import StoreStats

SPILL_BYTES = 128 * 2**20
"""Of spills under way."""
MOST_JOBS = 1024
"""Texts that wait to be spilled; the oldest are given up."""
MOST_KNOWN = 2**18
"""Names that are remembered as stored."""


class _Job:
    """A text to be spilled."""

    def __init__(self, keys: KeyArray, objects: Iterator[StoredObject]) -> None:
        self.keys = keys
        self.objects = objects
        self.next: StoredObject | None = None


class RemoteTier:
    """Behind the host pools. All calls come from the scheduling thread; ``now``: its clock, in seconds."""

    def __init__(
        self,
        store: BlockStore,
        wire: Wire,
        plan: ObjectPlan,
        host: BlockPools,
        now: Callable[[], float],
        deadline_s: float,
    ) -> None:
        self.store = store
        self.plan = plan
        self.host = host
        self.now = now
        self.deadline_s = deadline_s
        self.counts = RemoteCounts()
        self.breaker = Breaker()
        self.epoch = 0
        self.is_on = True
        """False after a reset: what the store has may be outdated, and has the same names."""
        self._wire = wire
        self._jobs: deque[_Job] = deque()
        self._live: dict[int, Move] = {}
        self._questions: dict[int, Callable[[Answer], None]] = {}
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._spill_bytes = 0
        self._next_ticket = 1
        self._settled_seen = -1
        self.on_end: Callable[[], None] = lambda: None
        """Called at each end of a move: requests that wait for content look again."""

    # --- what is asked ----------------------------------------------------------------------------

    @property
    def num_progressing(self) -> int:
        """Moves that are not overdue, and texts that wait to be spilled."""
        return sum(m.state is TransferState.IN_FLIGHT for m in self._live.values()) + len(self._jobs)

    def moves(self) -> list[Move]:
        """All moves that may touch blocks, oldest first."""
        return list(self._live.values())

    def stats(self) -> StoreStats:
        """A snapshot; from any thread."""
        return self.counts.stats(self.store.kind, self.is_on, self.breaker.is_open, len(self._live))

    def is_live(self, ticket: int) -> bool:
        """Whether a move is under way and worth waiting for."""
        move = self._live.get(ticket)
        return move is not None and move.state is TransferState.IN_FLIGHT

    def bytes_of(self, groups: Ids) -> np.ndarray:
        """Bytes of a block of each of these groups, int64 [n]."""
        return self._wire.block_bytes[groups]

    def next_deadline_s(self) -> float:
        """The first deadline ahead; infinite if nothing is under way."""
        ahead = (m.deadline_s for m in self._live.values() if m.state is TransferState.IN_FLIGHT)
        return min(ahead, default=float("inf"))

    # --- spills -----------------------------------------------------------------------------------

    def offer(self, keys: KeyArray, n: int) -> None:
        """The text with these keys, uint64 [units, 2], can be hit at boundary n: stores what such a hit needs."""
        if not self.is_on or n < self.plan.unit:
            return
        if self.plan.has_ends and self.plan.end_name(keys, n) in self._known:
            return
        self._jobs.append(_Job(keys, self.plan.of_hit(keys, n)))
        if len(self._jobs) > MOST_JOBS:
            self._jobs.popleft()
            self.counts.dropped_texts += 1

    def pump(self, settled: int) -> None:
        """Starts spills whose blocks are in the host, oldest texts first. ``settled``: grows when copies end."""
        if not self._jobs or (settled == self._settled_seen and self._jobs[0].next is not None):
            return  # the first waits, and nothing has ended since
        self._settled_seen = settled
        for _ in range(len(self._jobs)):
            job = self._jobs[0]
            if not self._spill_from(job):
                return
            self._jobs.popleft()
            if job.next is not None:  # it waits for copies into the host
                self._jobs.append(job)

    def _spill_from(self, job: _Job) -> bool:
        """Spills the job's objects until one waits, or all are done; False if the store takes no more for now."""
        while True:
            if job.next is None:
                job.next = next((o for o in job.objects if o.name not in self._known), None)
            if job.next is None:
                return True
            if self._spill_bytes >= SPILL_BYTES:
                return False
            if not self.breaker.allows(self.now()):
                self.counts.dropped_texts += len(self._jobs)
                self._jobs.clear()
                return False
            hosts = self.host.find(job.next.groups, job.next.keys)
            if np.any(hosts == 0):
                self.counts.dropped_objects += 1  # the host has it no longer, or never had it
            elif np.any(self.host.arrays.mark[self.host.entries(job.next.groups, hosts)] != Mark.READY):
                return True
            else:
                self._spill(job.next, hosts)
            job.next = None

    def _spill(self, what: StoredObject, hosts: Ids) -> None:
        self.host.acquire(what.groups, hosts)
        move = self._open(Way.SPILL, [what], what.groups, hosts, what.keys, np.zeros(len(hosts), np.int32))
        self._spill_bytes += move.num_bytes
        self._know(what.name)
        self._wire.put(self.store, move, self.deadline_s)

    def _know(self, name: tuple[str, bytes]) -> None:
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    # --- fetches ----------------------------------------------------------------------------------

    def ask(self, names: Sequence[tuple[str, bytes]], within_s: float, answered: Callable[[Answer], None]) -> int:
        """Which objects the store has; ``answered`` is called from ``poll``. Returns the ticket."""
        ticket = self._take_ticket()
        self._questions[ticket] = answered
        self.counts.looks += 1
        self._wire.look(self.store, ticket, names, within_s)
        return ticket

    def note_late(self) -> None:
        """An answer has taken too long."""
        self.counts.late_looks += 1
        self.breaker.on_end(False, self.now())

    def fetch(self, objects: Sequence[StoredObject], absent: Sequence[np.ndarray], pinned: tuple[Ids, Ids]) -> int:
        """Starts to read objects into host blocks. ``absent[k]``: bool [n], which blocks of object k are not here.

        ``pinned``: host blocks (groups, blocks) that stay as they are until then. Returns the ticket, 0 if the host has
        no room.
        """
        groups = np.concatenate([o.groups[missing] for o, missing in zip(objects, absent, strict=True)])
        keys = np.concatenate([o.keys[missing] for o, missing in zip(objects, absent, strict=True)])
        of = np.repeat(np.arange(len(objects), dtype=np.int32), [int(missing.sum()) for missing in absent])
        self.host.acquire(*pinned)
        need = np.bincount(groups, minlength=self.host.num_groups)
        if self.host.shared:
            self.host.provide(need)
        if np.any(need > self.host.clean):
            self.host.release(*pinned)
            return 0
        hosts = self.host.take(groups)
        self.host.publish(groups, hosts, keys, Mark.PENDING)
        move = self._open(Way.FETCH, list(objects), groups, hosts, keys, of)
        move.pinned = pinned
        self._wire.get(self.store, move, absent, self.deadline_s)
        return move.ticket

    # --- ends -------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Takes note of what has ended or is overdue; never waits."""
        if not self._live and not self._questions:
            return
        for answer in self.store.poll():
            question = self._questions.pop(answer.ticket, None)
            move = self._live.pop(answer.ticket, None)
            if question is not None:
                self.breaker.on_end(Outcome.FAILED not in answer.outcomes, self.now())
                self.counts.look_latency.add(answer.seconds)
                question(answer)
            elif move is not None:
                self._end(move, answer)
        now = self.now()
        for move in [m for m in self._live.values() if m.deadline_s <= now and m.state is TransferState.IN_FLIGHT]:
            self._expire(move)

    def _end(self, move: Move, answer: Answer) -> None:
        self.on_end()
        good = np.array([outcome is Outcome.OK for outcome in answer.outcomes], bool)
        self.counts.note(move, answer, good)
        if move.way is Way.SPILL:
            self._spill_bytes -= move.num_bytes if move.state is TransferState.IN_FLIGHT else 0
        for k, outcome in enumerate(answer.outcomes):
            if outcome is not Outcome.OK:
                self._known.pop(move.objects[k].name, None)
            elif move.way is Way.FETCH:
                self._know(move.objects[k].name)
        if move.state is TransferState.EXPIRED:
            self._end_late(move)
            return
        self.breaker.on_end(Outcome.FAILED not in answer.outcomes, self.now())
        move.move(TransferState.LANDED if good.all() else TransferState.FAILED)
        if move.way is Way.FETCH and move.epoch == self.epoch:
            came = good[move.of]
            self.host.make_ready(move.groups[came], move.hosts[came])
            self.host.unpublish(move.groups[~came], move.hosts[~came])
        self._let_go(move)
        damaged = [o for k, o in enumerate(move.objects) if answer.reasons.get(k, "").startswith(DAMAGED)]
        if damaged:
            self._delete(damaged)
    def _let_go(self, move: Move) -> None:
        move.move(TransferState.SETTLED)
        self.host.release(move.groups, move.hosts)
        self.host.release(*move.pinned)

    def _expire(self, move: Move) -> None:
        """Gives up waiting. The store may still write into a fetch's blocks: they are out of use until it has ended."""
        move.move(TransferState.EXPIRED)
        self.counts.expired += 1
        self.on_end()
        self.breaker.on_end(False, self.now())
        if move.way is Way.SPILL:
            self._spill_bytes -= move.num_bytes
        else:
            self.host.quarantine(move.groups, move.hosts)

    def _end_late(self, move: Move) -> None:
        self._let_go(move)
        if move.way is Way.FETCH:
            self.host.restore(move.groups, move.hosts)

    # --- content that is not to be found any more -------------------------------------------------

    def reset(self) -> None:
        """The cache was reset. The store's content keeps its names: nothing is fetched or spilled any more."""
        self.epoch += 1
        self.is_on = False
        self._jobs.clear()

    def disown(self, keys: KeyArray) -> None:
        """What this text's keys, uint64 [units, 2], name is wrong: its objects are deleted, and what comes of them is
        not published."""
        if not len(keys):
            return
        head = keys[0].tobytes()
        self._jobs = deque(job for job in self._jobs if job.keys[0].tobytes() != head)
        for move in self._live.values():
            if move.way is Way.FETCH and move.epoch == self.epoch and np.isin(move.keys[:, 1], keys[:, 1]).any():
                if move.state is TransferState.IN_FLIGHT:
                    self.host.unpublish(move.groups, move.hosts)
                move.epoch = -1
                self.on_end()
        last = len(keys) * self.plan.link // self.plan.unit * self.plan.unit
        links = self.plan.unit // self.plan.link
        ends = [("e", key.tobytes()) for key in keys[links - 1 :: links]]
        known = [name for name in ends if name in self._known]
        self._delete_names([o.name for o in self.plan.of_hit(keys, last)] + known)

    def _delete(self, objects: Sequence[StoredObject]) -> None:
        self._delete_names([o.name for o in objects])

    def _delete_names(self, names: Sequence[tuple[str, bytes]]) -> None:
        for name in names:
            self._known.pop(name, None)
        ticket = self._take_ticket()
        self._questions[ticket] = lambda answer: None
        self._wire.delete(self.store, ticket, names, self.deadline_s)

    # --- life -------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """True if the store touches no block any more."""
        self._jobs.clear()
        return self.store.close(timeout_s)

    def _open(
        self, way: Way, objects: list[StoredObject], groups: Ids, hosts: Ids, keys: Words, of: Ids
    ) -> Move:
        num_bytes = int(self._wire.block_bytes[groups].sum())
        until = self.now() + self.deadline_s
        move = Move(self._take_ticket(), way, objects, groups, hosts, keys, of, num_bytes, self.epoch, until)
        self._live[move.ticket] = move
        return move

    def _take_ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket - 1
