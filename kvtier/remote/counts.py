"""A remote tier's counters; they never fall."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.books import Latencies
from kvtier.machine.stats import RemoteStats
from kvtier.remote.backends.contract import DAMAGED, Answer, Outcome
from kvtier.remote.damages import KINDS, kind_of
from kvtier.remote.moves import Move, Way


@dataclass
class RemoteCounts:
    """Objects, bytes and calls since construction."""

    looks: int = 0
    late_looks: int = 0
    """Questions that a request has waited for in vain."""
    spilled_objects: int = 0
    spilled_bytes: int = 0
    fetched_objects: int = 0
    fetched_bytes: int = 0
    missed_objects: int = 0
    """Objects that were not there when they were to be read."""
    refused_objects: int = 0
    failed_spills: int = 0
    failed_fetches: int = 0
    """Objects that went wrong."""
    damaged_objects: int = 0
    """Failed fetches of objects that were not what they should be."""
    expired: int = 0
    """Calls that were given up."""
    superseded_texts: int = 0
    """Texts that were not spilled, or not wholly: the same request has offered more of the same text."""
    dropped_texts: int = 0
    dropped_objects: int = 0
    """Objects that were not spilled: the host had not all of their blocks."""
    not_worth: int = 0
    """Fetches that would have taken longer than to compute."""
    no_room: int = 0
    """Fetches for which the host had no room."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Failures and refusals by the first word of their reason."""
    damages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Damaged objects, by kind."""
    found_names: int = 0
    absent_names: int = 0
    """Objects that questions named, and that were there, or not."""
    look_latency: Latencies = field(default_factory=Latencies)
    spill_latency: Latencies = field(default_factory=Latencies)
    fetch_latency: Latencies = field(default_factory=Latencies)
    fetch_bytes_per_s: float = 0.0
    """Speed of the last fetches; 0 before the first one."""

    def note_look(self, answer: Answer) -> None:
        """A question was answered."""
        self.found_names += answer.outcomes.count(Outcome.OK)
        self.absent_names += answer.outcomes.count(Outcome.MISS)
        if answer.outcomes:
            self.look_latency.add(answer.seconds)

    def note(self, move: Move, answer: Answer, good: npt.NDArray[np.bool_]) -> None:
        """A spill or fetch has ended."""
        outcomes = answer.outcomes
        self.refused_objects += outcomes.count(Outcome.REFUSED)
        for reason in answer.reasons.values():
            if reason.startswith(DAMAGED):
                self.damaged_objects += 1
                self.damages[kind_of(reason)] += 1
        failed = outcomes.count(Outcome.FAILED)
        for reason in answer.reasons.values():
            word = reason.split(":")[0].split(" ")[0][:40]
            if word in self.reasons or len(self.reasons) < 64:
                self.reasons[word] = self.reasons.get(word, 0) + 1
        if move.way is Way.SPILL:
            self.spilled_objects += int(good.sum())
            self.spilled_bytes += int(move.object_bytes[good].sum())
            self.failed_spills += failed
            self.spill_latency.add(answer.seconds)
            return
        self.missed_objects += outcomes.count(Outcome.MISS)
        self.fetched_objects += int(good.sum())
        self.failed_fetches += failed
        self.fetch_latency.add(answer.seconds)
        num_bytes = int(move.object_bytes[good].sum())
        self.fetched_bytes += num_bytes
        if num_bytes:
            speed = num_bytes / max(answer.seconds, 1e-6)
            self.fetch_bytes_per_s = speed if not self.fetch_bytes_per_s else 0.7 * self.fetch_bytes_per_s + 0.3 * speed

    def stats(self, kind: str, is_on: bool, breaker_open: bool, live: int) -> RemoteStats:
        """A snapshot."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return RemoteStats(
            kind=kind,
            is_on=is_on,
            breaker_open=breaker_open,
            live=live,
            reasons=dict(self.reasons),
            damages=dict(self.damages),
            look_latency=self.look_latency.stats(),
            spill_latency=self.spill_latency.stats(),
            fetch_latency=self.fetch_latency.stats(),
            **own,
        )
