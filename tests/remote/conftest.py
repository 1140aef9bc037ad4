"""Backends of all kinds, empty, closed after the test; caches that share one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.remote.backends.uri import open_backend
from remote.driving import Driver, Opens
from remote.fake_backend import FakeBackend, Shared
from remote.fake_s3 import FakeS3

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)}
ID = {"model_id": "m", "key_secret": b"s"}


@pytest.fixture
def opens() -> Iterator[Opens]:
    """Opens stores by URI; closes them."""
    made: list[Driver] = []

    def open_driver(uri: str) -> Driver:
        made.append(Driver(open_backend(uri)))
        return made[-1]

    yield open_driver
    for driver in made:
        assert driver.store.close(PATIENCE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def keys_of_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


@pytest.fixture
def s3(keys_of_aws: None) -> Iterator[FakeS3]:
    found = FakeS3()
    yield found
    found.close()


def s3_uri(port: int, **options: object) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"s3://bucket/some/prefix?endpoint=http://127.0.0.1:{port}&region=us-east-1{more}"


@pytest.fixture
def moto(keys_of_aws: None) -> Iterator[int]:
    """The port of a moto server, whose S3 is nearer to the real one. KVTIER_MOTO_SERVER may say where it is."""
    program = os.environ.get("KVTIER_MOTO_SERVER") or shutil.which("moto_server")
    if program is None:
        pytest.skip("no moto_server here; pip install 'moto[s3]' flask flask-cors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([program, "-H", "127.0.0.1", "-p", str(port)], **quiet)
    try:
        _make_bucket(port)
        yield port
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


def _make_bucket(port: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()
            return
        except OSError:
            assert time.monotonic() < until, "moto does not start"
            time.sleep(0.1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted: run it as root, in a container with `--cap-add SYS_ADMIN`")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def shared_serving(make_serving, monkeypatch):
    """Makes servings whose caches share one remote, with objects of ``least`` bytes at least."""
    shared = Shared()

    def make(groups=GROUPS, blocks=40, host=60, hold=(), store=None, least=300, store_mode="eager", **options):
        monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", least)
        store = FakeBackend() if store is None else store
        store.shared = shared
        made = make_serving(groups, blocks, host, hold=hold, store=store_mode, remote_uri=store, **(ID | options))
        made.store, made.remote = store, made.cache.core.coordinator.door.remote
        return made

    make.shared = shared
    return make


def store_of(serving):
    return serving.cache.stats().remote
