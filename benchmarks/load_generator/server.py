"""A server that streams pieces at a fixed pace and computes nothing.

``python -m benchmarks.load_generator.server GAP`` prints its port. Each answer has as many pieces as ``max_tokens``
says, ``GAP`` seconds apart.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

_CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
_ABOUT = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1764134400, "model": "m"}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(data: object) -> bytes:
    return _chunk(b"data: %b\n\n" % json.dumps(data).encode())


_PIECE = _event(_ABOUT | {"choices": [_CHOICE]})
_LAST = _event(_ABOUT | {"choices": [_CHOICE | {"finish_reason": "length"}]})
_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def _serve(gap_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = re.search(rb"content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b"{}"
            due_s = loop.time()
            writer.write(_HEAD)
            for i in range(tokens := int(json.loads(body).get("max_tokens", 1))):
                due_s += gap_s
                await asyncio.sleep(due_s - loop.time())
                writer.write(_LAST if i == tokens - 1 else _PIECE)
            writer.write(_event(_ABOUT | {"choices": [], "usage": {"completion_tokens": tokens}}) + _DONE)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _main(gap_s: float) -> None:
    server = await asyncio.start_server(lambda r, w: _serve(gap_s, r, w), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1])))
