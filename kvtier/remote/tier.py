"""``RemoteTier``: the host tier's blocks in a remote tier.

Owns       every spill and fetch from plan to end: its pins, its deadline; what is known to be stored; the breaker.
Promises   a fetched block is findable only once its bytes are there and verified. Failure, miss and lateness are all a
           miss. A remote that hangs costs a request its patience (``seek``), and blocks until it lets go of them.
           The scheduling thread never waits for the remote. Content that a reset has outdated, or that was disowned, is
           not published. Keeps I13, I18, I19.
Does not   move bytes (``Backend``), know the form of objects on the wire (``envelope``), or decide who waits
           (``seek`` says what it waits for).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.transfer import TransferState
from kvtier.geometry.keys import KeyArray
from kvtier.machine.stats import RemoteStats
from kvtier.pools.block_pool import BlockPools, Ids, Mark, Words
from kvtier.remote.backends.contract import DAMAGED, Answer, Outcome
from kvtier.remote.backends.uri import PATIENCE, SpillWhen
from kvtier.remote.breaker import Breaker, Tried
from kvtier.remote.counts import RemoteCounts
from kvtier.remote.disowned import Disowned
from kvtier.remote.failures import RemoteFailures
from kvtier.remote.known import Changes, Known
from kvtier.remote.moves import Move, Seek, SeekState, Way
from kvtier.remote.objects import Name, ObjectPlan, Objects
from kvtier.remote.spills import Spills
from kvtier.remote.wire import Answering, Carrier

ANSWER_S = 5.0
"""A question without an answer has failed by then; ``deadline_s`` at most."""
FETCH_S = 5.0
"""Time of a fetch beside four times what its bytes take; ``deadline_s`` at most."""
NEW_WEIGHT = 0.5
"""Weight of the newest answer in ``answer_s``: a remote that was slow once is trusted again after a few."""
SPILL_BYTES = 128 * 2**20
"""Most bytes of spills under way."""


class RemoteTier:
    """Behind the host pools. All calls come from the scheduling thread; ``now``: its clock, in seconds."""

    def __init__(
        self,
        backend: Answering,
        wire: Carrier,
        plan: ObjectPlan,
        host: BlockPools,
        now: Callable[[], float],
        deadline_s: float,
        when: SpillWhen = SpillWhen.LANDING,
        patience: float = PATIENCE,
    ) -> None:
        self.backend = backend
        self.plan = plan
        self.host = host
        self.now = now
        self.deadline_s = deadline_s
        self.patience = patience
        """The share of its estimated prefill that a request waits for answers."""
        self.answer_s = 0.0
        """How long the remote takes to answer, by its last answers. If somebody has waited in vain since: twice that
        time, if it is more."""
        self.counts = RemoteCounts()
        self.breaker = Breaker()
        self.epoch = 0
        self.is_on = True
        """False after a reset: what the remote has may be outdated, and has the same names."""
        self._wire = wire
        self._when = when
        self._live: dict[int, Move] = {}
        self._questions: dict[int, tuple[Callable[[Answer], None], float]] = {}  # and when they are given up
        self._known = Known(now)
        self._spill_bytes = 0
        self._next_ticket = 1
        self._fetched_s = -np.inf  # when the last fetch ended
        self._failures = RemoteFailures()
        self._disowned = Disowned(self._delete_names)
        self._spills = Spills(plan, host, self._known, self._disowned, self.counts, when)
        self.on_end: Callable[[], None] = lambda: None
        """Called at each end of a move: requests that wait for content look again."""

    # --- what is asked ----------------------------------------------------------------------------

    @property
    def num_progressing(self) -> int:
        """Moves that are not overdue, texts that are being spilled, and texts to delete while the remote answers."""
        moves = sum(m.state is TransferState.IN_FLIGHT for m in self._live.values())
        return moves + self._spills.num_due + (self._disowned.num_hopeful if not self.breaker.is_open else 0)

    @property
    def num_disowned(self) -> int:
        """Texts whose objects are to be deleted, and are not known to be."""
        return len(self._disowned)

    def moves(self) -> list[Move]:
        """All moves that may touch blocks, oldest first."""
        return list(self._live.values())

    @property
    def is_usable(self) -> bool:
        """Whether a request would be asked for there."""
        return self.is_on and not self.breaker.is_open

    def listen(self) -> Changes:
        """Names of objects that the remote has, as this tier learns of them: for who tells routers."""
        return self._known.listen()

    def stats(self) -> RemoteStats:
        """A snapshot; from any thread."""
        return self.counts.stats(self.backend.kind, self.is_on, self.breaker.is_open, len(self._live))

    def is_live(self, ticket: int) -> bool:
        """Whether a move is under way and worth waiting for."""
        move = self._live.get(ticket)
        return move is not None and move.state is TransferState.IN_FLIGHT

    def recent_speed(self, within_s: float) -> float:
        """Bytes a second of the last fetches; 0 if the last one was longer ago, or if there was none."""
        return self.counts.fetch_bytes_per_s if self.now() - self._fetched_s < within_s else 0.0

    def bytes_of(self, groups: Ids) -> np.ndarray:
        """Bytes of a block of each of these groups, int64 [n]."""
        return self._wire.block_bytes[groups]

    def next_deadline_s(self) -> float:
        """The first deadline ahead; infinite if nothing is under way."""
        moves = [m.deadline_s for m in self._live.values() if m.state is TransferState.IN_FLIGHT]
        questions = [until_s for _, until_s in self._questions.values()]
        delete_s = max(self._disowned.next_s(), self.breaker.next_try_s(self.now(), Tried.MOVE))
        return min(delete_s, *moves, *questions, float("inf"))

    # --- spills -----------------------------------------------------------------------------------

    def offer(self, keys: KeyArray, n: int, seek: Seek | None = None) -> None:
        """The text with these keys, uint64 [units, 2], can be hit at boundary n: stores what such a hit needs.

        ``seek``: of the same text. What its answers tell is waited for.
        """
        if self.is_on and n >= self.plan.unit:
            self._spills.offer(keys, n, seek)

    def supersede(self, keys: KeyArray, n: int, is_wanted: Callable[[bytes], bool]) -> None:
        """This text has gone on from a hit at boundary n, and was offered: what ends there is not spilled any more.

        Nor is what ends before, unless others want a hit there: ``is_wanted(key)``.
        """
        self._spills.supersede(keys, n, is_wanted)

    def flush(self) -> None:
        """Spills everything that still waits for the host's evictions. Call it before the process ends."""
        self._spills.flush()

    @property
    def has_due(self) -> bool:
        """Whether ``pump`` could go on at once."""
        return self._spills.has_due and self._spill_bytes < SPILL_BYTES

    def pump(self, settled: int) -> None:
        """Starts some spills whose blocks are in the host, oldest texts first. ``settled``: grows when copies end."""
        if self._spills.is_idle(settled):
            return
        for what, hosts in self._spills.ready():
            if self._spill_bytes >= SPILL_BYTES:
                return
            if not self.breaker.allows(self.now(), Tried.MOVE):
                self._spills.clear()
                return
            self._spills.take()
            self.host.acquire(what.groups, hosts)
            move = self._open(Way.SPILL, what, what.groups, hosts, what.keys, what.of)
            self._spill_bytes += move.num_bytes
            for name in what.names:
                self._known.add(name)
            self._wire.put(self.backend, move, self.deadline_s)

    # --- questions --------------------------------------------------------------------------------

    def ask(self, names: Sequence[Name], answered: Callable[[Answer], None]) -> int:
        """Asks what the remote has; ``answered`` is called from ``poll``, without outcomes if there is no answer.

        Returns the ticket.
        """
        ticket, within_s = self._take_ticket(), min(ANSWER_S, self.deadline_s)

        def counted(answer: Answer) -> None:
            self.counts.note_look(answer)
            if answer.outcomes:
                self.answer_s += NEW_WEIGHT * (answer.seconds - self.answer_s)
            answered(answer)

        self._questions[ticket] = counted, self.now() + within_s
        self.counts.looks += 1
        self._wire.look(self.backend, ticket, names, within_s)
        return ticket

    def learn(self, names: Sequence[Name], outcomes: Sequence[Outcome]) -> None:
        """Notes what the remote has said of these objects."""
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._known.add(name)
                self._known.confirm(name)
            elif outcome is Outcome.MISS:
                self._known.forget(name)

    def believe(self, names: Iterable[Name]) -> None:
        """The remote has these, by what it has said of others."""
        for name in names:
            self._known.add(name)

    def forget(self, names: Iterable[Name], were_believed: bool = False) -> None:
        """The remote does not have these. ``were_believed``: somebody may hold that it has."""
        for name in names:
            self._known.forget(name, were_believed)

    def end_look(self, seek: Seek, state: SeekState) -> None:
        """No answer is to come for ``seek``: texts that have waited for it may be spilled."""
        seek.state = state
        self._spills.look_again()

    def note_late(self, waited_s: float) -> None:
        """A request has waited so long for an answer, and gives up."""
        self.counts.late_looks += 1
        self.answer_s = max(self.answer_s, 2 * waited_s)

    # --- fetches ----------------------------------------------------------------------------------

    def fetch(self, objects: Objects, absent: npt.NDArray[np.bool_], pinned: tuple[Ids, Ids]) -> int:
        """Starts to read objects into host blocks. ``absent``: bool [n], which of their blocks are not here.

        ``pinned``: host blocks (groups, blocks) that stay as they are until then. Returns the ticket, 0 if the host has
        no room.
        """
        if not self.is_on or (self._disowned and any(self._disowned.has(key) for _, key in objects.names)):
            return 0
        groups, keys, of = objects.groups[absent], objects.keys[absent], objects.of[absent]
        self.host.acquire(*pinned)
        need = np.bincount(groups, minlength=self.host.num_groups)
        if self.host.shared:
            self.host.provide(need)
        if np.any(need > self.host.clean):
            self.host.release(*pinned)
            return 0
        hosts = self.host.take(groups)
        self.host.publish(groups, hosts, keys, Mark.PENDING)
        move = self._open(Way.FETCH, objects, groups, hosts, keys, of)
        move.pinned = pinned
        speed = self.counts.fetch_bytes_per_s
        within_s = min(self.deadline_s, FETCH_S + (4 * move.num_bytes / speed if speed else 0.0))
        move.deadline_s = self.now() + within_s
        self._wire.get(self.backend, move, absent, within_s)
        return move.ticket

    # --- ends -------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Takes note of what has ended or is overdue; never waits."""
        if not self._live and not self._questions and not self._disowned:
            return
        for answer in self.backend.poll():
            question, _ = self._questions.pop(answer.ticket, (None, 0.0))
            move = self._live.pop(answer.ticket, None)
            if question is not None:
                self.breaker.on_end(Tried.LOOK, Outcome.FAILED not in answer.outcomes, self.now())
                question(answer)
            elif move is not None:
                self._end(move, answer)
        now = self.now()
        for move in [m for m in self._live.values() if m.deadline_s <= now and m.state is TransferState.IN_FLIGHT]:
            self._expire(move)
        for ticket in [ticket for ticket, (_, until_s) in self._questions.items() if until_s <= now]:
            answered, _ = self._questions.pop(ticket)
            self.breaker.on_end(Tried.LOOK, False, now)
            answered(Answer(ticket, ()))
        if self._disowned.next_s() <= now and self.breaker.allows(now, Tried.MOVE):
            self._disowned.delete_due(self._live.__contains__, now)

    def _end(self, move: Move, answer: Answer) -> None:
        self.on_end()
        good = np.array([outcome is Outcome.OK for outcome in answer.outcomes], bool)
        self.counts.note(move, answer, good)
        self._failures.note(move.way, move.objects.names, answer, self.now())
        if move.way is Way.SPILL:
            self._spill_bytes -= move.num_bytes if move.state is TransferState.IN_FLIGHT else 0
        is_current = move.way is Way.FETCH and move.epoch == self.epoch
        for name, is_good in zip(move.objects.names, good.tolist(), strict=False):
            if not is_good:
                self._known.forget(name, was_believed=True)
                continue
            if is_current:
                self._known.add(name)
            self._known.confirm(name)
        if is_current and good.any():
            self._fetched_s = self.now()
        if move.state is TransferState.EXPIRED:
            self._end_late(move)
            return
        self.breaker.on_end(Tried.MOVE, Outcome.FAILED not in answer.outcomes, self.now())
        move.move(TransferState.LANDED if good.all() else TransferState.FAILED)
        if move.way is Way.FETCH and move.epoch == self.epoch:
            came = good[move.of]
            self.host.make_ready(move.groups[came], move.hosts[came])
            self.host.unpublish(move.groups[~came], move.hosts[~came])
        self._let_go(move)
        damaged = [move.objects.names[k] for k, reason in answer.reasons.items() if reason.startswith(DAMAGED)]
        if damaged:
            self._spills.hold(damaged)
            self._delete_names(damaged, lambda answer: self._spills.let_go(damaged))

    def _let_go(self, move: Move) -> None:
        move.move(TransferState.SETTLED)
        is_cold = move.way is Way.SPILL and self._when is SpillWhen.EVICTION  # it was about to go
        self.host.release(move.groups, move.hosts, is_cold)
        self.host.release(*move.pinned)

    def _expire(self, move: Move) -> None:
        """Gives up waiting. It may still write into a fetch's blocks: they are out of use until it has ended."""
        move.move(TransferState.EXPIRED)
        self.counts.expired += 1
        self.on_end()
        self.breaker.on_end(Tried.MOVE, False, self.now())
        self.breaker.hanging += 1
        if move.way is Way.SPILL:
            self._spill_bytes -= move.num_bytes
        else:
            self.host.quarantine(move.groups, move.hosts)

    def _end_late(self, move: Move) -> None:
        self.breaker.hanging -= 1
        self._let_go(move)
        if move.way is Way.FETCH:
            self.host.restore(move.groups, move.hosts)

    # --- content that is not to be found any more -------------------------------------------------

    def reset(self) -> None:
        """The cache was reset. The remote's content keeps its names: nothing is fetched or spilled any more."""
        self.epoch += 1
        self.is_on = False
        self._spills.clear()

    def disown(self, keys: KeyArray) -> None:
        """A text's content is wrong: its objects are deleted, and what comes of them is not published.

        ``keys``: the text's, uint64 [units, 2].
        """
        if not len(keys):
            return
        self._spills.drop(keys)
        for move in self._live.values():
            if move.way is Way.FETCH and move.epoch == self.epoch and np.isin(move.keys[:, 1], keys[:, 1]).any():
                if move.state is TransferState.IN_FLIGHT:
                    self.host.unpublish(move.groups, move.hosts)
                move.epoch = -1
                self.on_end()
        mine = {key.tobytes() for key in keys}
        spills = {m.ticket: m.objects.names for m in self._live.values() if m.way is Way.SPILL}
        stored = [ticket for ticket, names in spills.items() if any(key in mine for _, key in names)]
        names = self.plan.all_names(keys)  # even a put that has failed may have written
        self.forget(names)
        if names:
            self._disowned.add(mine, names, stored)

    def _delete_names(self, names: Sequence[Name], answered: Callable[[Answer], None]) -> None:
        self.forget(names)

        def ended(answer: Answer) -> None:
            self.forget(names)  # an answer since may have been about what was there before
            answered(answer)

        ticket = self._take_ticket()
        self._questions[ticket] = ended, self.now() + self.deadline_s
        self._wire.delete(self.backend, ticket, names, self.deadline_s)

    # --- life -------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> bool:
        """True if the remote touches no block any more."""
        self._spills.clear()
        return self.backend.close(timeout_s)

    def _open(self, way: Way, objects: Objects, groups: Ids, hosts: Ids, keys: Words, of: Ids) -> Move:
        object_bytes = np.bincount(of, self._wire.block_bytes[groups], len(objects)).astype(np.int64)
        until = self.now() + self.deadline_s
        move = Move(self._take_ticket(), way, objects, groups, hosts, keys, of, object_bytes, self.epoch, until)
        self._live[move.ticket] = move
        return move

    def _take_ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket - 1
