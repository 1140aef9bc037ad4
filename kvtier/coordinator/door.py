"""A remote behind a host tier of an engine with its own memory: what it is offered, and what is asked of it.

Owns       the tier behind the host tier, and a question for each text that has asked.
Promises   a text asks once. It waits for answers as ``seek`` says, then for its fetch. After a reset it waits for
           neither.
Does not   know the content of the device: blocks that only the device has are fetched again if others of the same hit
           are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakSet

from kvtier.coordinator.match import Match
from kvtier.coordinator.seek import ComputeSeconds, Seeker
from kvtier.geometry.keys import KeyArray
from kvtier.pools.block_pool import BlockPools
from kvtier.remote.moves import Seek
from kvtier.remote.tier import RemoteTier


@dataclass(eq=False)
class Sought:
    """A text that asks. ``found``: what the device and the host tier have of it."""

    keys: KeyArray
    tokens: range
    found: Match
    seek: Seek | None = None


class RemoteDoor:
    """``remote``: behind the host pools. ``nothing``: pools of the same groups without content."""

    def __init__(self, remote: RemoteTier, nothing: BlockPools) -> None:
        self.remote = remote
        self._seeker: Seeker[Sought] = Seeker(remote, nothing, lambda text: text.found)
        self._waiting: WeakSet[Sought] = WeakSet()

    def estimate_compute(self, seconds: ComputeSeconds) -> None:
        """What takes longer to fetch than ``seconds(start, end)``, if that is known, is computed."""
        self._seeker.compute_s = seconds

    def is_waiting(self, text: Sought) -> bool:
        """Whether the text should wait for the remote. Asks it, or fetches, if that is due."""
        if text.seek is not None:
            self.remote.poll()
        waits = self._seeker.is_waiting(text)
        (self._waiting.add if waits else self._waiting.discard)(text)
        return waits

    def offer(self, keys: KeyArray, boundaries: Iterable[int], asked: Sought | None) -> None:
        """Hits may end at these boundaries of the text with these keys. ``asked``: what it has asked."""
        seek = None if asked is None else asked.seek
        for n in sorted(boundaries, reverse=True):
            self.remote.offer(keys, n, seek)

    def supersede(self, keys: KeyArray, boundary: int, is_wanted: Callable[[bytes], bool]) -> None:
        """The text has gone on from a hit there; see ``RemoteTier``."""
        self.remote.supersede(keys, boundary, is_wanted)

    def poll(self, settled: int) -> None:
        """Takes note of what has ended, and starts some spills. ``settled``: copies that have ended so far."""
        self.remote.poll()
        self.remote.pump(settled)

    def due_s(self) -> float:
        """Seconds until ``poll`` has something to do, or a text waits no more, whatever the remote tells; or inf."""
        if self.remote.has_due:
            return 0.0
        now = self.remote.now()
        looks = [self._seeker.next_look_s(text.seek) for text in self._waiting]
        return max(0.0, min([self.remote.next_deadline_s(), *(at for at in looks if at > now)]) - now)
