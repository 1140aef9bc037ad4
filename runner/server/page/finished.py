"""The last requests that have ended, for the page: where their prompts came from, how they went, and how long it took.

Promises   bounded lists. Requests that were refused, or came to a dead engine, are not among them: they would push out
           those that ran. Everything happens on the event loop, next to the answers; the engine's thread has no part.
Does not   keep a prompt, an answer, or any text of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence, Sized
from contextlib import aclosing
from typing import Any, Protocol

from kvtier import InvalidRequest, RequestTooLarge
from runner.engine.outputs import RequestOutput
from runner.errors import EngineDead, Overloaded
from runner.server.admission import Ticket

KEPT = 50
"""Requests."""
TIMED = 500
"""Requests, of those that had a first token, whose times are kept."""
PERCENTILES = (50, 95, 99)


class Prompt(Protocol):
    """A prompt that was read."""

    @property
    def token_ids(self) -> Sized:
        """The prompt's token ids."""


class Course:
    """One engine request from its start to its end."""

    __slots__ = ("_finished", "_generated", "_head", "_owner", "_start_s")

    def __init__(self, finished: Finished, ticket: Ticket, engine_id: str, prompt_tokens: int) -> None:
        self._finished: Finished | None = finished
        self._owner = ticket.owner
        self._head = {"id": ticket.name or engine_id, "engine_id": engine_id, "prompt": prompt_tokens}
        self._generated: dict[int, int] = {}  # tokens by answer
        self._start_s = time.perf_counter()

    def count(self, output: RequestOutput) -> None:
        """Takes what is new of it. The last output is its end."""
        for answer in output.outputs:
            self._generated[answer.index] = self._generated.get(answer.index, 0) + len(answer.token_ids)
        if output.finished:
            found, reasons = output.cached_tokens, {answer.finish_reason for answer in output.outputs}
            if self._finished is not None and output.ttft_s is not None:
                self._finished.note_times(output.ttft_s, output.latency_s, max(self._generated.values()))
            self._end(
                "error" if "error" in reasons else output.finish_reason or "error",
                tiers=found,
                ttft_s=None if output.ttft_s is None else round(output.ttft_s, 4),
                preemptions=output.preemptions,
            )

    @property
    def has_begun(self) -> bool:
        """Whether anything of its answer has come."""
        return bool(self._generated)

    def close(self, reason: str) -> None:
        """Nothing more comes of it: unless it had ended before, it ends for ``reason``."""
        self._end(reason, tiers={"device": None, "host": None}, ttft_s=None, preemptions=None)

    def _end(self, reason: str, tiers: Mapping[str, int | None], **more: int | float | None) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            took, generated = round(time.perf_counter() - self._start_s, 4), sum(self._generated.values())
            end = {"reason": reason, "generated": generated, "seconds": took, "ended": int(time.time() * 1000)}
            finished.rows.append((self._owner, {**self._head, **end, **tiers, **more}))


class Finished:
    """The last ``KEPT`` of a server."""

    def __init__(self) -> None:
        self.rows: deque[tuple[str, dict[str, Any]]] = deque(maxlen=KEPT)
        """Owners, and plain values; oldest first. Numbers are None if nobody has told them: a client left."""
        self._first_s: deque[float] = deque(maxlen=TIMED)
        self._token_s: deque[float] = deque(maxlen=TIMED)

    def of(self, owner: str | None) -> list[dict[str, Any]]:
        """The requests that ``owner`` may see; None: all."""
        return [row for its, row in self.rows if owner in (its, None)]

    def note_times(self, ttft_s: float, latency_s: float, tokens: int) -> None:
        """A request has ended, with ``tokens`` in its longest answer."""
        self._first_s.append(ttft_s)
        if tokens > 1:
            self._token_s.append(max(0.0, latency_s - ttft_s) / (tokens - 1))

    def times(self) -> dict[str, list[float] | None]:
        """``PERCENTILES`` of the last ``TIMED``: seconds to the first token, and of each later token; None: there are
        none."""
        return {"first_token_s": _percentiles(self._first_s), "token_s": _percentiles(self._token_s)}

    async def follow(
        self, ticket: Ticket, prompts: Sequence[Prompt], outputs: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """``outputs`` of an HTTP request's prompts, by index, as they come. Whatever ends them, all have ended then."""
        asked = zip(ticket.engine_ids, prompts, strict=True)
        courses = [Course(self, ticket, engine_id, len(prompt.token_ids)) for engine_id, prompt in asked]
        reason = "error"
        try:
            async with aclosing(outputs) as given:
                async for index, output in given:
                    courses[index].count(output)
                    yield index, output
        except (GeneratorExit, asyncio.CancelledError):
            reason = "abort"
            raise
        except (InvalidRequest, RequestTooLarge, Overloaded, EngineDead) as problem:
            reason = "error" if isinstance(problem, EngineDead) else "refused"
            courses = [course for course in courses if course.has_begun]
            raise
        finally:
            for course in courses:
                course.close(reason)


def _percentiles(values: Sequence[float]) -> list[float] | None:
    """The smallest value that so many percent of all do not exceed."""
    ranked = sorted(values)
    return [round(ranked[-(-len(ranked) * p // 100) - 1], 5) for p in PERCENTILES] if ranked else None
