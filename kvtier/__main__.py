"""``python -m kvtier``, and the command ``kvtier``."""

from __future__ import annotations

import sys
from importlib import import_module

from kvtier.machine.reference_engine import load


def main() -> int:
    """Runs the command line; returns its exit status."""
    load()
    return int(import_module("runner.cli").main())


if __name__ == "__main__":
    sys.exit(main())
