"""Engines over a remote, in processes of their own that may be killed: canary engines, which know each right token.

``Engines`` starts a process that imports once and forks an engine for each job. It speaks JSON, a line for each thing
that happens.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from core.driving import Serving, prompt
from patience import PATIENCE_S, be_patient_with_backends

from kvtier import ChunkedLocal, FullAttention, KVCache, SlidingWindow
from kvtier.cache.warmup import warm_up
from kvtier.remote import objects
from kvtier.remote.backends.object_store import load_obstore
from kvtier.remote.envelope import checksum_of
from kvtier.testing import canary_spec

GROUPS = {"full": (FullAttention(), 16), "win": (SlidingWindow(48), 16), "chunk": (ChunkedLocal(64), 16)}
LAYERS = {"full": 16, "win": 16, "chunk": 16}
NAMES = {"model_id": "m", "key_secret": b"s"}
LEAST_BYTES = 16 << 10
"""Of an object: a prompt of 1,000 tokens has some 16."""
TOKENS = 1000


def open_engine(uri: object, **options: Any) -> Serving:
    """An engine over this remote."""
    with patch.object(objects, "LEAST_BYTES", LEAST_BYTES):
        cache = KVCache(
            canary_spec(GROUPS, num_layers=LAYERS),
            device_blocks={"full": 90, "win": 40, "chunk": 40},
            host_blocks={"full": 400, "win": 200, "chunk": 200},
            remote_uri=uri,
            **(NAMES | {"deadline_s": PATIENCE_S} | options),
        )
    return Serving(cache, max_batched_tokens=512, max_running=4, audit_every=20)


def wrong_objects(folder: Path) -> list[tuple[str, str]]:
    """What does not verify of a directory."""
    from kvtier.remote.keeper.shelf import FolderShelf
    from kvtier.remote.keeper.upkeep import verify

    return verify(FolderShelf(folder)).wrong


# --- in the engine's process ----------------------------------------------------------------------


def _tell(job: dict[str, Any], at: str, **more: Any) -> None:
    os.write(1, (json.dumps({"name": job["name"], "at": at, **more}) + "\n").encode())  # a line is written as a whole


def _serve(job: dict[str, Any]) -> None:
    if job["largest_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    be_patient_with_backends(pytest.MonkeyPatch())
    engine = open_engine(job["uri"])
    store, puts = engine.cache.core.coordinator.door.remote.backend, 0
    put = store.put

    def told_put(ticket: int, names: Sequence[str], *arguments: Any) -> None:
        nonlocal puts
        put(ticket, names, *arguments)
        puts += len(names)
        if puts - len(names) < job["tell_at"] <= puts:
            _tell(job, "spilling")

    store.put = told_put
    _tell(job, "open", pid=os.getpid())
    for _ in range(job["turns"]):
        for k in job["prompts"]:
            done = engine.serve(f"r{len(engine.requests)}", prompt(k, TOKENS), 3)
            _tell(job, "served", cached=done.cached_tokens)
        if job["forgets"]:
            engine.cache.core.coordinator.pools.forget_all()
            engine.cache.core.host.forget_all()
    stats = engine.cache.stats().remote
    engine.cache.close()
    numbers = {name: n for name, n in vars(stats).items() if isinstance(n, int)}
    _tell(job, "ended", stats=numbers, reasons=stats.reasons)


def _warm_up() -> None:
    """Compiles all loops, without a thread: what is forked has them."""
    cache = KVCache(canary_spec(GROUPS, num_layers=LAYERS), device_blocks=dict.fromkeys(GROUPS, 20))
    Serving(cache).serve("r", prompt(0, 40), 3)
    cache.close()
    warm_up()
    checksum_of([memoryview(bytearray(64))])
    load_obstore()


def _bury(*_: object) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        os.write(1, (json.dumps({"name": f"process {pid}", "at": "gone", "status": status}) + "\n").encode())


def main() -> None:
    """Forks an engine for each line."""
    _warm_up()
    signal.signal(signal.SIGCHLD, _bury)
    os.write(1, b'{"name": "", "at": "ready"}\n')
    for line in sys.stdin:
        job = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            _serve(job)
        except BaseException:
            _tell(job, "wrong", why=traceback.format_exc()[-3000:])
        os._exit(0)


# --- in the test's --------------------------------------------------------------------------------


class Engine:
    """One of ``Engines``."""

    def __init__(self, of: Engines, name: str) -> None:
        self._of = of
        self.name = name
        self.pid = of.until(name, "open")["pid"]

    def until(self, at: str) -> dict[str, Any]:
        """The next thing of this kind that it tells."""
        return self._of.until(self.name, at)

    def ended(self) -> dict[str, Any]:
        """What it tells when it has served everything; it is gone then."""
        told = self.until("ended")
        self._of.until(f"process {self.pid}", "gone")
        return told

    def kill(self) -> None:
        """At once."""
        os.kill(self.pid, signal.SIGKILL)
        self._of.until(f"process {self.pid}", "gone")

    @property
    def cached(self) -> list[dict[str, int]]:
        """Of each prompt that it has served, as far as it was heard."""
        return [told["cached"] for told in self._of.heard if (told["name"], told["at"]) == (self.name, "served")]


class Engines:
    """A context. What an engine finds wrong is raised where anybody listens."""

    def __enter__(self) -> Engines:
        path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "KVTIER_AUDIT": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "remote.engines"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.heard: list[dict[str, Any]] = []
        self._unread: list[dict[str, Any]] = []
        self._count = 0
        self._begun = b""
        """Of a line."""
        self.until("", "ready")
        return self

    def __exit__(self, *exc: object) -> None:
        gone = {told["name"] for told in self.heard if told["at"] == "gone"}
        for told in self.heard:
            if told["at"] == "open" and f"process {told['pid']}" not in gone:
                with suppress(ProcessLookupError):
                    os.kill(told["pid"], signal.SIGKILL)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def start(
        self,
        uri: str,
        prompts: Sequence[int],
        turns: int = 1,
        *,
        forgets: bool = False,
        tell_at: int = 0,
        largest_file: int = 0,
    ) -> Engine:
        """An engine that serves these prompts, so often. ``forgets``: after each turn, all but the remote. It tells if
        it is "spilling" with object ``tell_at``, and may write no file that is larger than ``largest_file``."""
        self._count += 1
        name = f"engine {self._count}"
        job = {"name": name, "uri": uri, "prompts": list(prompts), "turns": turns, "forgets": forgets}
        job |= {"tell_at": tell_at, "largest_file": largest_file}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return Engine(self, name)

    def until(self, name: str, at: str) -> dict[str, Any]:
        """Listens until this is told."""
        until = time.monotonic() + PATIENCE_S
        while True:
            for k, told in enumerate(self._unread):
                if (told["name"], told["at"]) == (name, at):
                    return self._unread.pop(k)
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{name} is not {at}: {self.heard[-5:]}"
            some = os.read(self._process.stdout.fileno(), 1 << 16)
            assert some, "the engines' process has ended"
            *lines, self._begun = (self._begun + some).split(b"\n")
            for told in map(json.loads, lines):
                self.heard.append(told)
                self._unread.append(told)
                assert told["at"] != "wrong", told["why"]


if __name__ == "__main__":
    main()
