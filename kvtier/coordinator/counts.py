"""What happens to requests on their way through a cache, as numbers.

Owns       the counters of one cache's requests and steps; they outlast its schedulers.
Promises   counters never fall. The scheduling thread writes, any thread may read: the keys of a mapping never change,
           and numbers that belong together change in one assignment. Keeps I25.
Does not   decide anything, and knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from kvtier.coordinator.request import FinishReason
from kvtier.coordinator.tracked import Wait
from kvtier.machine.journal import SentBack

SIZES = 26
"""Sizes of steps: the last one holds all larger steps."""


ROWS, CANCELLED = SentBack("rows"), SentBack("cancel")
LOAD_FAILED, RESET, DISOWNED = SentBack("load_failed"), SentBack("reset"), SentBack("disowned")


class PrefixTokens(NamedTuple):
    """Prompt tokens at the first admissions of requests: all of them, and the tokens found in each tier."""

    queried: int = 0
    device: int = 0
    host: int = 0
    remote: int = 0


class RequestCounts:
    """The counters of one cache with groups of these ``names``."""

    def __init__(self, names: Sequence[str]) -> None:
        self.shortages = {who: dict.fromkeys(names, 0) for who in ("admission", "running")}
        """Answers "not now", by what lacked blocks and by group. A request that lacks blocks of two groups counts in
        both."""
        self.sent_back = {why: 0 for why, *_ in (ROWS, CANCELLED, LOAD_FAILED, RESET, DISOWNED)} | {"blocks": 0}
        """Requests that had a row and wait again, by reason; the first two and "blocks" are preemptions."""
        self.preempted_for = dict.fromkeys(names, 0)
        """Requests sent back for "blocks", by the group that lacked the most bytes."""
        self.waits = dict.fromkeys((wait.value for wait in Wait if wait is not Wait.QUEUE), 0)
        """Requests that began to wait, by reason. A request that is looked at again and gets the same answer is not
        counted again."""
        self.finished = dict.fromkeys(get_args(FinishReason), 0)
        self.prefix_tokens = PrefixTokens()
        self.step_sizes = [0] * SIZES
        """Committed steps, by size: entry i counts steps of 2**(i - 1) < tokens <= 2**i."""
        self.computed_tokens = 0
        """Tokens of committed steps."""
        self.cancelled_steps = 0
        self.generated_tokens = 0

    def lack(self, who: str, groups: Iterable[str]) -> None:
        """A request lacks blocks of these groups."""
        of = self.shortages[who]
        for name in groups:
            of[name] += 1

    def send_back(self, cause: SentBack) -> None:
        """A request waits again."""
        self.sent_back[cause.why] += 1
        if cause.group:
            self.preempted_for[cause.group] += 1

    def find(self, prompt: int, device: int, host: int, remote: int) -> None:
        """A request of ``prompt`` tokens is admitted for the first time."""
        now = zip(self.prefix_tokens, (prompt, device, host, remote), strict=True)
        self.prefix_tokens = PrefixTokens(*map(sum, now))

    def step(self, num_tokens: int) -> None:
        """A step is committed; a step without tokens is not counted."""
        if num_tokens:
            self.step_sizes[min((num_tokens - 1).bit_length(), SIZES - 1)] += 1
            self.computed_tokens += num_tokens

    def numbers(self) -> dict[str, int]:
        """All counters by name; for auditing."""
        groups = {f"shortages.{who}.{name}": n for who, of in self.shortages.items() for name, n in of.items()}
        parts = {"sent back": self.sent_back, "preempted for": self.preempted_for, "waits": self.waits}
        parts |= {"finished": self.finished, "prefix tokens": self.prefix_tokens._asdict()}
        found = groups | {f"{what}.{name}": n for what, of in parts.items() for name, n in of.items()}
        found |= {f"steps.{i}": n for i, n in enumerate(self.step_sizes)}
        single = ("computed_tokens", "cancelled_steps", "generated_tokens")
        return found | {name: getattr(self, name) for name in single}
