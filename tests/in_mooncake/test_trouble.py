"""A Mooncake Store whose processes die, freeze, forget and fill up: calls end in time, and no wrong byte is OK."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from breadth import breadth
from driving import FAILED, MISS, OK, REFUSED, SLOW_S, Client, names_of
from remote.mooncake_cluster import CLIENT_TTL_S, PORT, Cluster, Process

Clients = Callable[..., Client]
OLD, NEW = names_of("old", 24), names_of("new", 24)


@pytest.fixture
def stored(client: Client) -> Client:
    """A client that has stored ``OLD``."""
    assert set(client.put(OLD).outcomes) == {OK}
    return client


def kinds(*calls: object) -> set[object]:
    """All outcomes of these answers."""
    return {outcome for answer in calls for outcome in answer.outcomes}  # type: ignore[attr-defined]


def test_the_storage_process_is_killed(stored: Client, cluster: Cluster) -> None:
    cluster.processes["storage"].kill()
    assert kinds(stored.get(OLD)) <= {FAILED, MISS}
    assert kinds(stored.put(NEW)) <= {FAILED, REFUSED}
    stored.until("miss", "look", OLD)  # after client_ttl the master knows
    assert kinds(stored.get(OLD + NEW)) == {MISS}
    refused = stored.put(NEW)
    assert kinds(refused) == {REFUSED}
    assert "no storage process is there" in refused.reasons[0]
    cluster.start_storage()
    stored.until("ok", "put", NEW)
    assert kinds(stored.get(NEW)) == {OK}


def test_the_master_is_killed_and_comes_back_with_nothing(stored: Client, cluster: Cluster) -> None:
    cluster.master.kill()
    answers = [stored.look(OLD), stored.get(OLD), stored.put(NEW), stored.delete(OLD)]
    assert kinds(*answers) == {FAILED}
    assert all("master" in reason for answer in answers for reason in answer.reasons.values())
    cluster.start_master()
    stored.until("ok", "put", NEW)
    assert kinds(stored.get(NEW)) == {OK}
    assert kinds(stored.get(OLD)) == {MISS}


@pytest.mark.parametrize("seconds", [CLIENT_TTL_S / 2, 3 * CLIENT_TTL_S, pytest.param(60, marks=breadth)])
@pytest.mark.parametrize("which", ["master", "storage"])
def test_a_process_freezes_for_a_while(stored: Client, cluster: Cluster, which: str, seconds: float) -> None:
    process = cluster.processes[which]
    process.freeze()
    until = time.monotonic() + seconds
    answers = [stored.look(OLD, 1.0), stored.get(OLD, 1.0), stored.put(NEW, 1.0)]
    while time.monotonic() < until:
        answers += [stored.get(OLD, 1.0), stored.put(NEW, 1.0)]
    process.thaw()
    if which == "master":
        assert kinds(*answers) == {FAILED}
    assert OK not in kinds(*answers[1:])
    stored.until("ok", "put", NEW)
    assert kinds(stored.get(NEW)) == {OK}
    assert kinds(stored.get(OLD)) <= {OK, MISS}


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_storage_process_freezes_while_bytes_move(
    cluster: Cluster, make_client: Clients, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers are not touched after the answer, thawed or not."""
    cluster.start_storage("large", memory_mb=512)
    client, size = make_client(), 192 << 20
    memory = np.full(size, 7, np.uint8)
    client.store.register(memoryview(memory))
    buffers = [[memoryview(memory)]]
    client.store.put(2, ["meet"], [[memoryview(memory)[: 96 << 20]]], 30.0)  # too large for the other process
    assert kinds(client.answer(2)) == {OK}
    if call == "get":
        client.store.put(0, ["large"], buffers, 30.0)
        assert kinds(client.answer(0, 30.0)) == {OK}
        memory[:] = 0
    getattr(client.store, call)(1, ["large"], buffers, 30.0)
    if call == "get":
        while not memory[1 << 20]:
            time.sleep(0.0005)
    else:
        time.sleep(0.02)
    for process in (cluster.processes["large"], cluster.processes["storage"]):
        process.freeze()
    answer = client.answer(1, 30.0)
    assert answer.seconds < 25.0  # the library's own limit is 30
    arrived = np.count_nonzero(memory)
    for process in (cluster.processes["large"], cluster.processes["storage"]):
        process.thaw()
    if arrived < size:
        assert kinds(answer) == {FAILED}
    time.sleep(1.0)
    assert np.count_nonzero(memory) == arrived


def test_objects_on_the_ssd_outlive_the_storage_process_and_the_master(tmp_path: Path, make_client: Clients) -> None:
    (tmp_path / "ssd").mkdir()
    cluster = Cluster(tmp_path, offload=True)
    try:
        cluster.start_storage(ssd=tmp_path / "ssd")
        client = make_client(pieces=2)
        assert kinds(client.put(OLD)) == {OK}
        on_disk(tmp_path / "ssd", len(OLD) * client.nbytes)
        cluster.processes["storage"].kill()
        assert kinds(client.get(OLD)) <= {FAILED, MISS}
        client.until("miss", "look", OLD)  # if it comes back before, the master soon drops what it brings
        cluster.start_storage(ssd=tmp_path / "ssd")
        client.until("ok", "get", OLD)
        cluster.master.kill()
        cluster.start_master()
        client.until("ok", "get", OLD)
        cluster.processes["storage"].freeze()
        assert kinds(client.get(OLD)) <= {FAILED, MISS}
        cluster.processes["storage"].thaw()
        client.until("ok", "get", OLD)
    finally:
        cluster.close()


def on_disk(folder: Path, nbytes: int) -> None:
    """Waits until so much is in the folder."""
    until = time.monotonic() + 60.0
    while sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < nbytes:
        assert time.monotonic() < until, "the storage process writes nothing"
        time.sleep(0.1)


def test_memory_that_is_full_forgets_the_oldest(client: Client) -> None:
    """64 MB of memory are given 126 MB."""
    rounds = [names_of(f"full {k}", 160) for k in range(4)]
    for names in rounds:
        left = names
        while left:
            answer = client.put(left)
            assert kinds(answer) <= {OK, REFUSED}
            left = [name for name, outcome in zip(left, answer.outcomes, strict=True) if outcome is REFUSED]
    there = [[outcome is OK for outcome in client.get(names).outcomes] for names in rounds]
    assert 0 < sum(map(sum, there)) < 4 * 160
    assert sum(there[-1]) > sum(there[0])
    refused = client.put(names_of("more", 160))  # what was just read may not go
    assert OK in kinds(client.get(rounds[-1]))
    assert all("no room" in reason for reason in refused.reasons.values())


def test_two_storage_processes_and_two_copies(cluster: Cluster, make_client: Clients) -> None:
    """One of the two dies: what it had is there once more."""
    cluster.start_storage("second")
    client = make_client(replica_num="2")
    client.until("ok", "put", OLD)
    cluster.processes["second"].kill()
    client.until("ok", "get", OLD)


def test_no_call_is_made_after_its_deadline_if_something_hangs(stored: Client, cluster: Cluster) -> None:
    cluster.processes["storage"].freeze()
    begun = time.monotonic()
    answer = stored.get(OLD * 6, 0.1)
    assert time.monotonic() - begun < stored.store.longest_s + SLOW_S
    assert "the call's time was over before it began" in answer.reasons.values()
    assert kinds(answer) <= {FAILED, MISS}


def test_looks_do_not_wait_for_a_move_that_hangs(stored: Client, cluster: Cluster) -> None:
    cluster.processes["storage"].freeze()
    for ticket in (100, 101):
        stored.store.get(ticket, OLD, stored.buffers(len(OLD)), 30.0)
    assert kinds(stored.look(OLD)) == {OK}
    assert kinds(stored.answer(100), stored.answer(101)) <= {FAILED, MISS}


@pytest.mark.parametrize("frozen", ["master", "storage"])
def test_closing_ends_while_a_process_is_frozen(cluster: Cluster, make_client: Clients, frozen: str) -> None:
    client = make_client()
    client.put(OLD)
    process = cluster.processes[frozen]
    process.freeze()
    client.store.get(9, OLD, client.buffers(len(OLD)), 30.0)
    client.store.put(10, NEW, client.buffers(len(NEW)), 30.0)
    closer = threading.Thread(target=client.close)
    closer.start()
    closer.join(client.store.longest_s + 2 * SLOW_S)
    assert not closer.is_alive()
    answers = client.store.poll()
    assert {answer.ticket for answer in answers} == {9, 10}
    assert kinds(*answers) <= {FAILED, MISS}
    process.thaw()


@pytest.fixture
def another_link() -> Iterator[None]:
    """An address that is no loopback's: with a metadata server, storage processes want one."""
    make = "link add v0 type veth peer name v1\naddr add 10.9.9.1/24 dev v0\nlink set v0 up\nlink set v1 up\n"
    if shutil.which("ip") is None or subprocess.run(["ip", "-b", "-"], input=make, text=True, check=False).returncode:
        pytest.skip("no link can be made; apt install iproute2, and run it by `make test-store`")
    yield
    subprocess.run(["ip", "link", "del", "v0"], check=True)


@pytest.mark.usefixtures("another_link")
def test_with_a_metadata_server_a_storage_process_that_hangs_is_met_in_time(
    tmp_path: Path, make_client: Clients
) -> None:
    """Without one, the first contact takes a minute for each object: docs/REMOTE-MOONCAKE.md."""
    cluster = Cluster(tmp_path, client_ttl_s=120, metadata_port=PORT + 9)
    try:
        cluster.start_storage()
        assert kinds(make_client(metadata_server=cluster.metadata_server).put(OLD)) == {OK}
        other = make_client(metadata_server=cluster.metadata_server)
        cluster.processes["storage"].freeze()
        for answer in (other.get(OLD[:2], 1.0), other.put(NEW[:2], 1.0)):
            assert kinds(answer) == {FAILED}
            assert answer.seconds < other.store.longest_s
        cluster.processes["storage"].thaw()
        assert kinds(other.until("ok", "get", OLD)) == {OK}
    finally:
        cluster.close()


LEAVES = """
import os, signal, sys, time
from driving import Client, names_of
client = Client()
names = names_of("leaves", 24)
assert "ok" in {o.value for o in client.put(names).outcomes}
if sys.argv[1] != "unclosed":
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    client.store.get(1, names, client.buffers(24), 5.0)
    time.sleep(0.1)
if sys.argv[1] == "gave up":
    assert not client.store.close(0.0)
print("left", flush=True)
"""


@pytest.mark.parametrize("how", ["unclosed", "in a call", "gave up"])
def test_a_process_that_leaves_without_closing_ends_well(cluster: Cluster, how: str) -> None:
    process: Process = cluster.processes["storage"]
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES, how, str(process._process.pid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    process.thaw()
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr[-3000:]
