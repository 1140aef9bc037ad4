"""Pictures with matplotlib, which is optional: ``kvtier[plot]``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvtier.machine.errors import ConfigError
from runner.errors import MissingPackage


def pyplot() -> Any:
    """matplotlib, drawing into files; raises ``MissingPackage`` with the fix."""
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
    except ImportError as problem:
        raise MissingPackage("--plot needs matplotlib; install it with: pip install 'kvtier[plot]'") from problem
    return plt


def check_target(text: str) -> Path:
    """The file that ``--plot`` names; raises ``ConfigError`` if it names none."""
    if not text.strip() or text.endswith(("/", os.sep)) or Path(text).is_dir():
        raise ConfigError(f"--plot needs the name of a file to write, such as picture.png, got {text!r}")
    return Path(text)
