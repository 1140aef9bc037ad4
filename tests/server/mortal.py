"""``kvtier serve`` whose engine dies at its first step, outside of the forward: python -m server.mortal OPTIONS."""

from __future__ import annotations

import sys
from typing import Any

from runner import cli
from runner.engine.loop import Engine


def dies(*_: Any) -> None:
    raise RuntimeError("planted death")


if __name__ == "__main__":
    Engine.step = dies  # type: ignore[assignment, method-assign]
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
