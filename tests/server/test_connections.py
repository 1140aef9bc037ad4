"""Connections: who goes when too many come. Real sockets on a server that takes few."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runner import AsyncLLM
from server.running import Running, serving
from server.test_abuse import HEAD

MOST = 16


@contextlib.contextmanager
def opened(running: Running, count: int, sends: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", int(running.url.rpartition(":")[2])
        sockets = []
        for _ in range(count):
            sockets.append(stack.enter_context(socket.create_connection(address, timeout=60)))
            if sends:
                with contextlib.suppress(OSError):
                    sockets[-1].sendall(sends)
        yield sockets


def is_closed(sock: socket.socket) -> bool:
    """Waits for the server to close it."""
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def health(running: Running) -> int:
    """Over a connection of its own."""
    return httpx.get(f"{running.url}/health", timeout=60).status_code


@pytest.mark.parametrize(
    "sends", [b"", b"GET /health HT", HEAD % 99 + b'{"pro'], ids=["nothing", "half a head", "half a body"]
)
def test_connections_that_ask_nothing_take_nobodys_place(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture, sends: bytes
) -> None:
    with (
        caplog.at_level(logging.WARNING, "kvtier.server"),
        serving(llm, max_connections=MOST, read_timeout_s=600.0) as running,
        opened(running, 5 * MOST, sends) as sockets,
    ):
        assert [health(running) for _ in range(3)] == [200] * 3
        assert all(is_closed(sock) for sock in sockets[:MOST])  # the oldest went
    told = [line for line in caplog.messages if f"{MOST} are open" in line]
    assert len(told) == 1


def test_a_connection_that_is_kept_goes_before_a_request_that_is_coming(llm: AsyncLLM) -> None:
    body = b'{"prompt": "w1", "max_tokens": 1}'
    with (
        serving(llm, max_connections=2, read_timeout_s=600.0) as running,
        opened(running, 1, HEAD % len(body)) as [coming],
        httpx.Client(base_url=running.url, timeout=60) as kept,
    ):
        assert kept.get("/health").status_code == 200
        assert health(running) == 200
        coming.sendall(body)
        assert coming.recv(12) == b"HTTP/1.1 200"


def test_requests_that_are_served_stay(llm: AsyncLLM) -> None:
    body: dict[str, Any] = {"prompt": "w1", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    body |= {"temperature": 0, "skip_special_tokens": False}  # each token is text, and an event
    with (
        serving(llm, max_connections=MOST, read_timeout_s=600.0) as running,
        httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as told,
    ):
        lines = (line for line in told.iter_lines() if line)
        next(lines)
        with opened(running, 3 * MOST) as sockets:
            assert is_closed(sockets[0])
            assert [next(lines).startswith("data: {") for _ in range(50)] == [True] * 50
