"""A server in this process, on a port of its own."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as transport
from patience import PATIENCE_S

from runner import AsyncLLM
from runner.server.app import create_app
from runner.server.deadline import Deadline
from runner.server.lifecycle import Server
from runner.server.settings import Settings
from runner.server.sockets import bind

for _step in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _step, PATIENCE_S)  # httpx's own is 5 s
# Each call of httpx.post would read all certificates anew, which takes 20 ms. Servers here speak plain HTTP.
transport.create_ssl_context = functools.cache(transport.create_ssl_context)


@dataclass
class Running:
    """A server that runs in a thread."""

    server: Server
    llm: AsyncLLM
    url: str
    thread: threading.Thread

    @property
    def admission(self) -> Any:
        return self.server.served.admission


@contextlib.contextmanager
def serving(
    llm: AsyncLLM, send_buffer: int | None = None, deadline: Deadline | None = None, **settings: Any
) -> Iterator[Running]:
    """Serves ``llm`` until the end of the block, which does not close it. ``send_buffer``: bytes the kernel keeps;
    ``deadline``: as ``Server`` has it."""
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    started = threading.Event()

    app = create_app(llm, Settings(**{"names": ("needle",), "log_stats": False, **settings}))
    server = Server(app, on_start=started.set, deadline=deadline, log_level="warning")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield Running(server, llm, f"http://127.0.0.1:{sock.getsockname()[1]}", thread)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        sock.close()
        server.served.close()


def gate(monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM, *gates: threading.Event | None) -> None:
    """The engine's next forwards each wait for their gate, and all later ones for the last; None is open."""
    forward, calls = llm.model.forward, count()

    def gated(*args: Any) -> Any:
        at = gates[min(next(calls), len(gates) - 1)]
        assert at is None or at.wait(PATIENCE_S)
        return forward(*args)

    monkeypatch.setattr(llm.model, "forward", gated)
