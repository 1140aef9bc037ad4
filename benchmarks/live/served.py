"""A server in a process of its own, those that watch it in another, and what the processes take.

    python -m benchmarks.live.served EVERY_S          serves the bundled model, and says where
    python -m benchmarks.live.served watch URL N      N listeners that read all, and say how much
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_HEAD = "GET /watch HTTP/1.1\r\nHost: here\r\n\r\n"


class Process:
    """A child, and what the system says of it."""

    def __init__(self, child: subprocess.Popen[str], url: str) -> None:
        self._child = child
        self.url = url

    @property
    def rss_mib(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self._child.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Process]:
    """This module as a child, until the end of the block; its first line says where it serves."""
    command = [sys.executable, "-m", "benchmarks.live.served", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"{command} has ended; stderr says why")
            yield Process(child, url)
        finally:
            child.terminate()


@contextlib.contextmanager
def watched(url: str, listeners: int) -> Iterator[None]:
    """``listeners`` watch until the end of the block."""
    if not listeners:
        yield
        return
    with started("watch", url, str(listeners)):
        yield


def serve(every_s: float) -> None:
    """Serves until it is killed; the page's snapshots are ``every_s`` seconds apart."""
    import torch

    from runner import AsyncLLM, needle
    from runner.server.app import create_app
    from runner.server.lifecycle import Server
    from runner.server.settings import Settings
    from runner.server.sockets import bind

    torch.set_num_threads(1)
    with AsyncLLM(needle.weights_path(), device="cpu", device_memory="48MiB", host_memory="48MiB") as llm:
        app = create_app(llm, Settings(names=("needle",)))
        app.state.sampler.every_s = every_s
        sock = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        Server(app, on_start=lambda: print(url, flush=True), log_level="warning").run(sockets=[sock])


async def watch(url: str, listeners: int) -> None:
    """Reads events and forgets them, until it is killed."""
    address = urlsplit(url)
    all_in = asyncio.Barrier(listeners)

    async def one() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**22)
        writer.write(_HEAD.encode())
        await reader.readuntil(b"event: snapshot")
        if await all_in.wait() == 0:
            print(url, flush=True)
        while await reader.read(2**16):
            pass

    await asyncio.gather(*(one() for _ in range(listeners)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        if sys.argv[1] == "watch":
            asyncio.run(watch(sys.argv[2], int(sys.argv[3])))
        else:
            serve(float(sys.argv[1]))
