"""``kvtier doctor``: what is installed, what is missing, and whether a small cache works. It needs no other package."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, what is missing, and whether a small cache works here",
        description="Looks at kvtier and the packages that it uses, the GPU, whether CuPy's CUDA fits torch's, the "
        "compiled loops, and the memory that an engine would take by default; then a small cache serves a prompt twice "
        "on the CPU and is audited. Nothing is installed, compiled or written. For a bug report, add its output.",
        epilog="Status 0: all that is here works; an extra that is not there is no fault. 1: something does not work.",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON and nothing else")
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    from runner.commands.installation import examine

    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0 if found["ok"] else 1


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"kvtier {found['packages']['kvtier']}, Python {found['python']}, {found['platform']}"
    yield "\npackages"
    for name, version in found["packages"].items():
        cuda = ""
        if name == "torch" and "torch_cuda" in found:
            cuda = f", for CUDA {found['torch_cuda']}" if found["torch_cuda"] else ", without CUDA"
        yield f"  {name:<14}{version or 'not installed'}{cuda if version else ''}"
    if found["engine_lacks"]:
        extra = "kvtier[engine]" if "engine" in found["extras"] else "kvtier"
        yield f"  the engine needs {', '.join(found['engine_lacks'])}: pip install '{extra}'"
    yield "\nextras"
    for name, extra in found["extras"].items():
        missing = f"lacks {', '.join(extra['missing'])}: pip install 'kvtier[{name}]'"
        yield f"  {name:<14}{missing if extra['missing'] else 'installed'}"
    if not found["extras"]:
        yield "  not known: kvtier is on the path, but not installed"
    if "gpu" in found:
        yield ""
        yield from _machine(found)
    yield ""
    yield from found["problems"] or ["All is well."]


def _machine(found: dict[str, Any]) -> Iterator[str]:
    from runner.display.units import size

    for one in found["gpu"]["devices"]:
        tier = "can have a host tier" if found["gpu"]["host_tier"] else "can have no host tier"
        yield f"GPU: {one['name']}, {size(one['bytes'])}, driver for CUDA {found['gpu']['driver_cuda']}; {tier}"
    if not found["gpu"]["devices"]:
        yield f"GPU: none ({found['gpu']['why_none']})"
    loops, memory, smoke = found["loops"], found["memory"], found["smoke"]
    state = "all compiled" if loops["kept"] else "not all compiled yet"
    yield f"compiled loops: {size(loops['bytes'])} in {loops['folder'] or 'no folder'}, {state}"
    if "unknown" in memory:
        yield f"memory that an engine takes by default: not known ({memory['unknown']})"
    else:
        device, host = size(memory["device_bytes"]), size(memory["host_bytes"])
        yield f"memory that an engine takes by default: {device} on {memory['device']}, {host} for the host tier"
    if "skipped" in smoke:
        yield f"a small cache on the CPU: not tried, since {smoke['skipped']}"
    else:
        yield (
            f"a small cache on the CPU: {smoke['hit_tokens']} tokens of a prompt were found when it came again "
            f"({smoke['seconds']:.1f} s)"
        )
