"""Bad things that happen to engines over a directory, one by one: nothing is lost, nothing hangs, no text is wrong.

Every text is compared with the oracle's where it is served (``Serving``), in this process or in an engine's own.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest
from breadth import sized
from core.driving import Serving, prompt
from model.played_backend import of_an_older_format
from patience import PATIENCE_S, be_patient_with_backends

from kvtier.coordinator import seek
from kvtier.cpu_offload.transfer import TransferState
from kvtier.remote.backends import directory
from kvtier.remote.backends.directory import DirectoryBackend
from kvtier.remote.keeper import upkeep
from kvtier.remote.keeper.shelf import FolderShelf
from kvtier.remote.keeper.upkeep import collect, contents
from kvtier.remote.moves import Way
from remote.engines import TOKENS, Engines, open_engine, wrong_objects

Open = Callable[..., Serving]
HIT = TOKENS // 16 * 16


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Engines in processes of their own."""
    with Engines() as found:
        yield found


@pytest.fixture
def opens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Engines in this process."""
    be_patient_with_backends(monkeypatch)
    made: list[Serving] = []

    def make(where: Path = folder, more: str = "") -> Serving:
        made.append(open_engine(f"file://{where}{more}"))
        return made[-1]

    yield make
    for engine in made:
        engine.cache.close()


def store_of(engine: Serving):
    return engine.cache.stats().remote


def from_remote(engine: Serving, k: int, name: str = "") -> int:
    """Serves prompt k; the tokens of it that came from the remote."""
    name = name or f"r{len(engine.requests)}"
    return engine.serve(name, prompt(k, TOKENS), 3).cached_tokens["remote"]


def served(engine: Serving, k: int, meanwhile: Callable[[], object] = lambda: None) -> int:
    """The same, though the remote may still have calls that were given up. ``meanwhile``: after each step."""
    engine.add(name := f"r{len(engine.requests)}", prompt(k, TOKENS), 3)
    until = time.monotonic() + PATIENCE_S
    while name not in engine.finished:
        assert time.monotonic() < until, engine.scheduler.why_waiting()
        meanwhile()
        if not engine.step().num_tokens:
            engine.scheduler.wait(0.05)
    return engine.finished[name].cached_tokens["remote"]


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch, opens: Open) -> Iterator[Hangs]:
    """Reads of the directory wait until they are told, or another kind of call."""
    found = Hangs()

    def begin(name: str = "_get") -> None:
        quick = getattr(DirectoryBackend, name)

        def waits(*arguments: Any) -> Any:
            found.asked.set()
            found.back.wait()
            return quick(*arguments)

        monkeypatch.setattr(DirectoryBackend, name, waits)

    found.begin = begin
    yield found
    found.back.set()


class Hangs:
    """``asked``: somebody reads; ``back``: the disk answers."""

    def __init__(self) -> None:
        self.asked, self.back = threading.Event(), threading.Event()
        self.begin: Callable[..., None] = lambda: None


# --- writers that are killed, and several at once -----------------------------------------------------


def test_an_engine_that_is_killed_while_it_spills(engines: Engines, tmp_path: Path) -> None:
    """Each time at another place. Whoever comes next finds whole objects or none."""
    hits = 0
    for turn in range(sized(3, 25)):
        folder = tmp_path / f"store{turn}"
        writer = engines.start(f"file://{folder}", range(turn, turn + 6), tell_at=1 + 19 * turn % 90)
        writer.until("spilling")
        writer.kill()
        assert wrong_objects(folder) == []
        reader = engines.start(f"file://{folder}", [turn, turn + 1, turn])
        stats = reader.ended()["stats"]
        assert (stats["damaged_objects"], stats["failed_fetches"]) == (0, 0)
        assert wrong_objects(folder) == []
        hits += sum(cached["remote"] for cached in reader.cached)
        rmtree(folder)
    assert hits > 0


def test_two_engines_spill_the_same_blocks_at_once(engines: Engines, folder: Path) -> None:
    both = [engines.start(f"file://{folder}", range(4)) for _ in range(2)]
    for engine in both:
        engine.ended()
    assert wrong_objects(folder) == []
    third = engines.start(f"file://{folder}", range(4))
    assert third.ended()["stats"]["damaged_objects"] == 0
    assert [cached["remote"] for cached in third.cached] == [HIT] * 4


def test_a_keeper_removes_while_engines_read_and_write(engines: Engines, folder: Path) -> None:
    """What it has removed is computed and stored again, and found once nobody removes it any more."""
    folder.mkdir()
    both = [engines.start(f"file://{folder}", (k, k + 1, k + 2), sized(5, 60), forgets=True) for k in (0, 1)]
    removed, stop = list[int](), threading.Event()

    def keep() -> None:
        last = False
        while not last:
            last = stop.is_set()
            removed.append(collect(FolderShelf(folder), 600 << 10).removed)

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        stats = [engine.ended()["stats"] for engine in both]
    finally:
        stop.set()
        keeper.join()
    assert sum(removed) > 20
    assert wrong_objects(folder) == []
    for _ in range(2):
        later = engines.start(f"file://{folder}", range(4))
        stats.append(later.ended()["stats"])
    assert all((of["damaged_objects"], of["failed_fetches"]) == (0, 0) for of in stats), stats
    assert [cached["remote"] for cached in later.cached] == [HIT] * 4


# --- disks ------------------------------------------------------------------------------------------


def test_a_quota_refuses_and_the_engine_serves_on(engines: Engines, folder: Path) -> None:
    """No file may be larger than half an object."""
    engine = engines.start(f"file://{folder}", [0, 1, 0], 2, forgets=True, largest_file=8 << 10)
    told = engine.ended()
    assert told["stats"]["refused_objects"] > 0 == told["stats"]["spilled_objects"]
    assert list(FolderShelf(folder).entries()) == []


def test_a_disk_fills_up_becomes_read_only_and_is_emptied(opens: Open, small_disk: Path) -> None:
    folder = small_disk / "store"
    engine = opens(folder)
    for k in range(6):
        from_remote(engine, k)
    stats = store_of(engine)
    assert (stats.spilled_objects > 0, stats.refused_objects > 0, stats.breaker_open) == (True, True, False)
    assert wrong_objects(folder) == []
    assert from_remote(opens(folder), 0) == HIT
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    reader = opens(folder)
    assert (from_remote(reader, 0), from_remote(reader, 9)) == (HIT, 0)
    assert store_of(reader).refused_objects > 0
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    collect(FolderShelf(folder), 0)
    assert from_remote(reader, 10) == 0
    assert from_remote(opens(folder), 10) == HIT


def test_a_directory_without_permission_refuses(opens: Open, folder: Path) -> None:
    if not os.geteuid():
        pytest.skip("root may write anywhere: run it as another user; the test with the small disk remounts it")
    engine = opens()
    from_remote(engine, 0)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    other = opens()
    assert (from_remote(other, 0), from_remote(other, 1)) == (HIT, 0)
    assert store_of(other).refused_objects > 0
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(0o700)


@pytest.mark.parametrize("then", ["is gone", "is a file"])
def test_a_directory_is_deleted_under_an_engine(opens: Open, folder: Path, then: str) -> None:
    """What is gone is a miss, and stored again; where nothing can be stored, it serves on."""
    opens_first = opens()
    from_remote(opens_first, 0)
    engine = opens()
    assert from_remote(engine, 0) == HIT
    rmtree(folder)
    if then == "is a file":
        folder.write_text("not a directory")
    other = opens(folder) if then == "is gone" else engine
    assert from_remote(other, 1) == 0
    assert from_remote(engine, 2) == 0
    assert (store_of(engine).failed_spills > 0) == (then == "is a file")
    if then == "is gone":
        assert from_remote(opens(), 2) == HIT


def test_a_slow_disk_costs_a_request_its_look_and_no_more(
    opens: Open, hangs: Hangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes when the request is over."""
    from_remote(opens(), 0)
    monkeypatch.setattr(seek, "LEAST_S", 0.02)
    monkeypatch.setattr(seek, "UNKNOWN_S", 0.02)
    hangs.begin("_exists")
    engine = opens()
    assert served(engine, 0) == 0
    assert store_of(engine).late_looks == 1
    hangs.back.set()


def test_reads_that_hang_cost_their_requests_the_deadline_and_close_returns(opens: Open, hangs: Hangs) -> None:
    """As on a network file system whose server is gone; at last it comes back."""
    writer = opens()
    for k in range(6):
        from_remote(writer, k)
    hangs.begin()
    engine = opens(more="?threads=80")  # looks and writes pass
    remote = engine.cache.core.coordinator.door.remote
    now, passed = remote.now, [0.0]
    remote.now = lambda: now() + passed[0]

    def pass_time() -> None:
        fetches = [move for move in remote.moves() if move.way is Way.FETCH and move.state is TransferState.IN_FLIGHT]
        passed[0] += 1000.0 if fetches and hangs.asked.is_set() else 0.0

    assert [served(engine, k, pass_time) for k in range(6)] == [0] * 6
    stats = store_of(engine)
    assert (stats.breaker_open, stats.expired) == (True, 3), "after the third it is left alone"
    assert not remote.close(0.01), "it does not wait for ever"
    hangs.back.set()
    assert remote.close(PATIENCE_S)


# --- objects, clocks ----------------------------------------------------------------------------------


def test_objects_of_an_older_format_are_replaced(opens: Open, folder: Path) -> None:
    from_remote(opens(), 0)
    shelf = FolderShelf(folder)
    names = [entry.name for entry in shelf.entries()]
    new = {name: (folder / name).read_bytes() for name in names}
    for name, data in new.items():
        (folder / name).write_bytes(of_an_older_format(data))
    assert all("of an older format, 0" in reason for _, reason in wrong_objects(folder))
    engine = opens()
    assert from_remote(engine, 0) == 0
    assert store_of(engine).damaged_objects == len(names)
    engine.cache.core.coordinator.pools.forget_all()
    engine.cache.core.host.forget_all()
    from_remote(engine, 0)  # some may have been deleted after they were stored anew
    assert {name: (folder / name).read_bytes() for name in names} == new
    assert from_remote(opens(), 0) == HIT


@pytest.mark.parametrize("years", [-30, 30])
def test_the_wall_clock_jumps(opens: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, years: int) -> None:
    """Objects are read all the same. A keeper takes those from the future for new ones."""
    from_remote(opens(), 0)
    jumped = SimpleNamespace(time=lambda: time.time() + years * 365 * 86400)
    for module in (directory, upkeep):
        monkeypatch.setattr(module, "time", jumped)
    engine = opens()
    assert (from_remote(engine, 0), from_remote(engine, 1)) == (HIT, 0)
    kept = contents(FolderShelf(folder)).all.num_bytes
    assert collect(FolderShelf(folder), kept).removed == 0
    for module in (directory, upkeep):
        monkeypatch.setattr(module, "time", time)
    reader = opens()
    assert (from_remote(reader, 0), from_remote(reader, 1)) == (HIT, HIT)
    assert collect(FolderShelf(folder), 0).left == 0


def test_the_engines_clock_jumps_while_it_fetches(opens: Open, hangs: Hangs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a machine has slept: what is under way is given up, and computed."""
    from_remote(opens(), 0)
    hangs.begin()
    engine = opens()
    remote = engine.cache.core.coordinator.door.remote
    copies, jump = engine.cache.core.coordinator.connector.engine, [0.0]
    now = copies.now
    monkeypatch.setattr(copies, "now", lambda: now() + jump[0])
    remote.now = copies.now
    jumper = threading.Thread(target=lambda: (hangs.asked.wait(), jump.__setitem__(0, 1e7)))
    jumper.start()
    assert served(engine, 0) == 0
    jumper.join()
    assert store_of(engine).expired > 0
    hangs.back.set()
    assert [served(engine, k) for k in (1, 1)] == [0, 0]
    assert from_remote(opens(), 1) == HIT
