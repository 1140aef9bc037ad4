"""A server that answers as a script says, in this thread's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "fake", "max_model_len": 4096}]}


@dataclass
class Request:
    """What came, and how to answer it."""

    path: str
    headers: Mapping[str, str]
    body: Any
    writer: asyncio.StreamWriter

    async def answer(self, data: Any, status: str = "200 OK", head: str = "") -> None:
        """One answer: JSON, or bytes as they are. ``head`` has further lines, each with its end."""
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        head = f"HTTP/1.1 {status}\r\n{head}content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
        self.writer.write(head.encode() + raw)
        await self.writer.drain()

    def begin(self) -> None:
        """The head of a stream that ends with the connection."""
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")

    def send(self, event: Any) -> None:
        """One event; text is sent as it is."""
        data = event if isinstance(event, str) else json.dumps(event)
        self.writer.write(f"data: {data}\n\n".encode())

    def piece(self, text: str = " a", **more: Any) -> None:
        """A piece of an answer."""
        self.send({"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]})

    async def whole(self, tokens: int, gap_s: float = 0.0, **usage: Any) -> None:
        """An answer, ``gap_s`` before each of its pieces."""
        self.begin()
        for i in range(tokens):
            await asyncio.sleep(gap_s)
            self.piece(f" {i}", **({"finish_reason": "length"} if i == tokens - 1 else {}))
        count = {"prompt_tokens": len(self.body["prompt"]), "completion_tokens": tokens} | usage
        self.send({"choices": [], "usage": count})
        self.send("[DONE]")
        await self.writer.drain()


Script = Callable[[Request], Awaitable[None]]


@dataclass
class FakeServer:
    """``script`` answers what generates; ``requests`` are those it got, in order. ``told``: other answers by path."""

    script: Script
    told: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    server: Any = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        task = asyncio.ensure_future(self._serve(reader, writer))
        self.tasks.add(task)
        await asyncio.wait({task})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.ExitStack() as at_end:
            at_end.callback(writer.close)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(head[0].split()[1], headers, json.loads(raw) if raw else None, writer)
            if request.path in self.told:
                await request.answer(self.told[request.path])
            elif request.path == "/v1/models":
                await request.answer(MODELS)
            elif request.path == "/version":
                await request.answer({"version": "1.2.3"})
            elif request.path == "/tokenize":
                words = request.body["prompt"].split()
                await request.answer({"tokens": [100 + sum(map(ord, word)) for word in words]})
            elif request.path == "/detokenize":
                await request.answer({"prompt": " ".join(chr(one - 100) for one in request.body["tokens"])})
            else:
                self.requests.append(request)
                await self.script(request)

    async def stop(self) -> None:
        """Ends all connections, those that hang too."""
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # sockets close in the loop's next rounds


@contextlib.asynccontextmanager
async def fake_server(script: Script, told: Mapping[str, Any] | None = None) -> AsyncIterator[FakeServer]:
    """Serves on a free port until the end of the block."""
    fake = FakeServer(script, told or {})
    fake.server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{fake.server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        await fake.stop()
