"""A workload by its name: one of ours, or a trace from a folder."""

from __future__ import annotations

from pathlib import Path

from benchmarks.hits import traces
from benchmarks.hits.workloads import WORKLOADS, Ask

BLOCK_TOKENS = 16
NAMES = (*WORKLOADS, *traces.TRACES)


def asks_of(name: str, requests: int | None = None, folder: str | None = None) -> tuple[list[Ask], int]:
    """Its first ``requests`` (None: all), and the tokens of a block. ``folder``: of traces."""
    if name in WORKLOADS:
        return WORKLOADS[name]()[:requests], BLOCK_TOKENS
    if folder is None:
        raise SystemExit(f"{name} is a trace, and needs the folder that it is in")
    return traces.TRACES[name](Path(folder))[:requests], traces.BLOCK_TOKENS
