"""Whose eyes a directory is for, and what lies behind links: neither engines nor their keeper go through one."""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import inside
import pytest

from kvtier import ConfigError
from kvtier.remote.backends.folder import Folder
from kvtier.remote.backends.uri import open_backend
from kvtier.remote.envelope import checksum_of
from kvtier.remote.keeper.shelf import LOCK, FolderShelf, open_shelf
from kvtier.remote.keeper.upkeep import collect, contents, forget, verify
from remote.driving import FAILED, MISS, NAMESPACE, OK, Driver, Opens, name
from runner import cli

HOUR = 3600.0
SPACE = NAMESPACE.hex()
DEPTHS = range(1, 5)
"""Of the folders of an object's name: kvt1, the namespace, the kind, two digits."""


@contextmanager
def umask(bits: int) -> Iterator[None]:
    checksum_of([memoryview(bytearray(64))])  # whose machine code is kept on disk, with rights as usual
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def rights(path: Path) -> str:
    return f"{stat.S_IMODE(path.lstat().st_mode):o}"


def rights_below(folder: Path) -> tuple[set[str], set[str]]:
    """Of the files, and of the folders and ``folder`` itself."""
    found = [folder, *folder.rglob("*")]
    return {rights(path) for path in found if path.is_file()}, {rights(path) for path in found if path.is_dir()}


def aged(path: Path, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture(params=["at once", "part by part"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How names are opened: by one call of the system, or where it has none."""
    if request.param == "part by part":
        inside.open_part_by_part(monkeypatch)


# --- rights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 0o022, 0o077])
def test_nobody_else_can_read_what_is_stored(opens: Opens, folder: Path, bits: int) -> None:
    with umask(bits):
        assert opens(f"file://{folder}").put_sealed(range(3)).outcomes == (OK,) * 3
        collect(open_shelf(f"file://{folder}"), 1 << 40)
    assert (folder / LOCK).is_file()
    assert rights_below(folder) == ({"600"}, {"700"})


def test_nobody_else_can_read_what_is_being_stored(opens: Opens, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, seen = os.rename, list[str]()

    def watched(source: str, *rest: Any, **more: Any) -> None:
        seen.extend(rights(path) for path in folder.rglob("*#*"))
        rename(source, *rest, **more)

    monkeypatch.setattr(os, "rename", watched)
    with umask(0):
        opens(f"file://{folder}").put_sealed([1])
    assert seen == ["600"]


def test_writers_with_the_same_seed_do_not_meet(opens: Opens, folder: Path) -> None:
    """Engines seed the process's random numbers alike; what one has left half-written is in no other's way."""
    driver, left = opens(f"file://{folder}"), set[str]()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            random.seed(0)
            Folder(folder).write(name(1), lambda file: left.update(p.name for p in folder.rglob("*#*")) or end(file))
    random.seed(0)
    before = random.getstate()
    assert driver.put_sealed([1]).outcomes == (OK,)
    assert len(left) == 2
    assert random.getstate() == before, "the sequence is the program's own"


def end(_file: int) -> None:
    raise KeyboardInterrupt


def test_a_file_that_tells_nothing_is_closed(opens: Opens, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a server that has forgotten it."""
    opens(f"file://{folder}").put_sealed([1])
    closed, close = list[int](), os.close

    def stale(file: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))

    def watched(file: int) -> None:
        closed.append(file)
        close(file)

    for opened in (lambda: Folder(folder).open_file(name(1)), lambda: Folder(folder).open_lock(LOCK)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", stale)
            patch.setattr(os, "close", watched)
            with pytest.raises(OSError, match="Stale") as told:
                opened()
        assert int(told.value.filename) in closed


@pytest.mark.parametrize(("mode", "files", "folders"), [("0660", "660", "770"), ("640", "640", "750")])
def test_a_store_may_be_shared_with_a_group(opens: Opens, folder: Path, mode: str, files: str, folders: str) -> None:
    uri = f"file://{folder}?mode={mode}"
    with umask(0o077):
        assert opens(uri).put_sealed(range(3)).outcomes == (OK,) * 3
        collect(open_shelf(uri), 1 << 40)
    assert rights_below(folder) == ({files}, {folders})


def test_folders_keep_the_group_of_a_folder_that_hands_it_on(opens: Opens, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o2770)
    opens(f"file://{folder}?mode=0660").put_sealed([1])
    assert rights_below(folder) == ({"660"}, {"2770"})


@pytest.mark.parametrize("mode", ["0600x", "777", "0060", "0060", "rw", "06666", ""])
def test_a_mode_that_makes_no_sense_is_refused(folder: Path, mode: str) -> None:
    with pytest.raises(ConfigError, match=r"mode=.*such as 0660"):
        open_backend(f"file://{folder}?mode={mode}")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("of_folder", "of_root", "mode", "says"),
    [
        (0o700, None, "0600", ""),
        (0o755, None, "0600", ""),  # nothing lies in it that others may enter
        (0o755, 0o700, "0600", ""),
        (0o777, 0o700, "0600", "others may write"),
        (0o770, 0o770, "0660", ""),
        (0o775, 0o770, "0640", "others may write"),
        (0o755, 0o755, "0600", "others may read"),
        (0o770, 0o775, "0660", "others may read"),
    ],
)
def test_a_folder_that_others_may_read_or_write_is_told(
    opens: Opens,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    of_folder: int,
    of_root: int | None,
    mode: str,
    says: str,
) -> None:
    folder.mkdir()
    if of_root is not None:
        (folder / "kvt1").mkdir()
        (folder / "kvt1").chmod(of_root)
    folder.chmod(of_folder)
    opens(f"file://{folder}?mode={mode}")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(says), told
    assert not says or (says in told[0] and str(folder) in told[0] and "chmod" in told[0])
    assert rights(folder) == f"{of_folder:o}", "it is its owner's"


def test_a_folder_that_may_not_be_entered_is_refused_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, permissions would not."""

    def denied(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_symlink", denied)
    with pytest.raises(ConfigError, match=r"cannot be used: .*Permission denied"):
        open_backend(f"file://{folder}")


# --- engines and links ------------------------------------------------------------------------------


def behind_a_link(folder: Path, outside: Path, depth: int) -> Path:
    """Puts a part of object 1's name elsewhere, with what lies in it, and a link in its place. Returns where it is."""
    path = folder.joinpath(*name(1).split("/")[:depth])
    outside.parent.mkdir(exist_ok=True)
    path.rename(outside)
    path.symlink_to(outside)
    return outside.joinpath(*name(1).split("/")[depth:])


def state(path: Path) -> tuple[float, bytes]:
    return path.stat().st_mtime, path.read_bytes()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("depth", DEPTHS)
def test_engines_go_through_no_link(opens: Opens, folder: Path, tmp_path: Path, depth: int) -> None:
    driver = opens(f"file://{folder}")
    driver.put_sealed([1])
    aged(folder / name(1), 2 * HOUR)
    victim = behind_a_link(folder, tmp_path / "elsewhere" / "it", depth)
    before = state(victim)
    assert driver.outcomes("look", [name(1)]) == [MISS]
    assert driver.get_checked([1]).outcomes == (FAILED,)
    answer = driver.put_sealed([1])
    assert (answer.outcomes, "is a link" in answer.reasons[0]) == ((FAILED,), True), answer
    assert driver.outcomes("delete", [name(1)]) == [FAILED]
    assert state(victim) == before
    assert [path.name for path in victim.parent.iterdir()] == [victim.name]


@pytest.mark.usefixtures("way")
def test_an_object_that_is_a_link_is_replaced_and_what_it_names_stays(
    opens: Opens, folder: Path, tmp_path: Path
) -> None:
    driver = opens(f"file://{folder}")
    driver.put_sealed([1])
    aged(folder / name(1), 2 * HOUR)
    victim = behind_a_link(folder, tmp_path / "elsewhere" / "it", 5)
    before = state(victim)
    assert driver.outcomes("look", [name(1)]) == [MISS]
    assert driver.get_checked([1]).outcomes == (FAILED,)
    assert driver.put_sealed([1]).outcomes == (OK,)
    assert driver.get_checked([1]).outcomes == (OK,)
    assert (state(victim), (folder / name(1)).is_symlink()) == (before, False)


@pytest.mark.usefixtures("way")
def test_the_directory_itself_may_be_a_link(opens: Opens, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    folder.symlink_to(tmp_path / "disk")
    driver = opens(f"file://{folder}")
    assert driver.put_sealed([1]).outcomes == (OK,)
    assert driver.get_checked([1]).outcomes == (OK,)
    assert {entry.name for entry in FolderShelf(folder).entries()} == {name(1)}
    assert (tmp_path / "disk" / name(1)).is_file()


def test_a_link_in_the_place_of_all_objects_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (folder / "kvt1").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="kvt1 is a link"):
        open_backend(f"file://{folder}")


def test_a_hit_makes_nothing_young_that_is_not_an_object(opens: Opens, folder: Path) -> None:
    driver = opens(f"file://{folder}")
    driver.put_sealed([1, 2])
    damaged = bytearray((folder / name(1)).read_bytes())
    damaged[5] ^= 1
    (folder / name(1)).write_bytes(damaged)
    for i in (1, 2):
        aged(folder / name(i), 2 * HOUR)
    assert driver.get_checked([1, 2]).outcomes == (FAILED, OK)
    ages = [time.time() - (folder / name(i)).stat().st_mtime for i in (1, 2)]
    assert [age > HOUR for age in ages] == [True, False]


# --- keepers and links ------------------------------------------------------------------------------


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], folder: Path) -> Callable[..., tuple[int, str]]:
    def run(action: str, *arguments: str) -> tuple[int, str]:
        status = cli.main(["remote", action, f"file://{folder}", *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


@pytest.fixture
def driver(opens: Opens, folder: Path) -> Driver:
    found = opens(f"file://{folder}")
    found.put_sealed([1])
    aged(folder / name(1), 2 * HOUR)
    return found


def leave(victim: Path) -> None:
    """Beside it an old staging file, and an empty folder."""
    (victim.parent / f"{victim.name}#1").write_bytes(b"half")
    aged(victim.parent / f"{victim.name}#1", 2 * HOUR)
    (victim.parent / "empty").mkdir()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "action",
    ["ls", "ls --model", "stat", "verify --delete", "gc --max-bytes 0", "gc --max-bytes 0 --model", "rm --model"],
)
def test_a_keeper_goes_through_no_link_and_names_it(
    folder: Path, tmp_path: Path, command: Callable[..., tuple[int, str]], depth: int, action: str
) -> None:
    victim = behind_a_link(folder, tmp_path / "elsewhere" / "it", depth)
    leave(victim)
    before = state(victim), sorted(path.name for path in victim.parent.iterdir())
    words = [*action.split(), SPACE] if action.endswith("--model") else action.split()
    status, said = command(*words)
    part = "/".join(name(1).split("/")[:depth])
    assert (status, f"{part} is a link" in said) == (2, True), said
    assert (state(victim), sorted(path.name for path in victim.parent.iterdir())) == before


@pytest.mark.usefixtures("driver", "way")
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_link_that_comes_after_the_listing_is_not_followed(folder: Path, tmp_path: Path, depth: int) -> None:
    shelf = FolderShelf(folder)
    (listed,) = shelf.entries()
    victim = behind_a_link(folder, tmp_path / "elsewhere" / "it", depth)
    leave(victim)
    before = state(victim), sorted(path.name for path in victim.parent.iterdir())
    assert list(shelf.remove([listed])) == []
    assert shelf.skipped.unremoved == 1
    shelf.clear_up(SPACE)
    with pytest.raises(OSError, match="is a link"):
        shelf.read(name(1))
    assert shelf.renew(listed, time.time()).modified_s == listed.modified_s
    assert (state(victim), sorted(path.name for path in victim.parent.iterdir())) == before


@pytest.mark.usefixtures("driver")
def test_an_object_that_becomes_a_link_is_not_removed(folder: Path, tmp_path: Path) -> None:
    shelf = FolderShelf(folder)
    (listed,) = shelf.entries()
    victim = behind_a_link(folder, tmp_path / "elsewhere" / "it", 5)
    before = state(victim)
    assert list(shelf.remove([listed])) == []
    shelf.renew(listed, time.time())
    assert state(victim) == before and (folder / name(1)).is_symlink()


@pytest.mark.usefixtures("driver")
def test_a_keeper_does_not_wait_for_what_is_no_file(folder: Path) -> None:
    shelf = FolderShelf(folder)
    (listed,) = shelf.entries()
    (folder / name(1)).unlink()
    os.mkfifo(folder / name(1))
    for read in (lambda: shelf.read(name(1)), lambda: shelf.read_end(listed, 8)):
        with pytest.raises(OSError, match="no file"):
            read()
    assert verify(shelf).objects == contents(shelf).all.objects == 0


@pytest.mark.usefixtures("driver")
def test_folders_that_no_object_can_lie_in_are_not_entered(folder: Path) -> None:
    deep = folder / "kvt1" / SPACE / "t" / "01"
    for _ in range(3):
        deep = deep / "more"
    deep.mkdir(parents=True)
    assert forget(FolderShelf(folder), SPACE).removed == 1
    assert deep.is_dir()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("what", ["pipe", "link", "link to nothing", "folder"])
def test_a_lock_that_is_no_file_is_refused_at_once(
    folder: Path, tmp_path: Path, command: Callable[..., tuple[int, str]], what: str
) -> None:
    lock, victim = folder / LOCK, tmp_path / "victim"
    if what == "pipe":
        os.mkfifo(lock)
    elif what == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(victim)
        if what == "link":
            victim.write_text("mine")
    for work in (lambda: collect(FolderShelf(folder), 0), lambda: forget(FolderShelf(folder), SPACE)):
        with pytest.raises(ConfigError, match="is no file"):
            work()
    status, said = command("gc", "--max-bytes", "0")
    assert (status, str(lock) in said, victim.exists()) == (2, True, what == "link"), said
    assert contents(FolderShelf(folder)).all.objects == 1
