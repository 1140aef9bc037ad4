"""``MooncakeBackend``: objects in the memory and on the SSDs of Mooncake's storage processes, on any machines.

Owns       a client without memory of its own, and a little registered memory for each move (``mooncake_memory``).
Promises   objects move in batches, without a copy but for trailers and for objects of small pieces. A batch has few
           pieces: a dead storage process holds it up for a few times the library's time limit, and no longer. The
           library's calls release the interpreter's lock; only its ``close`` does not.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import PriorityQueue

from kvtier.remote.backends.batches import by_number, by_size, first_alone
from kvtier.remote.backends.contract import DAMAGED, After, Buffers, Outcome
from kvtier.remote.backends.mooncake_library import (
    LANES,
    OTHER_LENGTH,
    MooncakeOptions,
    connect,
    import_library,
    meaning,
    seconds_in_force,
)
from kvtier.remote.backends.mooncake_memory import MOST_PIECES, Pieces, Stage, pieces_of, place, register
from kvtier.remote.backends.threads import BackendThreads, Call, Rank, reason_of

BATCH_PIECES = MOST_PIECES
BATCH_BYTES = 64 << 20
"""A batch ends before it has more than these; an object alone may have more."""
NAMES_AT_ONCE = 4096
"""Most names of a look, or a deletion."""
NO_MASTER = (meaning(-900), meaning(-901))
RECONNECTS, RECONNECT_S = 4, 5.0
"""Tries to reach a master that is gone, and seconds between them all: no limit of the library's makes these fewer."""
AT_EXIT_S = 90.0
"""More than the library's last limit for a transfer, which is 60 s."""
HALF_WAY = "an earlier put failed half-way; the master forgets that in time (put_start_discard_timeout_sec)"
MOST_HALF_WAY = 100_000

Result = tuple[Outcome, str]
"""One object's outcome, and why if it failed or was refused."""
Work = Callable[[Sequence[int]], list[Result]]
Moves = Callable[[Stage, Sequence[int]], list[Result]]


class _BatchedCall(Call):
    """A call whose objects move in batches."""

    hopeless: Result | None = None
    """The result of a batch that ended for want of a master: the batches after it are not tried."""


class MooncakeBackend(BackendThreads):
    """A client of the master at ``host:port``. It and ``register`` raise ``ConfigError``; nothing else raises."""

    kind = "mooncake"

    def __init__(self, host: str, port: int, options: Mapping[str, str]) -> None:
        chosen = MooncakeOptions.read(options)
        library = import_library()
        self._client = connect(library, host, port, chosen)
        self._copies = library.ReplicateConfig()
        self._copies.replica_num = chosen.replica_num
        self._arena = range(0)
        self._moves = False
        """Whether the last batch was moved. If not, a call begins with one object alone. For each object in a storage
        process that hangs, and that this one never spoke with, the library waits for a minute."""
        self._half_way: set[str] = set()
        """Names whose last put failed."""
        self._stages = [Stage(self._client) for _ in range(chosen.threads)]
        """Free ones: a move holds one."""
        self._waiting: PriorityQueue[tuple[Rank, int, Callable[[], None]]] = PriorityQueue()
        self._lock = threading.Lock()
        """Over these two."""
        limit_s, rounds = seconds_in_force(), -(-chosen.threads * BATCH_PIECES // LANES)
        self.longest_s = rounds * limit_s + 2 * (RECONNECTS * limit_s + RECONNECT_S)
        """Seconds that a batch takes at most, whatever is dead: transfers, and a call of the master's on both sides."""
        super().__init__(chosen.threads + 1)
        atexit.register(self.close, AT_EXIT_S)  # a call under way would crash the process as it ends

    def register(self, memory: memoryview) -> None:
        """See ``Backend``. Raises ``ConfigError`` if the network devices cannot have this memory."""
        address, size = place(memory)
        register(self._client, address, size)
        self._arena = range(address, address + size)

    def put(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """See ``Backend``."""
        work = partial(self._put_batch, names, objects, before)
        self._start_moves(Rank.PUT, ticket, names, objects, deadline_s, work)

    def get(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        after: After | None = None,
    ) -> None:
        """See ``Backend``."""
        work = partial(self._get_batch, names, objects, after)
        self._start_moves(Rank.GET, ticket, names, objects, deadline_s, work)

    def delete(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """See ``Backend``. An object goes even if somebody reads it."""
        self._start(Rank.DELETE, ticket, names, deadline_s, partial(self._delete_batch, tuple(names)))

    def look(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """See ``Backend``. Objects of a process that died count until the master misses it (``client_ttl``)."""
        self._start(Rank.LOOK, ticket, names, deadline_s, partial(self._look_batch, tuple(names)))

    def _end(self) -> None:
        atexit.unregister(self.close)
        client = self._client
        del self._client  # a call of a closed client would end this process
        client.close()

    # --- on the backend's threads -------------------------------------------------------------------

    def _start(self, rank: Rank, ticket: int, names: Sequence[str], deadline_s: float, work: Work) -> None:
        call = _BatchedCall(ticket, len(names), deadline_s)
        parts = by_number(len(names), NAMES_AT_ONCE)
        self._submit(rank, call, [partial(self._run, call, part, work) for part in parts])

    def _start_moves(
        self,
        rank: Rank,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        work: Moves,
    ) -> None:
        call = _BatchedCall(ticket, len(names), deadline_s)

        def spread() -> None:
            try:
                parts = by_size(names, objects, BATCH_PIECES, BATCH_BYTES, pieces_of)
                batches = list(parts if self._moves else first_alone(parts))
            except BaseException as problem:
                results: list[Result] = [(Outcome.FAILED, reason_of(problem))] * len(names)
                self._run(call, range(len(names)), lambda _: results)
                return
            for part in batches:
                self._queue.put((rank, next(self._turns), partial(self._move, rank, call, part, work)))

        self._submit(rank, call, [spread])

    def _run(self, call: _BatchedCall, part: Sequence[int], work: Work) -> None:
        call.begin()
        try:
            self._in_time(call)
            results = [call.hopeless] * len(part) if call.hopeless else work(part)
        except BaseException as problem:
            results = [(Outcome.FAILED, reason_of(problem))] * len(part)
        call.hopeless = call.hopeless or next((result for result in results if result in NO_MASTER), None)
        for k, (outcome, reason) in zip(part, results, strict=True):
            if answer := call.ended(k, outcome, reason):
                self._tell(answer)

    def _move(self, rank: Rank, call: _BatchedCall, part: Sequence[int], work: Moves) -> None:
        """Waits for a stage without a thread: one thread more than stages is left for looks."""
        with self._lock:
            if not self._stages:
                again = partial(self._move, rank, call, part, work)
                self._waiting.put((rank, next(self._turns), again))
                return
            stage = self._stages.pop()
        self._run(call, part, partial(self._moved, work, stage))
        with self._lock:
            self._stages.append(stage)
            if not self._waiting.empty():
                self._queue.put(self._waiting.get())

    def _moved(self, work: Moves, stage: Stage, part: Sequence[int]) -> list[Result]:
        results = work(stage, part)
        outcomes = {outcome for outcome, _ in results}
        self._moves = Outcome.FAILED not in outcomes and (self._moves or Outcome.OK in outcomes)
        return results

    def _put_batch(
        self,
        names: Sequence[str],
        objects: Sequence[Buffers],
        before: Callable[[int], None] | None,
        stage: Stage,
        part: Sequence[int],
    ) -> list[Result]:
        wrong = {k: reason for k in part if before is not None and (reason := _failing(before, k))}
        ready = [k for k in part if k not in wrong]
        pieces = Pieces(self._client, self._arena, stage)
        try:
            for k in ready:
                pieces.add(k, objects[k])
            pieces.fill()
            keys = [names[k] for k in ready]
            codes = self._client.batch_put_from_multi_buffers(keys, pieces.addresses, pieces.sizes, self._copies)
        finally:
            pieces.end()
        found = dict(zip(ready, self._stored(keys, codes), strict=True))
        return [found.get(k) or (Outcome.FAILED, wrong[k]) for k in part]

    def _stored(self, keys: Sequence[str], codes: Sequence[int]) -> list[Result]:
        """Results of a put, in which 0 may also mean that somebody has begun to store an object of this name.

        If that was a put of ours that failed half-way, the object never comes: the master is asked.
        """
        results = [meaning(code) for code in codes]
        asked = [k for k, key in enumerate(keys) if key in self._half_way and results[k][0] is Outcome.OK]
        for k, there in zip(asked, self._client.batch_is_exist([keys[k] for k in asked]) if asked else (), strict=True):
            if there != 1:
                results[k] = Outcome.FAILED, HALF_WAY
        if len(self._half_way) > MOST_HALF_WAY:
            self._half_way.clear()
        for key, (outcome, _) in zip(keys, results, strict=True):
            (self._half_way.add if outcome is Outcome.FAILED else self._half_way.discard)(key)
        return results

    def _get_batch(
        self,
        names: Sequence[str],
        objects: Sequence[Buffers],
        after: After | None,
        stage: Stage,
        part: Sequence[int],
    ) -> list[Result]:
        pieces = Pieces(self._client, self._arena, stage)
        try:
            for k in part:
                pieces.add(k, objects[k])
            keys = [names[k] for k in part]
            codes = self._client.batch_get_into_multi_buffers(keys, pieces.addresses, pieces.sizes)
            pieces.give_back([k for k, code in zip(part, codes, strict=True) if code >= 0])
        finally:
            pieces.end()
        wanted = [sum(sizes) for sizes in pieces.sizes]
        codes = self._with_lengths(keys, codes, wanted)
        return [_read(code, nbytes, k, after) for k, code, nbytes in zip(part, codes, wanted, strict=True)]

    def _with_lengths(self, keys: Sequence[str], codes: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """The codes; where a code is ambiguous and the length is wrong, the length."""
        found = list(codes)
        for k, code in enumerate(codes):
            if code in OTHER_LENGTH:
                nbytes = self._client.get_size(keys[k])
                if nbytes < 0:
                    break
                found[k] = code if nbytes == wanted[k] else nbytes
        return found

    def _look_batch(self, names: Sequence[str], part: Sequence[int]) -> list[Result]:
        codes = self._client.batch_is_exist([names[k] for k in part])
        return [(Outcome.MISS, "") if code == 0 else meaning(code) for code in codes]

    def _delete_batch(self, names: Sequence[str], part: Sequence[int]) -> list[Result]:
        return [meaning(code) for code in self._client.batch_remove([names[k] for k in part], True)]


def _failing(prepare: Callable[[int], None], k: int) -> str:
    """What went wrong; "" if nothing did."""
    try:
        prepare(k)
    except BaseException as problem:
        return reason_of(problem)
    return ""


def _read(code: int, wanted: int, k: int, after: After | None) -> Result:
    if code < 0:
        return meaning(code)
    if code != wanted:
        return Outcome.FAILED, f"{DAMAGED}: torn, or another object: it has {code:,} bytes, not {wanted:,}"
    try:
        wrong = "" if after is None else after(k, None)
    except BaseException as problem:
        wrong = reason_of(problem)
    return (Outcome.FAILED, wrong) if wrong else (Outcome.OK, "")
