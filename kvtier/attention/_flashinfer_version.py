"""The installed FlashInfer, and whether its version is supported. Imports nothing of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

OLDEST = (0, 7, 2)
"""Older versions fail here. Up to 0.7.0, captured steps whose keys are never split (``batch_invariant``) read
indices that were never written. Also ``plan`` loops over its tensors in Python."""
_DISTRIBUTION = "flashinfer-python"


def installed_version() -> str | None:
    """FlashInfer's version; None if it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0"  # a folder of that name, nothing else is known


def too_old(version: str) -> str | None:
    """Why this FlashInfer is not supported, and the fix; None if it is."""
    if release(version) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return f"FlashInfer {version} is too old; pip install '{_DISTRIBUTION}>={oldest}'"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 7, 2) of "0.7.2.post1"."""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])
