"""What is installed here, and whether it works: the findings of ``kvtier doctor``.

Promises   a package that is missing or broken is a finding, not an end. Nothing is compiled, downloaded or written.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CORE = ("numpy", "numba", "torch")
"""What a cache needs; the rest is the engine's."""
_SHOWN = ("transformers", "rich", "cupy", "flashinfer", "triton", "vllm")
_DISTRIBUTIONS = {
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "flashinfer": ("flashinfer-python",),
}
_MODULES = {
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
    "flashinfer-python": "flashinfer",
    "mkdocs-material": "material",
    "mkdocstrings-python": "mkdocstrings_handlers",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "nvidia-ml-py": "pynvml",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pytest-cov": "pytest_cov",
    "pytest-xdist": "xdist",
    "pyzmq": "zmq",
}
"""Packages whose module has another name."""
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w.,-]+)\])?[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?")
_NOT_OURS = ("dev", "docs")
_WITH_LOOPS = (
    "attention._decode_loops",
    "attention._exact_loops",
    "cache.facade",
    "coordinator.scheduler",
    "cpu_offload.engines._blocks",
    "cpu_offload.engines.cuda.descriptors",
    "machine.loops.products",
    "machine.loops.rows",
    "pools.changes",
    "remote.sums",
)
"""Modules that import all loops between them."""
PROMPT_TOKENS = 96


@dataclass(frozen=True)
class Extra:
    """The packages of an extra, and those of them that are not here."""

    packages: list[str]
    missing: list[str]


def version_of(name: str) -> str | None:
    """The version of an installed package; None if it is not there to import."""
    module = _MODULES.get(name, name.replace("-", "_"))
    is_imported = sys.modules.get(module) is not None
    if not is_imported and (module in sys.modules or find_spec(module) is None):
        return None
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def extras_of(requires: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(Packages that are always needed, those of each extra), from the lines of a package's metadata."""
    always: list[str] = []
    direct: dict[str, list[tuple[str, list[str]]]] = {}
    for line in requires:
        found = _REQUIREMENT.match(line)
        if found is None:
            continue
        name, more, extra = found[1], (found[2] or "").split(","), found[3]
        if extra is None:
            always.append(name)
        else:
            direct.setdefault(extra, []).append((name, more))

    def packages(extra: str) -> list[str]:
        found: list[str] = []
        for name, more in direct.get(extra, ()):
            found += [one for other in more for one in packages(other)] if name == "kvtier" else [name]
        return list(dict.fromkeys(found))

    return always, {extra: packages(extra) for extra in sorted(direct)}


def requirements() -> Sequence[str]:
    """kvtier's own, as it was installed; of a clone that is only on the path, none."""
    try:
        return metadata.requires("kvtier") or ()
    except metadata.PackageNotFoundError:
        return ()


def serve_twice() -> tuple[int, list[str]]:
    """(Tokens that a prompt finds when it comes again in a small cache on the CPU, what the audit finds)."""
    import numpy as np

    from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Request, Scheduler

    group = GroupSpec("full", FullAttention(), num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    hits: list[int] = []
    with KVCache(CacheSpec([group]), device_bytes="1MiB", host_bytes="1MiB") as cache:
        scheduler = Scheduler(cache, max_batched_tokens=64)
        for name in ("first", "again"):
            scheduler.add(Request(name, prompt_token_ids=list(range(PROMPT_TOKENS)), max_new_tokens=2))
            while scheduler.has_work():
                step = scheduler.schedule()
                for done in scheduler.commit(step, np.zeros(len(step.sample_rows), int)):
                    hits.append(sum(done.cached_tokens.values()))
                if not step.num_tokens:
                    scheduler.wait(timeout_s=1.0)
        return hits[-1], [f"{broken.invariant}: {broken.detail}" for broken in cache.audit()]


def cupy_problem() -> str:
    """Why a GPU here can have no host tier; empty if it can."""
    from kvtier.cpu_offload.engines.cuda.link import check_software
    from kvtier.machine.errors import DeviceUnavailable

    try:
        check_software(0)
    except DeviceUnavailable as problem:
        return str(problem)
    return ""


def examine() -> dict[str, Any]:
    """All findings, as JSON has them; ``problems`` are those that keep something from working."""
    problems: list[str] = []
    always, extras = extras_of(requirements())
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {"kvtier": _own_version(), **{name: version_of(name) for name in (*CORE, *_SHOWN)}},
        "engine_lacks": [name for name in always if name not in CORE and version_of(name) is None],
        "extras": {
            name: vars(Extra(packages, [one for one in packages if version_of(one) is None]))
            for name, packages in extras.items()
            if name not in _NOT_OURS
        },
    }
    usable = [_imported(name, problems) for name in CORE]
    if not all(usable):
        return found | {"problems": problems, "ok": False}
    found["torch_cuda"], found["gpu"] = _gpu(problems)
    found["loops"] = _loops(problems)
    found["memory"] = _memory()
    found["smoke"] = _smoke(problems) if found["loops"]["kept"] else {
        "skipped": "the loops are not compiled yet; `kvtier warmup` does that, and takes some 20 s"
    }  # fmt: skip
    return found | {"problems": problems, "ok": not problems}


def _own_version() -> str:
    from kvtier import __version__

    return __version__


def _imported(name: str, problems: list[str]) -> bool:
    try:
        import_module(name)
    except Exception as problem:  # of any kind: a library that does not load, a version that does not fit
        problems.append(f"{name} cannot be imported ({type(problem).__name__}: {problem}); pip install kvtier")
        return False
    return True


def _gpu(problems: list[str]) -> tuple[str | None, dict[str, Any]]:
    import torch

    from kvtier.machine.device import driver_version, resolve_device
    from kvtier.machine.errors import DeviceUnavailable

    driver = driver_version()
    told: dict[str, Any] = {"driver_cuda": None if driver is None else f"{driver // 1000}.{driver % 1000 // 10}"}
    try:
        resolve_device("cuda:0")
    except DeviceUnavailable as problem:
        if torch.version.cuda is not None and driver is not None:
            problems.append(str(problem))
        return torch.version.cuda, told | {"devices": [], "why_none": str(problem)}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    unfit = cupy_problem()
    if unfit:
        problems.append(unfit)
    rows = [{"name": one.name, "bytes": one.total_memory, "capability": [one.major, one.minor]} for one in devices]
    return torch.version.cuda, told | {"devices": rows, "host_tier": not unfit}


def _loops(problems: list[str]) -> dict[str, Any]:
    from kvtier.machine.loops.machine_code import folder, keepers

    for module in _WITH_LOOPS:
        import_module(f"kvtier.{module}")
    path, why = folder()
    kept = all(keeper.is_kept() for keeper in keepers())
    if not kept and not why and not _can_write(path):
        why = f"{path} cannot be written"
    if not kept and why:
        problems.append(f"compiled loops cannot be kept, so that every start compiles them: {why}")
    files = [] if path is None else [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return {"folder": None if path is None else str(path), "bytes": sum(files), "kept": kept}


def _can_write(path: Path | None) -> bool:
    there = next((one for one in (path, *path.parents) if one.exists()), None) if path is not None else None
    return there is not None and os.access(there, os.W_OK)


def _memory() -> dict[str, Any]:
    """The bytes that an engine would take by default; less if it also has weights to hold."""
    import warnings

    try:
        import torch

        from runner.engine import memory

        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a GPU without a host tier, which is a problem of its own
            return {
                "device_bytes": memory.automatic_device(device),
                "host_bytes": memory.automatic_host(device),
                "device": str(device),
            }
    except Exception as problem:
        return {"unknown": f"{type(problem).__name__}: {problem}"}


def _smoke(problems: list[str]) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        hit, violations = serve_twice()
    except Exception as problem:
        problems.append(f"a small cache on the CPU does not work ({type(problem).__name__}: {problem})")
        return {"ok": False, "hit_tokens": 0, "violations": [], "seconds": time.perf_counter() - begun}
    if not hit:
        problems.append("a small cache on the CPU has found nothing of a prompt that came again")
    problems += [f"a small cache on the CPU is damaged: {broken}" for broken in violations]
    ok = bool(hit) and not violations
    return {"ok": ok, "hit_tokens": hit, "violations": violations, "seconds": time.perf_counter() - begun}
