"""A workload by its name: one of ours, or a trace from a folder."""

from __future__ import annotations

from benchmarks.hits.workloads import WORKLOADS, Ask

BLOCK_TOKENS = 16


def asks_of(name: str, requests: int | None = None, traces: str | None = None) -> tuple[list[Ask], int]:
    """Its first ``requests`` (None: all), and the tokens of a block."""
    return WORKLOADS[name]()[:requests], BLOCK_TOKENS
