"""Memory near a device: the device's NUMA node, and a request to the kernel for pages there.

Promises   failures are text, not errors: a copy across sockets is slower, not wrong.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
BIND, PREFERRED = 2, 1


def node_of(pci_bus_id: str, root: str = "/sys") -> tuple[int | None, str]:
    """The node of a PCI device ("0000:1a:00.0", in any case), or None and why."""
    path = Path(root, "bus/pci/devices", pci_bus_id.lower(), "numa_node")
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None, f"the system does not say which NUMA node {pci_bus_id} is attached to"
    nodes = [d.name for d in Path(root, "devices/system/node").glob("node[0-9]*")]
    if node < 0 or len(nodes) < 2:
        return None, "there is one NUMA node only"
    return node, ""


def free_bytes(node: int, root: str = "/sys") -> int | None:
    """Memory of the node that is free or holds clean files; None if unknown."""
    try:
        text = Path(root, f"devices/system/node/node{node}/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    kib = {name: int(n) for name, n in re.findall(r"(\w+(?:\(\w+\))?):\s+(\d+) kB", text)}
    return (kib.get("MemFree", 0) + kib.get("Inactive(file)", 0)) * 1024


def bind(address: int, num_bytes: int, node: int, policy: int = BIND) -> str:
    """Pages of this range will come from ``node``; "" or why not. Before they are touched."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"mbind is not known on {platform.machine()}"
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), ctypes.c_int(policy))
    if libc.syscall(*arguments, mask, ctypes.c_ulong(words * 64 + 1), ctypes.c_uint(0)):
        return f"mbind to node {node}: {os.strerror(ctypes.get_errno())}"
    return ""
