"""The outcome of requests: the reports of the next commit, and the counters that they add up to.

Owns       both.
Promises   a request is reported once, when it has ended; counters never fall. Keeps I25, I30.
Does not   end requests (scheduler).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.coordinator.request import FinishedRequest, FinishReason
from kvtier.coordinator.tracked import Tracked


class Reports:
    """The figures of one scheduler; its counters go on from the previous scheduler's."""

    def __init__(self, tiers: Sequence[str] = ("device", "host")) -> None:
        """``tiers``: where cached tokens may come from."""
        self._tiers = tuple(tiers)
        self.pending: list[FinishedRequest] = []
        """Not given to the engine yet."""
        self.num_finished = 0
        """Counter: requests ended."""
        self.num_preemptions = 0
        """Counter: preemptions."""
        self.prompt_tokens = dict.fromkeys((*tiers, "computed"), 0)
        """Counter: prompt tokens of finished requests that were admitted, by source.

        Replaced, not changed: another thread reads all of a request or nothing."""

    def go_on_from(self, before: Reports) -> None:
        """Adds the previous scheduler's counters. That scheduler had nothing left to report."""
        self.num_finished += before.num_finished
        self.num_preemptions += before.num_preemptions
        for source, n in before.prompt_tokens.items():
            self.prompt_tokens[source] += n

    def add(self, seq: Tracked, reason: FinishReason) -> None:
        """``seq`` has ended."""
        self.num_finished += 1
        prompt = len(seq.request.tokens)
        if seq.cached_tokens is not None:
            tokens = {**seq.cached_tokens, "computed": prompt - sum(seq.cached_tokens.values())}
            self.prompt_tokens = {source: n + tokens[source] for source, n in self.prompt_tokens.items()}
        self.pending.append(
            FinishedRequest(
                request_id=seq.request.request_id,
                token_ids=seq.tokens[prompt:].tolist(),
                finish_reason=reason,
                cached_tokens=seq.cached_tokens or dict.fromkeys(self._tiers, 0),
                preemptions=seq.preemptions,
                queue_s=seq.queue_s,
            )
        )

    def take(self) -> list[FinishedRequest]:
        """The reports that were not given out yet."""
        given, self.pending = self.pending, []
        return given
