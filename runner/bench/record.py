"""What happened to each request. Times are seconds since the start of the run."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """How a request ended."""

    OK = "ok"
    CONNECT = "no connection"
    TLS = "TLS"
    TIMEOUT = "timeout"
    STATUS = "HTTP status"
    ERROR_EVENT = "error in the stream"
    BROKEN = "stream broken off"
    MALFORMED = "malformed answer"
    INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Record:
    """A request, from when it was due until its end."""

    session: int
    turn: int
    planned_prompt: int
    planned_output: int
    due_s: float
    is_open: bool
    """The clock alone has sent it; else it waited for an answer first."""
    ready_s: float = 0.0
    """When the generator came to it."""
    free_s: float = 0.0
    """When ``--max-concurrency`` let it go."""
    sent_s: float = 0.0
    end_s: float = 0.0
    outcome: Outcome = Outcome.INTERRUPTED
    error: str = ""
    times: array[float] = field(default_factory=lambda: array("d"))
    """When each piece of the answer came."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Cached tokens as the server told them; None: it did not."""
    finish_reason: str | None = None

    @property
    def is_ok(self) -> bool:
        """The answer is whole."""
        return self.outcome is Outcome.OK

    @property
    def produced(self) -> int:
        """Tokens of the answer: as told, else its pieces."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first piece."""
        return self.times[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None if none came apart from it."""
        if len(self.times) < 2 or self.produced < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.produced - 1)

    @property
    def late_s(self) -> float:
        """The generator's own delay, without the wait for ``--max-concurrency``."""
        return (self.ready_s - self.due_s) + (self.sent_s - self.free_s)

    @property
    def queued_s(self) -> float:
        """The whole of the time between due and sent."""
        return self.sent_s - self.due_s
