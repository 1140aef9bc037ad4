"""HTTP to the server under test, with aiohttp: a third of httpx's CPU time for each streamed token.

Promises   a request ends in an ``Outcome``, whatever the server does. Times are taken when bytes arrive, before they
           are read as JSON.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvtier.errors import ConfigError
from runner.bench.record import Outcome, Record
from runner.bench.sse import EventReader

IDLE_S = 2.0
"""A connection that was idle for longer is not used again: servers close theirs after 5 seconds or more."""
_MOST_OF_AN_ERROR = 400


@dataclass(frozen=True)
class Target:
    """Where requests go, and how long they may take."""

    base_url: str
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    ca_certs: str | None = None
    insecure: bool = False
    timeout_s: float = 3600.0
    connect_timeout_s: float = 30.0


@dataclass
class Answer:
    """What the server said, beside the figures of a ``Record``."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    """None: the server does not tell them."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Client:
    """One server. Use it as an asynchronous context; ``now`` is the run's clock."""

    def __init__(self, target: Target, now: Callable[[], float]) -> None:
        self.target = target
        self.now = now

    async def __aenter__(self) -> Client:
        target = self.target
        headers = {"Content-Type": "application/json", **dict(target.headers)}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        limits = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=target.connect_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=_ssl(target))
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=limits)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def call(self, path: str, body: Any = None) -> tuple[int, Any, str]:
        """(Status, JSON if it is some, ``Server`` header); raises ``ConfigError`` if nobody answers."""
        url = self.target.base_url + path
        try:
            method = "GET" if body is None else "POST"
            async with self._session.request(method, url, json=body) as response:
                raw = await response.read()
                try:
                    data = json.loads(raw)
                except ValueError:
                    data = raw.decode(errors="replace")
                return response.status, data, response.headers.get("Server", "")
        except (aiohttp.ClientError, OSError) as problem:  # TimeoutError is an OSError
            raise ConfigError(f"no answer from {url}: {_said(problem)}") from problem

    async def send(self, body: bytes, record: Record) -> Answer:
        """Sends a request and reads its stream to the end; what happens is written to ``record``."""
        answer, is_connected = Answer(), False
        reading = _Reading(record, answer)
        record.sent_s = self.now()
        try:
            async with self._session.post(self.target.base_url + self.target.endpoint, data=body) as response:
                is_connected = True
                if response.status != 200:
                    text = await response.text(errors="replace")
                    record.outcome, record.error = Outcome.STATUS, f"{response.status}: {_message(text)}"
                    return answer
                events = EventReader()
                async for received in response.content.iter_any():
                    now = self.now()
                    for data in events.feed(received):
                        reading.take(data, now)
            reading.finish()
        except (aiohttp.ClientSSLError, ssl.SSLError) as problem:
            record.outcome, record.error = Outcome.TLS, _said(problem)
        except TimeoutError as problem:
            record.outcome, record.error = Outcome.TIMEOUT, _said(problem)
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as problem:
            record.outcome, record.error = Outcome.CONNECT, _said(problem)
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            record.outcome = Outcome.BROKEN
            record.error = _said(problem) if is_connected else f"before an answer: {_said(problem)}"
        finally:
            record.end_s = self.now()
        return answer


class _Reading:
    """A stream of completions or chats, event by event."""

    def __init__(self, record: Record, answer: Answer) -> None:
        self._record = record
        self._answer = answer
        self._silent: list[float] = []
        """When choices without text or ids came before any other; a server without a tokenizer sends no others."""
        self._is_done = False

    def take(self, data: bytes, now: float) -> None:
        """Reads one event that came at ``now``."""
        if data.startswith(b"[DONE]"):
            self._is_done = True
            return
        try:
            self._take(json.loads(data), data, now)
        except (AttributeError, TypeError) as problem:
            raise ValueError(f"an event of an unknown form: {data[:80]!r}") from problem

    def _take(self, event: dict[str, Any], data: bytes, now: float) -> None:
        record = self._record
        if event.get("error"):
            record.outcome, record.error = Outcome.ERROR_EVENT, _message(data.decode(errors="replace"))
        for choice in event.get("choices") or ():
            self._choice(choice, now)
        if usage := event.get("usage"):
            record.prompt_tokens = _count(usage.get("prompt_tokens"), record.prompt_tokens)
            record.output_tokens = _count(usage.get("completion_tokens"), record.output_tokens)
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = _count(details.get("cached_tokens"), record.cached_tokens)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        said = choice.get("delta") or choice
        ids = choice.get("token_ids")
        text = said.get("text") or said.get("content") or said.get("reasoning_content") or said.get("reasoning") or ""
        is_silent = ids is None and "role" not in said
        follows = bool(self._record.times) and not choice.get("finish_reason")
        if text or ids or said.get("tool_calls") or (is_silent and follows):  # some tokens have no text
            self._record.times.append(now)
        elif is_silent:
            self._silent.append(now)
        if text:
            self._answer.texts.append(text)
        if ids is not None:
            self._answer.token_ids = (self._answer.token_ids or []) + ids
        self._record.finish_reason = choice.get("finish_reason") or self._record.finish_reason

    def finish(self) -> None:
        """The stream has ended without trouble: was the answer whole?"""
        record = self._record
        if not record.times:
            record.times.extend(self._silent)
        if record.outcome is Outcome.ERROR_EVENT:
            return
        if not (self._is_done or record.finish_reason):
            record.outcome, record.error = Outcome.BROKEN, "the stream ended before the answer did"
        elif not record.times:
            record.outcome, record.error = Outcome.BROKEN, "an answer without a token"
        else:
            record.outcome = Outcome.OK


def _count(told: Any, known: int | None) -> int | None:
    """What was told, if it is a number of tokens; else what was known."""
    return told if isinstance(told, int) and told >= 0 else known


def _ssl(target: Target) -> ssl.SSLContext | bool:
    if target.insecure:
        return False
    if target.ca_certs is None:
        return True
    try:
        return ssl.create_default_context(cafile=target.ca_certs)
    except (OSError, ssl.SSLError) as problem:
        raise ConfigError(f"--ssl-ca-certs {target.ca_certs} cannot be read: {problem}") from problem


def _said(problem: BaseException) -> str:
    if isinstance(problem, asyncio.TimeoutError) and not str(problem):
        return "took too long"
    return " ".join(str(problem).split())[:_MOST_OF_AN_ERROR] or type(problem).__name__


def _message(text: str) -> str:
    """The message of an error's JSON, in OpenAI's form or FastAPI's; else the text."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message") or error.get("detail") or text if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:_MOST_OF_AN_ERROR]
