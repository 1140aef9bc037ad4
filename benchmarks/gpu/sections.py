"""The parts of a run, in order. Add yours here: a function from a ``Budget`` to figures."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu import decode, device_tests, kernels, latents, link, main_job, reload, states, ttft
from benchmarks.gpu.figures import Section

SECTIONS = [
    Section("device tests", device_tests.run, 60.0, kernels.of_tests),
    Section("link and copy engine", link.run, 60.0),
    Section("reload", reload.run, 30.0),
    Section("time to first token", ttft.run, 80.0, partial(kernels.of_models, ttft.MODELS)),
    Section("decode and interference", decode.run, 70.0, partial(kernels.of_models, (decode.MODEL,))),
    Section("latents", latents.run, 20.0, kernels.of_latents),
    Section("states", states.run, 40.0, states.kernels),
    Section("main job", main_job.run, 30.0, kernels.of_main_job),
]
