"""Where tables of figures go."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 140
"""Columns of a file or a pipe: so many that no table of ours is folded."""


def stdout() -> Console:
    """Standard output, as wide as the terminal if it is one."""
    return Console(width=None if sys.stdout.isatty() else WIDE)
