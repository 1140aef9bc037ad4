"""A directory in bad times: full, read-only, gone, shared, killed at, and with a clock that jumps."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest
from breadth import sized
from patience import PATIENCE_S

from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.backends.directory import SCRATCH_BYTES
from kvtier.remote.envelope import TRAILER_BYTES, Envelope, checksum_of
from kvtier.remote.keeper.shelf import FolderShelf
from kvtier.remote.keeper.upkeep import check_object, collect
from remote.driving import FAILED, MISS, NAMESPACE, OK, REFUSED, Driver, Opens, key, name, pattern

MIB = 1 << 20
HOUR = 3600.0


@pytest.fixture
def driver(opens: Opens, folder: Path) -> Driver:
    return opens(f"file://{folder}")


def written(folder: Path, i: int, age_s: float = 0.0) -> Path:
    path = folder / name(i)
    if age_s:
        then = time.time() - age_s
        os.utime(path, (then, then))
    return path


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Python ignores the signal, so the write itself fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_object_that_the_system_does_not_take_is_refused_and_leaves_nothing(driver: Driver, folder: Path) -> None:
    data = driver.filled(1, 2 * MIB)
    with largest_file(MIB):
        answer = driver.call("put", [name(1)], [data])
    assert (answer.outcomes, "File too large" in answer.reasons[0]) == ((REFUSED,), True)
    assert driver.outcomes("get", [name(1)], [driver.room(2 * MIB)]) == [MISS]
    assert list(FolderShelf(folder).entries()) == []
    assert driver.outcomes("put", [name(1)], [data]) == [OK]


def test_a_full_disk_refuses_and_a_read_only_one_too(opens: Opens, small_disk: Path) -> None:
    driver = opens(f"file://{small_disk}/store")
    assert driver.outcomes("put", [name(1)], [driver.filled(1, MIB // 2)]) == [OK]
    answer = driver.call("put", [name(2)], [driver.filled(2, MIB)])
    assert (answer.outcomes, "No space left" in answer.reasons[0]) == ((REFUSED,), True)
    assert [entry.name for entry in FolderShelf(small_disk / "store").entries()] == [name(1)]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    answer = driver.call("put", [name(3)], [driver.filled(3, 4096)])
    assert (answer.outcomes, "Read-only" in answer.reasons[0]) == ((REFUSED,), True)
    assert driver.outcomes("get", [name(1)], [driver.room(MIB // 2)]) == [OK]


def test_a_directory_without_permission_refuses(driver: Driver, folder: Path) -> None:
    if not os.geteuid():
        pytest.skip("root may write anywhere: run it as another user")
    folder.chmod(0o500)
    answer = driver.call("put", [name(1)], [driver.filled(1, 4096)])
    folder.chmod(0o700)
    assert (answer.outcomes, "Permission denied" in answer.reasons[0]) == ((REFUSED,), True)


def test_a_directory_that_is_deleted_under_a_store_is_an_empty_one(driver: Driver, folder: Path) -> None:
    driver.put_sealed([1])
    rmtree(folder)
    assert driver.outcomes("look", [name(1)]) == [MISS]
    assert driver.get_checked([1]).outcomes == (MISS,)
    assert driver.put_sealed([1]).outcomes == (OK,)
    assert driver.get_checked([1]).outcomes == (OK,)


def test_a_directory_whose_place_is_taken_fails(driver: Driver, folder: Path) -> None:
    rmtree(folder)
    folder.write_text("a file now")
    assert driver.outcomes("look", [name(1)]) == [MISS]
    assert driver.outcomes("get", [name(1)], [driver.room(64)]) == [FAILED]
    assert driver.outcomes("put", [name(1)], [driver.filled(1, 64)]) == [FAILED]


def test_what_is_no_file_is_no_object_and_nobody_waits_for_it(driver: Driver, folder: Path) -> None:
    pipe, directory = folder / name(1), folder / name(2)
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    directory.mkdir(parents=True)
    assert driver.outcomes("look", [name(1), name(2)]) == [MISS, MISS]
    answer = driver.call("get", [name(1), name(2)], [driver.room(64), driver.room(64)])
    assert answer.outcomes == (FAILED, FAILED)
    assert all("is no file" in answer.reasons[k] for k in (0, 1))
    assert driver.put_sealed([1]).outcomes == (OK,)  # a rename puts it in the pipe's place
    assert driver.get_checked([1]).outcomes == (OK,)


def test_a_file_that_becomes_shorter_while_it_is_read_fails(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.put_sealed([1])
    path, read = folder / name(1), os.preadv

    def shortened(file: int, pieces: list[memoryview], at: int) -> int:
        os.truncate(path, 100)
        return read(file, pieces, at)

    monkeypatch.setattr(os, "preadv", shortened)
    answer = driver.get_checked([1])
    assert (answer.outcomes, answer.reasons) == ((FAILED,), {0: "damaged: torn, it ended after 100 bytes"})


def test_a_read_may_come_in_parts(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.put_sealed([1], [64] * 10)
    read = os.preadv

    def a_part(file: int, pieces: list[memoryview], at: int) -> int:
        return read(file, [pieces[0][:50]], at)

    monkeypatch.setattr(os, "preadv", a_part)
    assert driver.get_checked([1], [64] * 10).outcomes == (OK,)


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.EPERM, REFUSED),
        (errno.EACCES, REFUSED),
        (errno.EFBIG, REFUSED),
        (errno.ENOSPC, REFUSED),
        (errno.EROFS, REFUSED),
        (errno.EDQUOT, REFUSED),
        (errno.EIO, FAILED),
        (errno.EMFILE, FAILED),
    ],
)
def test_what_is_no_room_and_what_is_a_fault(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Outcome
) -> None:
    def broken(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", broken)
    answer = driver.put_sealed([1])
    assert (answer.outcomes, os.strerror(number) in answer.reasons[0]) == ((outcome,), True)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("age_s", "renewed"), [(0.0, False), (HOUR / 2, False), (2 * HOUR, True), (-2 * HOUR, True)])
def test_a_hit_makes_an_object_young_again_once_an_hour(
    driver: Driver, folder: Path, age_s: float, renewed: bool
) -> None:
    driver.put_sealed([1])
    path = written(folder, 1, age_s)
    before = path.stat().st_mtime
    assert driver.get_checked([1]).outcomes == (OK,)
    assert (path.stat().st_mtime != before) is renewed
    assert not renewed or abs(time.time() - path.stat().st_mtime) < HOUR / 2


def test_a_hit_on_a_file_of_somebody_else_is_a_hit(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    driver.put_sealed([1])
    written(folder, 1, 2 * HOUR)
    monkeypatch.setattr(os, "utime", refused)
    assert driver.get_checked([1]).outcomes == (OK,)


def test_objects_of_another_format_or_damaged_ones_fail_with_the_reason(driver: Driver, folder: Path) -> None:
    driver.put_sealed([1, 2, 3])
    for i, at, said in ((1, -120, "another sum"), (2, 5, "another checksum"), (3, -128, "torn")):
        path = folder / name(i)
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)
        answer = driver.get_checked([i])
        assert (answer.outcomes, said in answer.reasons[0]) == ((FAILED,), True)
    (folder / name(1)).rename(folder / name(2))
    assert driver.put_sealed([1]).outcomes == (OK,)
    (folder / name(1)).rename(folder / name(2))
    assert driver.get_checked([2]).reasons == {0: f"under a wrong name: it is t/{key(1).hex()}"}


def test_two_writers_of_the_same_names_and_a_reader(opens: Opens, folder: Path) -> None:
    numbers = list(range(8))
    writers = [opens(f"file://{folder}") for _ in range(2)]
    reader = opens(f"file://{folder}")
    stop = threading.Event()
    wrong = list[object]()

    def write(driver: Driver) -> None:
        while not stop.is_set():
            answer = driver.put_sealed(numbers)
            wrong.extend(answer.reasons.values())

    threads = [threading.Thread(target=write, args=(driver,)) for driver in writers]
    for thread in threads:
        thread.start()
    try:
        for _ in range(sized(20, 500)):
            answer = reader.get_checked(numbers)
            assert set(answer.outcomes) <= {OK, MISS}, answer.reasons
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert reader.get_checked(numbers).outcomes == (OK,) * len(numbers)


def test_a_keeper_removes_while_others_read_and_write(opens: Opens, folder: Path) -> None:
    numbers, driver = list(range(12)), opens(f"file://{folder}")
    stop = threading.Event()
    removed = list[int]()

    def keep() -> None:
        while not stop.is_set():
            removed.append(collect(FolderShelf(folder), 3 * 4736).removed)

    driver.put_sealed(numbers)
    keeper = threading.Thread(target=keep)
    keeper.start()
    seen = set()
    try:
        until = time.monotonic() + PATIENCE_S
        while not (seen >= {OK, MISS} and sum(removed) > sized(20, 2000)) and time.monotonic() < until:
            answer = driver.get_checked(numbers)
            seen |= set(answer.outcomes)
            assert seen <= {OK, MISS}, answer.reasons
            assert driver.put_sealed(numbers).outcomes == (OK,) * len(numbers)
    finally:
        stop.set()
        keeper.join()
    assert seen == {OK, MISS}


# --- killed writers ---------------------------------------------------------------------------------

KILLED_SIZES = (MIB // 2, 512)  # all four fit into the memory of the driver
ZYGOTE = """
import os, sys
sys.path.insert(0, {tests!r})
from remote.driving import Driver
from kvtier.remote.backends.uri import open_backend

for line in sys.stdin:  # one import, and a writer for each kill
    child = os.fork()
    if not child:
        driver = Driver(open_backend("file://" + line.strip()))
        for turn in range(1000):
            driver.put_sealed(range(4), {sizes!r})
            if turn == 0:
                print(os.getpid(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def test_a_writer_that_is_killed_leaves_no_object_that_is_wrong(opens: Opens, tmp_path: Path) -> None:
    script = ZYGOTE.format(tests=str(Path(__file__).parents[1]), sizes=KILLED_SIZES)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    staging = 0
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as zygote:
        assert zygote.stdin is not None and zygote.stdout is not None
        for turn in range(sized(3, 25)):
            folder = tmp_path / f"store{turn}"
            print(folder, file=zygote.stdin, flush=True)
            writer = int(zygote.stdout.readline())
            threading.Event().wait(0.0003 * turn)  # at another place each time
            os.kill(writer, 9)
            assert zygote.stdout.readline() == "gone\n"
            staging += look_over(folder, opens)
            rmtree(folder)
        zygote.stdin.close()


def look_over(folder: Path, opens: Opens) -> int:
    """All named objects are whole; what else lies there is a staging file, which a keeper sweeps. Its count."""
    shelf = FolderShelf(folder)
    entries = list(shelf.entries())
    objects = [entry.name for entry in entries if not entry.is_staging]
    assert sorted(objects) == [name(i) for i in range(4)]
    assert [check_object(found, shelf.read(found)) for found in objects] == [""] * 4
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == len(entries)
    assert opens(f"file://{folder}").get_checked(range(4), KILLED_SIZES).outcomes == (OK,) * 4
    left = len(entries) - len(objects)
    assert collect(shelf, 1 << 40, now_s=time.time() + 2 * HOUR).swept == left
    return left


def test_an_object_that_a_killed_writer_left_half_is_not_named(driver: Driver, folder: Path) -> None:
    """A staging file has no object's name, though it may be whole."""
    driver.put_sealed([1])
    path = folder / name(1)
    path.rename(f"{path}#1")
    assert driver.outcomes("look", [name(1)]) == [MISS]
    assert driver.put_sealed([1]).outcomes == (OK,)
    assert Path(f"{path}#1").is_file()


def test_patterns_of_the_driver_are_checked_at_all(driver: Driver, folder: Path) -> None:
    """The other tests would pass if ``get_checked`` compared nothing."""
    envelope = Envelope(bytes(range(16)))
    pieces, trailer = [memoryview(bytearray(pattern(7, 64)))], memoryview(bytearray(TRAILER_BYTES))
    envelope.seal(key(1), "t", pieces, trailer)
    driver.call("put", [name(1)], [[*pieces, trailer]])
    with pytest.raises(AssertionError):
        driver.get_checked([1], [64])


LARGE = [SCRATCH_BYTES - 8, 24, 2 * SCRATCH_BYTES, 1024]
"""Pieces whose ends do not meet those of the memory by which they are read."""


def read_large(driver: Driver, room: list[memoryview]) -> tuple[list[int | None], Answer]:
    """What ``after`` is told, and what the check says."""
    told: list[int | None] = []

    def after(k: int, total: int | None) -> str:
        told.append(total)
        return Envelope(NAMESPACE).check(key(1), "t", room[:-1], room[-1], total=total)

    return told, driver.call("get", [name(1)], [room], after=after)


def test_large_pieces_are_summed_up_while_they_are_read(driver: Driver) -> None:
    assert driver.put_sealed([1], LARGE).outcomes == (OK,)
    room = [*driver.room(*LARGE), memoryview(bytearray(TRAILER_BYTES))]
    told, answer = read_large(driver, room)
    assert answer.outcomes == (OK,) and told == [checksum_of(room)]
    assert [bytes(piece) for piece in room[:-1]] == [pattern(1000 + k, n) for k, n in enumerate(LARGE)]


@pytest.mark.parametrize("at", [0, SCRATCH_BYTES, sum(LARGE) - 1])
def test_a_flipped_bit_of_a_large_piece_is_seen(driver: Driver, folder: Path, at: int) -> None:
    driver.put_sealed([1], LARGE)
    data = bytearray((folder / name(1)).read_bytes())
    data[at] ^= 1
    (folder / name(1)).write_bytes(data)
    _, answer = read_large(driver, [*driver.room(*LARGE), memoryview(bytearray(TRAILER_BYTES))])
    assert (answer.outcomes, answer.reasons) == ((FAILED,), {0: "its payload has another checksum"})


def test_a_large_read_may_come_in_parts_or_end_too_early(
    driver: Driver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.put_sealed([1], LARGE)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, pieces, at: read(file, [pieces[0][: 300 * 1024 + 3]], at))
    room = [*driver.room(*LARGE), memoryview(bytearray(TRAILER_BYTES))]
    told, answer = read_large(driver, room)
    assert answer.outcomes == (OK,) and told == [checksum_of(room)]

    def shortened(file: int, pieces: list[memoryview], at: int) -> int:
        os.truncate(folder / name(1), SCRATCH_BYTES + 100)
        return read(file, pieces, at)

    monkeypatch.setattr(os, "preadv", shortened)
    _, answer = read_large(driver, room)
    torn = f"damaged: torn, it ended after {SCRATCH_BYTES + 100:,} bytes"
    assert (answer.outcomes, answer.reasons) == ((FAILED,), {0: torn})
