"""What a call does in a forked child, told to the parent."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable
from typing import Any

LONGEST_S = 60.0
"""A child that has not answered by then waits for ever."""


def in_child(call: Callable[[], Any]) -> str:
    """The text of what ``call`` returns in a forked child, or the error that it raises there; "hangs" if neither."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which are the point here
        child = os.fork()
    if not child:
        try:
            told = str(call())
        except BaseException as problem:
            told = f"{type(problem).__name__}: {problem}"
        os.write(writing, (told or "nothing")[:4000].encode())
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], LONGEST_S)[0]:
            os.kill(child, signal.SIGKILL)
            return "hangs"
        return os.read(reading, 4096).decode()
    finally:
        os.close(reading)
        os.waitpid(child, 0)
