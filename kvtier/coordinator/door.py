"""The door to the remote tier: what it is offered, and what is asked of it. It leads nowhere until it is opened.

Owns       the remote tier behind the host tier, and the questions to it.
Promises   a text asks once. It waits for answers as ``seek`` says, then for its fetch. After a reset it waits for
           neither. Without a remote tier nobody waits, and nothing is under way.
Does not   copy between the device and the host tier: the ``Connector`` does, and is polled here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic

from kvtier.coordinator.match import Match
from kvtier.coordinator.seek import A, ComputeSeconds, Seeker
from kvtier.cpu_offload.connector import Connector
from kvtier.geometry.keys import KeyArray
from kvtier.pools.block_pool import BlockPools
from kvtier.remote.estimate import Estimate
from kvtier.remote.moves import Seek
from kvtier.remote.tier import RemoteTier


class RemoteDoor(Generic[A]):
    """``device``: pools with the content that need not be fetched. ``match``: what a text has in the tiers here."""

    def __init__(self, connector: Connector, device: BlockPools, match: Callable[[A], Match]) -> None:
        self._connector, self._device, self._match = connector, device, match
        self.poll: Callable[[], None] = connector.poll
        """Takes note of copies that have ended, on both sides of the host tier, and starts some spills."""
        self._seeker: Seeker[A] | None = None
        self.remote: RemoteTier | None = None
        """None: there is none."""

    def open(self, remote: RemoteTier) -> None:
        """Puts a remote tier behind the host tier."""
        self.remote, self._seeker = remote, Seeker(remote, self._device, self._match)
        self.poll = self._poll_both

    def is_waiting(self, text: A) -> bool:
        """Whether the text should wait for the remote. Asks it, or fetches, if that is due."""
        return self._seeker is not None and self._seeker.is_waiting(text)

    def estimate(self, seconds: ComputeSeconds) -> None:
        """What takes longer to fetch than ``seconds(start, end)``, if that is known, is computed.

        Raises ``ConfigError`` for what is no function.
        """
        estimate = Estimate(seconds)
        if self._seeker is not None:
            self._seeker.compute_s = estimate

    def offer(self, keys: KeyArray, boundaries: Iterable[int], seek: Seek | None) -> None:
        """Hits may end at these boundaries of the text with these keys. ``seek``: what it has asked."""
        if self.remote is not None:
            for n in boundaries:
                self.remote.offer(keys, n, seek)

    def supersede(self, keys: KeyArray, boundary: int, is_wanted: Callable[[bytes], bool]) -> None:
        """The text has gone on from a hit there; see ``RemoteTier``."""
        if self.remote is not None:
            self.remote.supersede(keys, boundary, is_wanted)

    def disown(self, keys: KeyArray) -> None:
        """What these keys name is wrong; see ``RemoteTier``."""
        if self.remote is not None:
            self.remote.disown(keys)

    def _poll_both(self) -> None:
        assert self.remote is not None
        self._connector.poll()
        self.remote.poll()
        self.remote.pump(self._connector.ledger.num_settled)

    @property
    def num_copies(self) -> int:
        """Copies to and from the host tier that are not overdue, on both of its sides."""
        moves = 0 if self.remote is None else self.remote.num_progressing
        return self._connector.ledger.num_progressing + moves

    def due_s(self, waiting: Iterable[A]) -> float:
        """Seconds until ``poll`` has something to do, or one of these waits no more, whatever the remote tells; or
        inf."""
        if self.remote is None or self._seeker is None:
            return float("inf")
        if self.remote.has_due:
            return 0.0
        now = self.remote.now()
        looks = (self._seeker.next_look_s(text.seek) for text in waiting)
        return max(0.0, min(self.remote.next_deadline_s(), *(at for at in looks if at > now), float("inf")) - now)

    def flush(self) -> None:
        """What waits for the host's evictions is spilled now."""
        if self.remote is not None:
            self.remote.flush()

    def reset(self) -> None:
        """The cache was reset: the remote is left alone from now on."""
        if self.remote is not None:
            self.remote.reset()

    def close(self, timeout_s: float) -> bool:
        """True if the remote touches no block any more."""
        return self.remote is None or self.remote.close(timeout_s)
