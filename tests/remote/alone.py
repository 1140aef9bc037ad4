"""Runs a command on a network of its own, of loopback only: Mooncake's processes listen on all addresses.

    python -m tests.remote.alone COMMAND...

The command and all that it starts end together. It needs Linux, `unshare`, and the right to make user namespaces.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
INSIDE = "--inside"
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


def is_alone() -> bool:
    """Whether this process sees loopback only."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def refusal() -> str:
    """Why no such network can be made here; "" if it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare; apt install util-linux"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    said = tried.stderr.strip()
    return "" if tried.returncode == 0 else f"no network namespace can be made ({said}): turn user namespaces on"


def raise_loopback() -> None:
    """A new network's loopback is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(link, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(link, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def command(*arguments: str) -> list[str]:
    """The command that runs ``arguments`` alone."""
    return [*UNSHARE, sys.executable, "-m", "tests.remote.alone", INSIDE, *arguments]


def main() -> int:
    """The command's exit status."""
    if sys.argv[1:2] != [INSIDE]:
        if not sys.argv[1:]:
            sys.exit(__doc__)
        if reason := refusal():
            sys.exit(f"these tests run on a network of their own, and {reason}")
        line = command(*sys.argv[1:])
        os.execvp(line[0], line)
    raise_loopback()
    return subprocess.run(sys.argv[2:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
