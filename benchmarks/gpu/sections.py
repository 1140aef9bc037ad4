"""The parts of a run, in order. Add yours here: a function from a ``Budget`` to figures.

Still missing, each with its place: time to first token, recompute against load (after "reload"); the share of decode
throughput that copies cost while they saturate the link, decode steps with their CPU share, the cost of a plan, paged
layouts (after that); the main job on the GPU (last).
"""

from __future__ import annotations

from benchmarks.gpu import device_tests, link, reload
from benchmarks.gpu.figures import Section

SECTIONS = [
    Section("device tests", device_tests.run, needs_s=60.0),
    Section("link and copy engine", link.run, needs_s=60.0),
    Section("reload", reload.run, needs_s=30.0),
]
