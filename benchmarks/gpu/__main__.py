"""``python -m benchmarks.gpu``: everything that only a GPU can tell, in one run of less than 8 minutes.

Device tests; the link and the copy engine; reloads; time to first token of real model shapes; decode steps, what copies
cost them, page layouts; recurrent layers; the main job. The kernels of FlashInfer that these sections run are built
before that time begins, or ahead (--kernels). Prints a table last. The JSON is written anew after every figure: what
ends a run early costs none that was measured before.
Exit status: 0 if every mark is reached, 1 if not or if kernels cannot be linked, 2 if there is no GPU here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu import kernels
from benchmarks.gpu.figures import Budget, Figure, Section
from benchmarks.gpu.kernels import Kernel, StateKernel
from benchmarks.gpu.sections import SECTIONS
from benchmarks.machine import describe
from benchmarks.output import stdout

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"
MOST_S = 470.0
NO_GPU = 2
DRIVER = Path("/proc/driver/nvidia/version")


def why_not() -> str:
    """Why this machine cannot run it; "" if it can."""
    from kvtier.cpu_offload.engines.cuda.link import check_software
    from kvtier.machine.device import resolve_device
    from kvtier.machine.errors import DeviceUnavailable

    try:
        resolve_device("cuda:0")
        check_software(0)
    except DeviceUnavailable as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def gpu() -> dict[str, Any]:
    """The GPU, its driver and the software on it."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from kvtier.cpu_offload.engines.cuda.driver import cupy_runtime

    runtime, found = cupy_runtime(), dict[str, str | None]()
    for name in ("cupy-cuda12x", "cupy-cuda13x", "triton", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(),
        "driver_cuda": int(runtime.driverGetVersion()),
        "torch_cuda": torch.version.cuda,
        "pci_bus_id": str(runtime.deviceGetPCIBusId(0)),
        "versions": found,
    }


def driver_version() -> str | None:
    """The version of NVIDIA's driver itself, such as 570.86.10; None where neither its tool nor its module tells."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        told = DRIVER.read_text(encoding="utf-8", errors="replace") if DRIVER.exists() else ""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(\.\d+)*)\s", told, re.MULTILINE)
    return found[1] if found else None


Keep = Callable[[], None]
"""Writes what has been measured so far."""


def gather(part: str, run: Callable[[], Iterator[Figure]], figures: list[Figure], console: Console, keep: Keep) -> None:
    """Appends what ``run`` finds as it comes, keeps it and says it; if the part breaks, a figure that fails."""
    try:
        with console.status(part):
            for figure in run():
                figures.append(figure)
                keep()
                said = f"{figure.section}: {figure.name}: {figure.value:.4g} {figure.unit} {figure.note}"
                console.print(said, markup=False)
    except Exception as problem:
        console.print_exception()
        note = f"{type(problem).__name__}: {problem}"
        figures.append(Figure(part, "broke", 0.0, "", at_least=1.0, note=note[:300]))
        keep()


def compiled() -> Iterator[Figure]:
    """The loops that numba compiles, which takes a minute once and is kept on disk for the processes that follow."""
    from kvtier.cache.warmup import warm_up

    yield Figure(
        kernels.SECTION, "compiled loops are there after", warm_up().seconds, "s", note="before the clock starts"
    )


def measure(chosen: Sequence[Section], budget: Budget, figures: list[Figure], console: Console, keep: Keep) -> None:
    """Appends the figures of these sections."""
    for i, section in enumerate(chosen):
        budget.keep(section.needs_s, [later.needs_s for later in chosen[i + 1 :]])
        if budget.left_s < section.needs_s:
            figures.append(Figure(section.name, "not run: no time is left", 0.0, "", at_least=1.0))
            keep()
            continue
        begun = time.perf_counter()
        gather(section.name, partial(section.run, budget), figures, console, keep)
        figures.append(Figure(section.name, "took", time.perf_counter() - begun, "s"))
        keep()


def write(path: Path, about: Mapping[str, Any], figures: Sequence[Figure], whole: bool = False) -> None:
    """Replaces the JSON; ``whole`` says in it whether the run came to its end."""
    result = {**about, "whole": whole, "figures": [asdict(f) | {"ok": f.ok} for f in figures]}
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def table(figures: Sequence[Figure]) -> Table:
    """For people."""
    shown = Table("part", "what", "value", "unit", "must", "")
    for f in figures:
        mark = {True: "green", False: "red", None: "default"}[f.ok]
        must = f"≥ {f.at_least:g}" if f.at_least is not None else f"≤ {f.at_most:g}" if f.at_most is not None else ""
        section, name, unit, must, note = map(escape, (f.section, f.name, f.unit, must, f.note))
        shown.add_row(section, name, f"[{mark}]{f.value:,.4g}[/]", unit, must, note)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", default="", help="sections whose name contains this")
    parser.add_argument("--json", type=Path, default=RESULTS, help=f"where the figures go (default: {RESULTS.name})")
    parser.add_argument("--kernels", action="store_true", help="only build FlashInfer's kernels; needs nvcc, no GPU")
    parser.add_argument("--seconds", type=float, default=MOST_S, help="for the sections (default: %(default).0f)")
    args = parser.parse_args(argv)
    chosen = [section for section in SECTIONS if args.only in section.name]
    if not chosen:
        parser.error(f"no section's name contains {args.only!r}: {', '.join(section.name for section in SECTIONS)}")
    if not args.kernels and (problem := why_not()):
        print(f"no GPU here: {problem}", file=sys.stderr)
        return NO_GPU
    wanted = set[Kernel | StateKernel]().union(*(section.kernels() for section in chosen))
    if problem := kernels.cannot_link(wanted):
        print(f"kernels cannot be built: {problem}", file=sys.stderr)
        return 1
    if args.kernels:
        built = list(kernels.run(wanted))
        stdout().print(table(built))
        return int(any(f.ok is False for f in built))
    console, figures = Console(stderr=True), list[Figure]()
    about: dict[str, Any] = {"machine": describe(), "gpu": gpu()}  # first: a lost device answers nothing any more
    about["sections"] = [section.name for section in chosen]
    keep = partial(write, args.json, about, figures)
    try:
        gather(kernels.SECTION, partial(kernels.run, wanted), figures, console, keep)
        gather(kernels.SECTION, compiled, figures, console, keep)
        measure(chosen, Budget(args.seconds), figures, console, keep)
        keep(whole=True)
    except BaseException:
        keep()
        raise
    finally:
        stdout().print(table(figures))
    return int(any(f.ok is False for f in figures))


if __name__ == "__main__":
    sys.exit(main())
