"""Listing, clearing up and checking a remote, as calls and as ``kvtier remote``."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

from kvtier import ConfigError
from kvtier.remote.backends.folder import Folder
from kvtier.remote.envelope import TRAILER_BYTES, Envelope
from kvtier.remote.keeper.shelf import LOCK, BucketShelf, FolderShelf, open_shelf
from kvtier.remote.keeper.upkeep import LEAST_COST, collect, contents, forget, verify
from kvtier.remote.names import object_name
from remote.conftest import s3_uri
from remote.driving import NAMESPACE, OK, Driver, Opens, key, name, pattern
from remote.fake_s3 import FakeS3
from runner import cli

HOUR = 3600.0
SIZE = 4096 + 512 + TRAILER_BYTES
SPACE = NAMESPACE.hex()
OTHER = "ab" * 16

Command = Callable[..., tuple[int, Any]]


@pytest.fixture
def driver(opens: Opens, folder: Path) -> Driver:
    return opens(f"file://{folder}")


@pytest.fixture
def shelf(driver: Driver, folder: Path) -> FolderShelf:
    """Ten objects, number 9 the oldest by far."""
    driver.put_sealed(range(10))
    for i in range(10):
        aged(folder / name(i), (i + 1) * HOUR)
    return FolderShelf(folder)


def aged(path: Path, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(path, (then, then))


def names_in(shelf: FolderShelf | BucketShelf, namespace: str = "") -> set[str]:
    return {entry.name for entry in shelf.entries(namespace)}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], folder: Path) -> Command:
    def run(*arguments: str, uri: str = "") -> tuple[int, Any]:
        action, *rest = arguments
        try:
            status = cli.main(["remote", action, uri or f"file://{folder}", *rest])
        except SystemExit as stop:
            status = int(str(stop.code))
        said = capsys.readouterr()
        return status, json.loads(said.out) if "--json" in rest and said.out else said.out + said.err

    return run


def test_the_oldest_go_first_until_the_rest_fits(shelf: FolderShelf) -> None:
    found = collect(shelf, 4 * SIZE)
    assert (found.removed, found.removed_bytes, found.left, found.left_bytes) == (6, 6 * SIZE, 4, 4 * SIZE)
    assert names_in(shelf) == {name(i) for i in range(4)}
    assert collect(shelf, 4 * SIZE).removed == 0
    assert collect(shelf, 4 * SIZE - 1).removed == 1


def test_what_is_hit_stays(shelf: FolderShelf, driver: Driver) -> None:
    assert driver.get_checked([9, 8]).outcomes == (OK, OK)
    collect(shelf, 3 * SIZE)
    assert names_in(shelf) == {name(9), name(8), name(0)}


def test_what_is_hit_between_listing_and_removal_stays(shelf: FolderShelf, driver: Driver) -> None:
    listed = list(shelf.entries())
    driver.get_checked([9])
    assert {entry.name for entry in shelf.remove(listed)} == {name(i) for i in range(9)}
    assert names_in(shelf) == {name(9)}


def test_what_is_too_short_for_an_object_is_removed_as_damaged(
    shelf: FolderShelf, folder: Path, command: Command
) -> None:
    for i, size in ((300, 0), (301, 1), (302, TRAILER_BYTES)):
        (folder / name(i)).parent.mkdir(parents=True, exist_ok=True)
        (folder / name(i)).write_bytes(bytes(size))
    assert collect(shelf, 1 << 40, only_tell=True).damaged == 3
    status, said = command("gc", "--max-bytes", "1TiB", "--json")
    assert (status, said["damaged"], said["removed"], said["left"]) == (0, 3, 0, 10)
    assert names_in(shelf) == {name(i) for i in range(10)}
    (folder / name(300)).write_bytes(b"")
    assert "1 damaged" in command("gc", "--max-bytes", "1TiB")[1]


def test_tiny_objects_cost_what_a_file_costs(shelf: FolderShelf, folder: Path) -> None:
    tiny = range(300, 320)
    for i in tiny:
        (folder / name(i)).parent.mkdir(parents=True, exist_ok=True)
        (folder / name(i)).write_bytes(bytes(TRAILER_BYTES + 8))
        aged(folder / name(i), (i - 200) * HOUR)
    found = collect(shelf, 10 * SIZE + 5 * LEAST_COST)
    assert (found.removed, found.left, found.left_bytes) == (15, 15, 10 * SIZE + 5 * (TRAILER_BYTES + 8))
    assert names_in(shelf) == {name(i) for i in (*range(10), *range(300, 305))}


def test_a_dry_run_removes_nothing(shelf: FolderShelf, folder: Path) -> None:
    (folder / f"{name(0)}#1").write_bytes(b"x")
    aged(folder / f"{name(0)}#1", 2 * HOUR)
    found = collect(shelf, 0, only_tell=True)
    assert (found.removed, found.swept, len(names_in(shelf))) == (10, 1, 11)


def test_objects_from_the_future_age_from_now_on(shelf: FolderShelf, folder: Path) -> None:
    aged(folder / name(5), -1000 * HOUR)
    collect(shelf, 5 * SIZE)
    assert name(5) in names_in(shelf)
    assert abs((folder / name(5)).stat().st_mtime - time.time()) < HOUR
    assert collect(shelf, 0, now_s=time.time() + HOUR / 2).left == 0


def test_only_staging_files_without_a_writer_are_swept(shelf: FolderShelf, folder: Path) -> None:
    for suffix, age_s in (("#1", 0.0), ("#2", 2 * HOUR), ("#3", -2 * HOUR)):
        (folder / f"{name(0)}{suffix}").write_bytes(b"half")
        aged(folder / f"{name(0)}{suffix}", age_s)
    assert collect(shelf, 1 << 40).swept == 1
    assert {entry.name[-2:] for entry in shelf.entries() if entry.is_staging} == {"#1", "#3"}


def test_what_is_not_ours_is_not_touched(shelf: FolderShelf, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    strange = [
        folder / "README",
        folder / "kvt1" / "notes",
        folder / "kvt1" / SPACE / "t" / "01" / "no-key#1",
        outside / "file",
    ]
    for path in strange:
        path.write_text("mine")
        aged(path, 100 * HOUR)
    (folder / "kvt1" / "link").symlink_to(outside)
    (folder / "kvt1" / SPACE / "t" / "00" / key(256).hex()).symlink_to(outside / "file")
    assert len(names_in(shelf)) == 10
    collect(shelf, 0)
    forget(shelf, SPACE)
    assert all(path.exists() for path in strange)


def test_one_keeper_at_a_time(shelf: FolderShelf, folder: Path, command: Command) -> None:
    with (folder / LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for work in (lambda: collect(shelf, 0), lambda: forget(shelf, SPACE)):
            with pytest.raises(ConfigError, match="another `kvtier remote` is at work"):
                work()
        assert command("gc", "--max-bytes", "0")[0] == 2
        assert contents(shelf).all.objects == 10
    assert collect(shelf, 0).removed == 10


def test_contents_are_counted_by_namespace_and_kind(shelf: FolderShelf, folder: Path, driver: Driver) -> None:
    for other in (object_name(NAMESPACE, "e", key(1)), object_name(bytes.fromhex(OTHER), "t", key(1))):
        driver.call("put", [other], [driver.filled(1, 64)])
    (folder / f"{name(0)}#1").write_bytes(b"half")
    found = contents(shelf)
    assert {kind: share.objects for kind, share in found.by_kind.items()} == {
        (SPACE, "t"): 10,
        (SPACE, "e"): 1,
        (OTHER, "t"): 1,
    }
    assert {space: share.num_bytes for space, share in found.by_namespace.items()} == {SPACE: 10 * SIZE + 64, OTHER: 64}
    assert (found.all.objects, found.staging.objects, found.staging.num_bytes) == (12, 1, 4)


def test_a_check_of_all_finds_what_is_wrong_and_only_that(shelf: FolderShelf, folder: Path, command: Command) -> None:
    assert verify(shelf).wrong == []
    for i, at in ((1, 7), (2, -1)):
        raw = bytearray((folder / name(i)).read_bytes())
        raw[at] ^= 1
        (folder / name(i)).write_bytes(raw)
    (folder / name(3)).write_bytes((folder / name(4)).read_bytes())
    os.truncate(folder / name(5), 1000)
    (folder / name(6)).write_bytes(b"")
    found = verify(shelf, namespace=SPACE)
    reasons = {int(found_name[-2:], 16): reason.partition(":")[0] for found_name, reason in found.wrong}
    assert reasons == {
        1: "its payload has another checksum",
        2: "its trailer has another sum",
        3: "under a wrong name",
        5: "torn, or no object of kvtier",
        6: reasons[5],
    }
    assert (found.objects, verify(shelf, namespace=OTHER).objects) == (10, 0)
    status, said = command("verify")
    assert (status, "10 objects" in said, "5 wrong, 0 removed" in said, f"{name(1)}: its payload" in said) == (
        1,
        True,
        True,
        True,
    )
    status, said = command("verify", "--delete", "--json")
    assert (status, said["removed"], len(said["wrong"])) == (1, 5, 5)
    assert command("verify")[0] == 0
    assert names_in(shelf) == {name(i) for i in (0, 4, 7, 8, 9)}


def test_digests_are_checked_with_the_secret(
    driver: Driver, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = b"\xff of raw bytes"
    driver.put_sealed([1], envelope=Envelope(NAMESPACE, secret))
    driver.put_sealed([2])
    assert command("verify")[0] == 0
    monkeypatch.setitem(os.environb, b"KVTIER_KEY_SECRET", secret + b"\n")
    status, said = command("verify", "--json")
    assert (status, [wrong["name"] for wrong in said["wrong"]]) == (1, [name(2)])


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Has a function of ``os``, or of the folder, refuse the names that end so; as root, permissions would not."""

    def deny(function: str, end: str) -> None:
        owner, _, attribute = function.rpartition(".")
        target: Any = Folder if owner == "Folder" else os
        real = getattr(target, attribute)

        def refuse(*given: Any, **more: Any) -> Any:
            if any(str(each).endswith(end) for each in given):
                raise PermissionError(13, "Permission denied", end)
            return real(*given, **more)

        monkeypatch.setattr(target, attribute, refuse)

    return deny


def test_an_object_that_may_not_be_removed_stays_and_the_next_one_goes(
    shelf: FolderShelf, command: Command, denied: Callable[[str, str], None]
) -> None:
    denied("os.unlink", key(9).hex())
    status, said = command("gc", "--max-bytes", str(4 * SIZE), "--json")
    assert (status, said["removed"], said["left"], said["skipped"]["unremoved"]) == (2, 6, 4, 1)
    assert "Permission denied" in said["skipped"]["first"]
    assert names_in(shelf) == {name(i) for i in (0, 1, 2, 9)}
    status, said = command("rm", "--model", SPACE)
    assert (status, "1 could not be removed: PermissionError: " in said) == (2, True)
    assert names_in(shelf) == {name(9)}


def test_a_folder_that_may_not_be_read_is_passed_over(
    shelf: FolderShelf, driver: Driver, command: Command, denied: Callable[[str, str], None]
) -> None:
    other = object_name(bytes.fromhex(OTHER), "t", key(1))
    driver.call("put", [other], [driver.filled(1, 64)])
    denied("Folder.open", OTHER)
    for action in (("ls",), ("stat",), ("verify",), ("gc", "--max-bytes", "0")):
        status, said = command(*action)
        assert (status, "1 could not be read: PermissionError: " in said) == (2, True), said
    assert command("stat", "--json")[1]["skipped"]["unread"] == 1
    assert names_in(shelf) == set()


def test_an_object_that_may_not_be_read_is_not_wrong(
    shelf: FolderShelf, command: Command, denied: Callable[[str, str], None]
) -> None:
    denied("Folder.open", name(3))
    status, said = command("verify", "--json")
    assert (status, said["objects"], said["wrong"], said["skipped"]["unread"]) == (2, 9, [], 1)


def test_a_long_file_without_content_is_wrong_and_is_not_read(shelf: FolderShelf, folder: Path) -> None:
    os.truncate(folder / name(1), 1 << 40)
    raw = (folder / name(2)).read_bytes()
    with (folder / name(2)).open("r+b") as file:
        file.seek(1 << 40)
        file.write(raw[-TRAILER_BYTES:])
    reasons = {int(found_name[-2:], 16): reason.partition(":")[0] for found_name, reason in verify(shelf).wrong}
    assert reasons == {1: "torn, or no object of kvtier", 2: "torn"}


def test_objects_of_a_bucket_that_may_not_be_removed_or_read_are_counted(
    opens: Opens, s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens(s3_uri(s3.port)).put_sealed(range(3))
    shelf = open_shelf(s3_uri(s3.port))
    listed = list(shelf.entries())
    monkeypatch.setattr(shelf, "entries", lambda _="": iter(listed))
    monkeypatch.setattr("kvtier.remote.keeper.upkeep.LARGE_BYTES", 0)
    assert (verify(shelf).objects, verify(shelf).wrong) == (3, [])
    s3.status = 403
    assert (collect(shelf, 0).left, shelf.skipped.unremoved) == (3, 3)
    assert (verify(shelf).objects, shelf.skipped.unread, shelf.skipped.unremoved) == (0, 3, 0)


def test_a_secret_need_not_be_text(driver: Driver, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.put_sealed([1], envelope=Envelope(NAMESPACE, b"\xff\xfe"))
    monkeypatch.setitem(os.environb, b"KVTIER_KEY_SECRET", b"\xff\xfe")
    assert command("verify")[0] == 0


def test_an_object_that_goes_while_it_is_checked_is_not_wrong(
    shelf: FolderShelf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list(shelf.entries())
    (folder / name(1)).unlink()
    monkeypatch.setattr(shelf, "entries", lambda _: iter(listed))
    found = verify(shelf)
    assert (found.objects, found.wrong) == (9, [])


def test_a_namespace_is_removed_as_a_whole(shelf: FolderShelf, folder: Path, driver: Driver, command: Command) -> None:
    other = object_name(bytes.fromhex(OTHER), "t", key(1))
    driver.call("put", [other], [driver.filled(1, 64)])
    (folder / f"{name(0)}#1").write_bytes(b"half")
    status, said = command("rm", "--model", SPACE, "--json")
    assert (status, said["removed"], said["swept"], said["left"]) == (0, 10, 1, 0)
    assert names_in(shelf) == {other}
    assert [path.name for path in (folder / "kvt1").iterdir()] == [OTHER]
    assert command("rm", "--model", SPACE)[0] == 2


def test_the_command_lists_and_clears_up(shelf: FolderShelf, command: Command) -> None:
    status, said = command("ls")
    assert (status, SPACE in said, "46.2 KiB" in said) == (0, True, True)
    status, said = command("ls", "--model", SPACE, "--limit", "2")
    assert said.splitlines()[0].startswith(f"{name(0)}  4.6 KiB  1 h ago")
    assert (len(said.splitlines()), said.splitlines()[2]) == (3, "and 8 older ones (--limit)")
    assert command("ls", "--model", SPACE, "--json")[1]["objects"] == 10
    assert command("stat", "--json")[1]["bytes"] == 10 * SIZE
    assert "all" in command("stat")[1]
    assert "would be removed: 10 objects" in command("gc", "--max-bytes", "0", "--dry-run")[1]
    status, said = command("gc", "--max-bytes", "20k", "--json")
    assert (status, said["removed"], said["left"]) == (0, 6, 4)
    assert "removed: 4 objects, 18.5 KiB; left: 0 objects, 0 bytes" in command("gc", "--max-bytes", "0")[1]
    assert "no objects" in command("ls")[1]


def test_a_quota_may_be_one_namespaces(shelf: FolderShelf, driver: Driver, command: Command) -> None:
    other = object_name(bytes.fromhex(OTHER), "t", key(1))
    driver.call("put", [other], [driver.filled(1, SIZE)])
    assert command("gc", "--max-bytes", "0", "--model", OTHER, "--json")[1]["removed"] == 1
    assert len(names_in(shelf)) == 10


def test_a_keeper_goes_on_until_it_is_told_to_end(shelf: FolderShelf, folder: Path, driver: Driver) -> None:
    code = "import sys; from runner.cli import main; sys.exit(main())"
    options = ["gc", f"file://{folder}", "--max-bytes", "20k", "--every", "1", "--json"]
    command = [sys.executable, "-c", code, "remote", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        assert json.loads(keeper.stdout.readline())["left"] == 4
        driver.put_sealed([11, 12])
        assert any(json.loads(line)["removed"] == 2 for line in keeper.stdout)
        keeper.terminate()
        assert keeper.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "uri", "says"),
    [
        (("ls",), "file:///never/made", "no directory"),
        (("ls",), "memory://", "one process"),
        (("gc", "--max-bytes", "1"), "mooncake://host:1", "keeps itself"),
        (("ls",), "nonsense", "use file:///directory"),
        (("gc",), "", "--max-bytes"),
        (("gc", "--max-bytes", "lots"), "", "--max-bytes"),
        (("rm",), "", "--model"),
        (("rm", "--model", "../.."), "", "32 hexadecimal digits"),
        (("ls", "--limit", "0"), "", "positive"),
    ],
)
def test_what_cannot_work_is_said(
    driver: Driver, command: Command, arguments: tuple[str, ...], uri: str, says: str
) -> None:
    status, said = command(*arguments, uri=uri)
    assert (status, says in said) == (2, True), said


def test_a_bucket_is_kept_by_listing(opens: Opens, s3: FakeS3, command: Command) -> None:
    uri = s3_uri(s3.port)
    opens(uri).put_sealed(range(5))
    s3.objects["some/prefix/kvt1/notes"] = b"mine"
    assert command("stat", "--json", uri=uri)[1]["objects"] == 5
    s3.objects[f"some/prefix/{name(3)}"] = pattern(1, SIZE)
    status, said = command("verify", "--json", uri=uri)
    assert (status, [wrong["name"] for wrong in said["wrong"]]) == (1, [name(3)])
    assert command("gc", "--max-bytes", str(2 * SIZE), "--json", uri=uri)[1]["left"] == 2
    assert command("rm", "--model", SPACE, "--json", uri=uri)[1]["removed"] == 2
    assert list(s3.objects) == ["some/prefix/kvt1/notes"]
    s3.status = 403
    status, said = command("ls", uri=uri)
    assert (status, "does not serve: " in said and "403 Forbidden" in said) == (2, True), said


def test_two_keepers_of_a_bucket_do_no_harm(opens: Opens, s3: FakeS3) -> None:
    opens(s3_uri(s3.port)).put_sealed(range(3))
    shelf = open_shelf(s3_uri(s3.port))
    listed = list(shelf.entries())
    assert len(list(shelf.remove(listed))) == len(list(shelf.remove(listed))) == 3
