"""Where the machine code of the compiled loops is kept on disk, and which process may compile it.

Owns       the folder, a file per loop, and a lock between processes.
Promises   code is used only for the sources, the versions and the CPU that it was made for, whatever the sources' path
           and times. A folder that cannot be written is read all the same. A file that cannot be read is made anew. A
           process that dies while it compiles keeps no other process waiting.
Does not   compile, or say anything: ``warmup`` does.

Anyone with write access to the folder can make this process run their code. So the folder belongs to the user alone, or
to an image that others only read.

numba's own cache looks only at the file of the function itself. So an edited callee in another file would leave old
code in its callers. It needs a folder that can be written, and forgets that the bounds check changes the code. So a
module's code lies in a folder that is named after the hash of the module and of all its imports.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

try:
    import fcntl
except ImportError:  # Windows: processes that start at once all compile
    fcntl = None  # type: ignore[assignment]

VARIABLE = "KVTIER_CACHE_DIR"
KEEP_S = 30 * 24 * 3600.0
"""Machine code of other versions is removed once it has not been used for this long."""
WAIT_S = 600.0
"""A process waits no longer than this for another process that compiles."""
POLL_S = 0.05
PACKAGE = Path(__file__).parents[2]
"""kvtier, whose sources tell which machine code is whose."""

_IMPORT = re.compile(r"^\s*from kvtier\.?([\w.]*) import (?:\(([^)]*)\)|(.+)$)", re.MULTILINE)


@functools.cache
def _imports(root: Path) -> tuple[dict[str, Path], dict[str, set[str]]]:
    """Every module of the package: its file, and the modules that it imports."""
    files = {p.relative_to(root).with_suffix("").as_posix().replace("/", "."): p for p in root.rglob("*.py")}
    return files, {name: _imported(path.read_text(encoding="utf-8"), files) for name, path in files.items()}


def _sources(root: Path, module: str) -> list[Path]:
    """The files of ``module`` and of all modules that it imports, in order of their names."""
    files, imports = _imports(root)
    found, new = set[str](), {module, "machine.loops.jit"} & files.keys()
    while new:
        found |= new
        new = set().union(*(imports[name] for name in new)) - found
    return [files[name] for name in sorted(found)]


def _imported(source: str, modules: dict[str, Path]) -> set[str]:
    names = set[str]()
    for module, several, one in _IMPORT.findall(source):
        names.add(module)
        names |= {f"{module}.{name.split(' as ')[0].strip()}".lstrip(".") for name in (several or one).split(",")}
    return names & modules.keys()


@functools.cache
def folder() -> tuple[Path | None, str]:
    """The folder for machine code, or None and the reason.

    ``KVTIER_CACHE_DIR``, else ``kvtier`` in ``XDG_CACHE_HOME``, else ``~/.cache/kvtier``. A relative ``XDG_CACHE_HOME``
    is ignored, as its specification says. Read once, when kvtier is imported.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        path = Path(chosen)
        return (path, "") if path.is_absolute() else (None, f"{VARIABLE}={chosen} is not an absolute path")
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute() and os.environ.get("HOME") != "":
        with suppress(RuntimeError):  # a user unknown to the system
            base = Path.home() / ".cache"
    return (base / "kvtier", "") if base.is_absolute() else (None, "there is no home directory")


@functools.cache
def _folder_of(root: Path, module: str) -> Path:
    """The folder for this version of a module's loops."""
    settings: Any = config
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, settings.BOUNDSCHECK
    digest = hashlib.blake2b(f"{module} {versions}".encode(), digest_size=10)
    for path in _sources(PACKAGE, module):
        digest.update(path.read_bytes())
    return root / digest.hexdigest()


def why_not_written(path: Path | None, why: str) -> str:
    """Why nothing can be kept there; empty if it can. Makes the folder."""
    if path is None:
        return why
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as problem:
        return f"{path} cannot be written ({problem.strerror or problem})"
    return ""


def clear_up(root: Path) -> None:
    """Marks the folders of this version, and removes folders that were not used for ``KEEP_S`` seconds."""
    with suppress(OSError):
        for other in {keeper.path.parent for keeper in keepers() if keeper.path is not None}:
            if other.is_dir():
                os.utime(other)
        for other in root.iterdir():  # another process may be clearing up as well
            if re.fullmatch("[0-9a-f]{20}", other.name) and time.time() - other.stat().st_mtime > KEEP_S:
                shutil.rmtree(other, ignore_errors=True)


@contextmanager
def lock(root: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Only one process at a time is in here, unless ``root`` cannot be written. Calls ``wait`` before it waits.

    The system releases the lock when its process ends, for whatever reason.
    """
    try:
        file = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        _wait_for(file, wait)
        yield
    finally:
        os.close(file)


def _wait_for(file: int, wait: Callable[[], None]) -> None:
    start = time.monotonic()
    told = fcntl is None
    while fcntl is not None and time.monotonic() - start < WAIT_S:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                told = True
                wait()
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            return


class Keeper(_Cache):
    """numba's cache of one loop: asked before a compilation, told after it."""

    before_compiling: Callable[[], None] | None = None
    """Called by every keeper for a loop without kept code, which may be kept afterwards."""

    def __init__(self, dispatcher: Any) -> None:
        function = dispatcher.py_func
        self.module: str = function.__module__
        self._name: str = function.__qualname__
        root, _ = folder()
        self.path = None if root is None else _folder_of(root, self.module.removeprefix("kvtier.")) / self._name
        """The path without the suffixes for the CPU and the types of arguments."""
        self.compiled = 0
        self.problem = ""
        """Why the code could not be kept."""

    @property
    def cache_path(self) -> str | None:
        return None if self.path is None else str(self.path.parent)

    def enable(self) -> None:
        """There is nothing to turn on."""

    def disable(self) -> None:
        """There is nothing to turn off."""

    def flush(self) -> None:
        """Code stays until it was not used for long."""

    def is_kept(self) -> bool:
        """Whether there is code for this CPU, for some types of arguments, that is readable and whole."""
        if self.path is None:
            return False
        with suppress(Exception):
            for file in self.path.parent.glob(f"{self._name}.{_cpu(cpu_target.target_context.codegen())}.*"):
                pickle.loads(file.read_bytes())
                return True
        return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        found = self._load(sig, target_context)
        if found is None and Keeper.before_compiling is not None:
            Keeper.before_compiling()
            found = self._load(sig, target_context)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        self.compiled += 1
        if self.path is None:
            return
        path = self._file(sig, data.codegen)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"new.{uuid.uuid4().hex}")
            try:
                new.write_bytes(dumps(data._reduce()))
                new.replace(path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
        except OSError as problem:
            self.problem = f"{path.parent} cannot be written ({problem.strerror or problem})"

    def _load(self, sig: Any, target_context: Any) -> Any:
        if self.path is None:
            return None
        try:
            content = self._file(sig, target_context.codegen()).read_bytes()
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception:  # not there, not to be read by this user, or cut short
            return None

    def _file(self, sig: Any, codegen: Any) -> Path:
        assert self.path is not None
        types = hashlib.blake2b(str(sig).encode(), digest_size=8).hexdigest()
        return self.path.with_name(f"{self._name}.{_cpu(codegen)}.{types}")


_keepers: list[Keeper] = []


def keep(dispatcher: Any) -> None:
    """Looks for the dispatcher's code on disk, and keeps it there."""
    dispatcher._cache = keeper = Keeper(dispatcher)
    _keepers.append(keeper)


def keepers() -> list[Keeper]:
    """Keepers of all imported loops, except loops that only tests call."""
    return [keeper for keeper in _keepers if not keeper.module.startswith("kvtier.testing")]


def cpu() -> str:
    """The CPU for which code is made."""
    return str(cpu_target.target_context.codegen().magic_tuple()[1])


def target() -> str:
    """A digest of the CPU for which code is made, and of what it can."""
    return _cpu(cpu_target.target_context.codegen())


def _cpu(codegen: Any) -> str:
    return hashlib.blake2b(str(codegen.magic_tuple()).encode(), digest_size=8).hexdigest()
