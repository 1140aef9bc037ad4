"""Which kernels a captured decode step runs, and what each takes: to be looked at before any of them is exchanged.

torch's profiler watches replays of one graph. Kernels of one name are one figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.figures import Figure

SECTION = "profile"
REPLAYS = 5
SHOWN = 24
"""Names with a figure of their own; the rest is one more."""
_BOILERPLATE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|at_cuda_detail::|flashinfer::|\(.*$")


def of(replay: Callable[[], None], wait: Callable[[], None], *, on_gpu: bool) -> Iterator[Figure]:
    """Milliseconds of each kernel in one ``replay``; ``wait`` returns when it has ended. Without a GPU: of each op."""
    replay()
    wait()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watched:
        for _ in range(REPLAYS):
            replay()
        wait()
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [(getattr(row, kind) / REPLAYS, row.count / REPLAYS, row.key) for row in watched.key_averages()]
    found = sorted((row for row in found if row[0] > 0), reverse=True)
    whole = sum(us for us, _, _ in found)
    yield _figure("all kernels", whole, sum(count for _, count, _ in found), whole)
    for us, count, name in found[:SHOWN]:
        yield _figure(shortened(name), us, count, whole)
    if rest := found[SHOWN:]:
        name = f"{len(rest)} others"
        yield _figure(name, sum(us for us, _, _ in rest), sum(count for _, count, _ in rest), whole)


def _figure(name: str, us: float, count: float, whole: float) -> Figure:
    return Figure(SECTION, name, us / 1e3, "ms", note=f"{count:,.0f} a step, {100 * us / max(whole, 1e-9):.1f} %")


def shortened(kernel: str) -> str:
    """A kernel's name without its namespaces and arguments, at most 100 characters."""
    return " ".join(_BOILERPLATE.sub("", kernel).split())[:100]
