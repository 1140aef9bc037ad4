"""How much host memory a process may have and pin, and which limit says so.

Owns       the readings of /proc and of the control groups, this process's own and all above it.
Promises   changes nothing; a limit that this system does not have is left out.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
SPARE = 0.9
"""Share of a limit that is proposed instead: the rest of the process and of the machine need memory too."""


@dataclass(frozen=True)
class Limit:
    """``num_bytes`` are left under the limit called ``name``."""

    name: str
    num_bytes: int
    fix: str
    """How to raise it."""
    for_pinning: bool = False
    """Bounds locked memory only, and only of processes without the right to lock any amount."""


def limits(root: str = "/") -> list[Limit]:
    """The bounds of host memory here: free memory, the control group, locked memory. ``root``: of /proc, /sys."""
    found = []
    for line in _read(root, "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(Limit("MemAvailable", int(line.split()[1]) * 1024, "free memory on this machine"))
    for folder in _groups(root):
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, now = _read(root, f"{folder}/{most}").strip(), _read(root, f"{folder}/{used}").strip()
            if limit.isdigit() and now.isdigit() and int(limit) < 1 << 60:
                left = max(0, int(limit) - int(now))
                found.append(Limit(f"the control group's {most}", left, "give the container more memory"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        found.append(Limit("memlock (ulimit -l)", soft, "raise it with `ulimit -l unlimited` or in limits.conf", True))
    return found


def available_ram_bytes(root: str = "/") -> int:
    """Memory that a new allocation can use: the least of the machine's memory, its free part, and the control
    groups' rest."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([pages, *(limit.num_bytes for limit in limits(root) if not limit.for_pinning)])


def _groups(root: str) -> list[str]:
    """The memory folders of this process's control group and of the groups above it."""
    folders = ["sys/fs/cgroup", "sys/fs/cgroup/memory"]
    for line in _read(root, "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        base = "sys/fs/cgroup" if not kinds else "sys/fs/cgroup/memory"
        parts = [part for part in path.split("/") if part]
        if kinds in ("", "memory") and ".." not in parts:
            folders += [f"{base}/{'/'.join(parts[: k + 1])}" for k in range(len(parts))]
    return folders


def explain(num_bytes: int, setting: str, doing: str, problem: str, found: Sequence[Limit]) -> str:
    """Why ``num_bytes`` of host memory were refused: every limit, the too small ones first, and a smaller size."""
    small = sorted((limit for limit in found if limit.num_bytes < num_bytes), key=lambda limit: limit.num_bytes)
    named = [f"{limit.name} leaves {limit.num_bytes:,} bytes: {limit.fix}" for limit in small]
    if not named:
        named = ["no limit that kvtier knows is smaller: " + ", ".join(f"{f.name} {f.num_bytes:,}" for f in found)]
    binding = [limit.num_bytes for limit in found if not limit.for_pinning]
    offer = int(min([*binding, num_bytes]) * SPARE)
    size = f"{offer // GIB}GiB" if offer >= 2 * GIB else f"{offer >> 20}MiB"
    return f"{doing} {num_bytes:,} bytes of host memory failed ({problem}); {'; '.join(named)}. Try {setting}={size!r}"


def _read(root: str, path: str) -> str:
    """A small system file's text; "" without the file."""
    try:
        return Path(os.path.join(root, path)).read_text(encoding="ascii", errors="replace")  # noqa: PTH118
    except OSError:
        return ""
