"""The parts of a run, in order. Add yours here: a function from a ``Budget`` to figures."""

from __future__ import annotations

from benchmarks.gpu import decode, device_tests, link, main_job, reload, ttft
from benchmarks.gpu.figures import Section

SECTIONS = [
    Section("device tests", device_tests.run, needs_s=60.0),
    Section("link and copy engine", link.run, needs_s=60.0),
    Section("reload", reload.run, needs_s=30.0),
    Section("time to first token", ttft.run, needs_s=80.0),
    Section("decode and interference", decode.run, needs_s=70.0),
    Section("main job", main_job.run, needs_s=30.0),
]
