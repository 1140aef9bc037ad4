"""Forked children: a fork copies what a process has in memory, and none of its threads.

Owns       who is to be told, weakly.
Promises   in a forked child, all that would wait for such a thread is told before any other code runs there. It counts
           as closed, with ``of_another_process`` as the reason. It ends, frees and writes nothing: memory, files and
           connections are the parent's.
Does not   concern processes that ``subprocess`` or "spawn" start: they copy nothing.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """What has threads, or memory that threads write."""

    def on_fork(self) -> None:
        """This is a forked child, with one thread."""


_watched: weakref.WeakSet[Forked] = weakref.WeakSet()


def watch(owner: Forked) -> None:
    """Tells ``owner`` of forks from now on."""
    _watched.add(owner)


def of_another_process(what: str) -> str:
    """Why ``what`` cannot be used."""
    return (
        f"{what} is of the process that this one was forked from, and none of its threads run here: make another one "
        'here, or start processes by "spawn"'
    )


def _tell() -> None:
    for owner in list(_watched):
        owner.on_fork()


os.register_at_fork(after_in_child=_tell)
