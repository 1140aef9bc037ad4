"""HTTP to the server under test, with aiohttp: a third of httpx's CPU time for each streamed token.

Promises   a request ends in an ``Outcome``, whatever the server does. Times are taken when bytes arrive, before they
           are read as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvtier.machine.errors import ConfigError
from runner.bench import told
from runner.bench.record import Outcome, Record
from runner.bench.sse import EventReader
from runner.bench.told import Malformed

IDLE_S = 2.0
"""A connection that was idle for longer is not used again: servers close theirs after 5 seconds or more."""
_MOST_OF_AN_ERROR = 400
_MOST_OF_A_FAILURE = 2**16
"""Bytes that are read of an answer with another status than 200."""


@dataclass(frozen=True)
class Target:
    """Where requests go, and how long they may take.

    ``basic_auth`` is ``user:password``; no part of ``base_url`` is secret.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    ca_certs: str | None = None
    insecure: bool = False
    timeout_s: float = 3600.0
    connect_timeout_s: float = 30.0
    basic_auth: str | None = None


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
        elif target.basic_auth:
            user = target.basic_auth.encode(errors="surrogateescape")
            headers["Authorization"] = f"Basic {base64.b64encode(user).decode()}"
        limits = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=target.connect_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=_ssl(target))
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=limits)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def call(self, path: str, body: Any = None) -> tuple[int, Any, str]:
        """(Status, JSON or else text, ``Server`` header); raises ``ConfigError`` if nobody answers.

        Of a redirect the text is what it says: none is followed, so that figures and keys stay with one server.
        """
        url = self.target.base_url + path
        try:
            method = "GET" if body is None else "POST"
            async with self._session.request(method, url, json=body, allow_redirects=False) as response:
                raw, software = await response.read(), response.headers.get("Server", "")
                if there := _redirect(response):
                    return response.status, there, software
                try:
                    data = told.parsed(raw)
                except ValueError:
                    data = raw.decode(errors="replace")
                return response.status, data, software
        except (aiohttp.ClientError, OSError, ValueError) as problem:  # TimeoutError is an OSError
            raise ConfigError(f"no answer from {url}: {_said(problem)}") from problem

    async def send(self, body: bytes, record: Record) -> Answer:
        """Sends a request and reads its stream to the end; what happens is written to ``record``."""
        answer, is_connected = Answer(), False
        reading = _Reading(record, answer)
        record.sent_s = self.now()
        try:
            url = self.target.base_url + self.target.endpoint
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                is_connected = True
                if response.status != 200:
                    said = _redirect(response) or _message(await _beginning(response))
                    record.outcome, record.error = Outcome.STATUS, f"{response.status}: {said}"
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
        except Malformed as problem:
            record.outcome, record.error = Outcome.MALFORMED, _said(problem)
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
        """Times of choices without text or ids, before any other. A server without a tokenizer sends only such ones."""
        self._is_done = False

    def take(self, data: bytes, now: float) -> None:
        """Reads one event that came at ``now``."""
        if data.startswith(b"[DONE]"):
            self._is_done = True
            return
        try:
            event = told.parsed(data)
        except ValueError as problem:
            raise Malformed(f"an event that is not JSON: {problem}") from problem
        try:
            self._take(event, data, now)
        except (AttributeError, TypeError) as problem:
            raise Malformed(f"an event of an unknown form: {data[:80]!r}") from problem

    def _take(self, event: dict[str, Any], data: bytes, now: float) -> None:
        record = self._record
        if event.get("error"):
            record.outcome, record.error = Outcome.ERROR_EVENT, _message(data)
        for choice in event.get("choices") or ():
            self._choice(choice, now)
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            record.prompt_tokens = _count(usage.get("prompt_tokens"), record.prompt_tokens)
            record.output_tokens = _count(usage.get("completion_tokens"), record.output_tokens)
            record.cached_tokens = _count(cached, record.cached_tokens)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        said = choice.get("delta") or choice
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        text = said.get("text") or said.get("content") or said.get("reasoning_content") or said.get("reasoning") or ""
        if not isinstance(text, str) or not (finish is None or isinstance(finish, str)) or told.ids(ids or []) is None:
            raise TypeError("a choice of an unknown form")
        is_silent = ids is None and "role" not in said
        follows = bool(self._record.times) and not finish
        if text or ids or said.get("tool_calls") or (is_silent and follows):  # some tokens have no text
            self._record.times.append(now)
        elif is_silent:
            self._silent.append(now)
        if text:
            self._answer.texts.append(text)
        if ids is not None:
            self._answer.token_ids = (self._answer.token_ids or []) + ids
        self._record.finish_reason = finish or self._record.finish_reason

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


def _count(value: Any, known: int | None) -> int | None:
    """``value`` if it is a number of tokens; else what was known."""
    found = told.count(value)
    return known if found is None else found


def _redirect(response: aiohttp.ClientResponse) -> str | None:
    """The address that a redirect names; None of any other answer."""
    there = response.headers.get("Location")
    if there is None or not 300 <= response.status < 400:
        return None
    return f"a redirect to {there[:_MOST_OF_AN_ERROR]}, which is not followed"


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Enough of an answer for its message."""
    found = bytearray()
    async for received in response.content.iter_any():
        found += received
        if len(found) >= _MOST_OF_A_FAILURE:
            break
    return bytes(found)


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


def _message(raw: bytes) -> str:
    """The message of an error's JSON, in OpenAI's form or FastAPI's; else the text."""
    text = raw.decode(errors="replace")
    try:
        body = told.parsed(raw)
        error = body.get("error", body)
        text = str(error.get("message") or error.get("detail") or text if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(text.split())[:_MOST_OF_AN_ERROR]
