"""Compile a bookkeeping loop with numba and keep the machine code on disk.

numba's on-disk cache looks only at the file of the function itself: an edited callee in another file would leave
old machine code in its callers. So the cache lives in a folder named after the hash of all kvtier sources.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import config

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _cache_dir() -> str | None:
    """The folder for this version of the sources, or None where nothing can be written."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "kvtier" / digest.hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def jit(function: F) -> F:
    """``numba.njit`` that releases the GIL and caches on disk by the sources of the whole package."""
    return _compile(function, forceinline=False)


def inlined(function: F) -> F:
    """``jit`` for a small function that other loops call.

    A call that is not inlined passes every array of its arguments by value and counts references on each.
    """
    return _compile(function, forceinline=True)


def _compile(function: F, forceinline: bool) -> F:
    folder = _cache_dir()
    settings: Any = config
    saved = settings.CACHE_DIR
    settings.CACHE_DIR = folder or saved  # numba reads it while it decorates
    try:
        compiled: Any = numba.njit(cache=folder is not None, nogil=True, error_model="numpy", forceinline=forceinline)(
            function
        )
    finally:
        settings.CACHE_DIR = saved
    return cast(F, compiled)
