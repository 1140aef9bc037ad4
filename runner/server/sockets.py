"""The socket that a server listens on, and how many a process may have."""

from __future__ import annotations

import resource
import socket

_OTHER_FILES = 512


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, so that it is known to be free before weights are read.

    Raises ``OSError``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def raise_file_limit(connections: int) -> None:
    """Lets this process have as many files open as ``connections`` take, as far as it may.

    They take twice their number: as many again may be accepted before the first of them can be closed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
