"""Compile a bookkeeping loop with numba and keep the machine code on disk.

numba's on-disk cache looks only at the file of the function itself: an edited callee in another file would leave
old machine code in its callers. So the cache lives in a folder per module, named after the hash of that module and of
all that it imports.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, config, types
from numba.extending import intrinsic, overload

F = TypeVar("F", bound=Callable[..., Any])


KEEP_S = 30 * 24 * 3600.0
"""Machine code of other versions is removed once it has not been used for this long."""

_IMPORT = re.compile(r"^\s*from kvtier\.?([\w.]*) import (?:\(([^)]*)\)|(.+)$)", re.MULTILINE)


@functools.cache
def _imports(root: Path) -> tuple[dict[str, Path], dict[str, set[str]]]:
    """Every module of the package: its file, and the modules that it imports."""
    files = {p.relative_to(root).with_suffix("").as_posix().replace("/", "."): p for p in root.rglob("*.py")}
    return files, {name: _imported(path.read_text(encoding="utf-8"), files) for name, path in files.items()}


def _sources(root: Path, module: str) -> list[Path]:
    """The file of ``module`` and of whatever it imports, in order of their names."""
    files, imports = _imports(root)
    found, new = set[str](), {module, "_jit"} & files.keys()
    while new:
        found |= new
        new = set().union(*(imports[name] for name in new)) - found
    return [files[name] for name in sorted(found)]


def _imported(source: str, modules: dict[str, Path]) -> set[str]:
    names = set[str]()
    for module, several, one in _IMPORT.findall(source):
        names.add(module)
        names |= {f"{module}.{name.split(' as ')[0].strip()}" for name in (several or one).split(",")}
    return names & modules.keys()


@functools.cache
def _cache_dir(module: str) -> str | None:
    """The folder for this version of a module's loops, or None where nothing can be written."""
    settings: Any = config
    digest = hashlib.blake2b(f"{module} {settings.BOUNDSCHECK}".encode(), digest_size=10)  # numba's key leaves that out
    for path in _sources(Path(__file__).parent, module):
        digest.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    folder = base / digest.hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError:
        return None
    with suppress(OSError):  # somebody else may be clearing up as well
        for other in base.iterdir():
            if time.time() - other.stat().st_mtime > KEEP_S:
                shutil.rmtree(other, ignore_errors=True)
    return str(folder) if os.access(folder, os.W_OK) else None


def jit(function: F) -> F:
    """``numba.njit`` that releases the GIL and caches on disk by the sources that it is made from.

    Loops get every array that they need, scratch space included: without allocations there is nothing to count
    references of, and numba need not do so on each array at each call (docs/PERFORMANCE.md).
    """
    return _compile(function, forceinline=False)


def inlined(function: F) -> F:
    """``jit`` for a small function that other loops call."""
    return _compile(function, forceinline=True)


def records(array: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """A structured array whose fields the loops can reach by attribute, also where they run as Python."""
    settings: Any = config
    return array.view(np.recarray) if settings.DISABLE_JIT else array


def prefetch(array: Any, index: Any) -> None:
    """In a compiled loop: asks for the cache line of array[index], which must exist; waits for nothing."""


def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        line = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        flags = [context.get_constant(types.int32, flag) for flag in (0, 3, 1)]  # to read, keep it, data
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *(ir.IntType(32),) * 3])
        utils: Any = cgutils
        builder.call(utils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8"), [line, *flags])
        return context.get_dummy_value()

    return types.none(array, index), generate


_instruction: Any = intrinsic(_prefetch)
_OF_PREFETCH: Any = {"forceinline": True, "_nrt": False}


@overload(prefetch, jit_options=_OF_PREFETCH)
def _compiled_prefetch(array: Any, index: Any) -> Any:
    def compiled(array: Any, index: Any) -> Any:
        return _instruction(array, index)

    return compiled


def _compile(function: F, forceinline: bool) -> F:
    folder = _cache_dir(function.__module__.removeprefix("kvtier."))
    settings: Any = config
    saved = settings.CACHE_DIR
    settings.CACHE_DIR = folder or saved  # numba reads it while it decorates
    try:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": forceinline, "_nrt": False}
        compiled: Any = numba.njit(cache=folder is not None, **options)(function)
    finally:
        settings.CACHE_DIR = saved
    return cast(F, compiled)
