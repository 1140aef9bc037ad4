"""Mooncake's library: its options, its environment, how it is imported and connected, and its codes in words.

The library reads its time limits from the environment, when it connects and at each transfer. Their defaults are 30
seconds, so ``connect`` sets them for this process. What the user has set stays.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtier.machine.errors import ConfigError
from kvtier.remote.backends.contract import DAMAGED, Outcome

PACKAGE = "mooncake-transfer-engine-non-cuda"
LANES = 16
"""Connections to one storage process, the most that the library takes: a dead one holds up so many pieces at a time."""
LOCAL_BUFFER_BYTES = 16 << 20
"""The library's own scratch memory: for objects that it reads from a shared file system."""

NO_ANSWER = "did not answer in time"
CODES = {
    -1: (Outcome.FAILED, "an error inside Mooncake"),
    -10: (Outcome.FAILED, "a buffer is too small"),
    -101: (Outcome.REFUSED, "no storage process has memory for it"),
    -103: (Outcome.FAILED, "the master does not know this client"),
    -200: (Outcome.REFUSED, "no room: the memory is full, or no storage process is there"),
    -400: (Outcome.FAILED, "Mooncake does not take this name"),
    -500: (Outcome.FAILED, "the bytes could not be written"),
    -600: (Outcome.FAILED, "Mooncake does not take these arguments, or the object is longer than asked for"),
    -601: (Outcome.FAILED, "another client stores this object"),
    -700: (Outcome.FAILED, "the object cannot be written now"),
    -701: (Outcome.FAILED, "the object cannot be read now"),
    -702: (Outcome.FAILED, "no copy of the object can be read"),
    -703: (Outcome.MISS, "the object is still being stored"),
    -704: (Outcome.MISS, "there is no such object"),
    -705: (Outcome.OK, "the object is there already"),
    -706: (Outcome.FAILED, "somebody reads the object"),
    -707: (Outcome.FAILED, "reading took longer than the master's lease"),
    -710: (Outcome.MISS, "no copy of the object is left"),
    -712: (Outcome.MISS, "the copy of the object is gone"),
    -714: (Outcome.FAILED, "somebody reads the object"),
    -800: (Outcome.FAILED, f"a storage process failed or {NO_ANSWER}, or the object is shorter than asked for"),
    -801: (Outcome.FAILED, f"{DAMAGED}: its bytes do not have Mooncake's checksum"),
    -900: (Outcome.FAILED, "the master cannot be reached"),
    -901: (Outcome.FAILED, f"the master or a storage process {NO_ANSWER}"),
    -1010: (Outcome.FAILED, "the master does not serve now"),
    -1102: (Outcome.FAILED, "a storage process could not read its disk"),
    -1203: (Outcome.REFUSED, "a storage process has as many objects as it takes"),
    -1602: (Outcome.REFUSED, "the shared file system's quota is used up"),
    -1603: (Outcome.REFUSED, "the shared file system does not let us write"),
    -1700: (Outcome.REFUSED, "the tenant's quota is used up"),
    -1701: (Outcome.REFUSED, "the master does not know this tenant"),
}
OTHER_LENGTH = (-600, -800)
"""Codes of reading an object that is longer, or shorter, than asked for; and of other things."""


def meaning(code: int) -> tuple[Outcome, str]:
    """The outcome of one object, and why: "" if it needs no reason. ``code``: 0 or more if it went well."""
    if code >= 0:
        return Outcome.OK, ""
    outcome, words = CODES.get(code, (Outcome.FAILED, "it failed"))
    return outcome, f"{words} (Mooncake: {code})" if outcome in (Outcome.FAILED, Outcome.REFUSED) else ""


@dataclass(frozen=True)
class MooncakeOptions:
    """Options that a backend's address may have after its "?"."""

    protocol: str = "tcp"
    """"tcp", "rdma", or another that the installed wheel can do."""
    devices: str = ""
    """Network devices of "rdma", with commas: "mlx5_0,mlx5_1"."""
    local_hostname: str = ""
    """The name or address by which storage processes reach this one; by default the address that reaches the master."""
    metadata_server: str = "P2PHANDSHAKE"
    """Where the transfer engines find each other: by default, they ask each other."""
    replica_num: int = 1
    """Copies of each object, on different storage processes if there are so many."""
    threads: int = 1
    """Batches that move at the same time. Looks do not wait for them."""
    timeout_s: float = 2.0
    """A master or a storage process that is silent for so long counts as dead."""
    tenant: str = "default"

    @classmethod
    def read(cls, options: Mapping[str, str]) -> MooncakeOptions:
        """Raises ``ConfigError`` for an unknown name or a bad value."""
        known = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in known:
                raise ConfigError(f"mooncake: no option {name!r}; there are {', '.join(known)}")
            values[name] = text if known[name] == "str" else _number(name, text, known[name] == "int")
        return cls(**values)


def _number(name: str, text: str, is_whole: bool) -> float:
    if not re.fullmatch(r"[0-9]+" if is_whole else r"[0-9]+(\.[0-9]+)?", text) or not 0 < float(text) <= 600:
        raise ConfigError(f"mooncake: {name} is {text!r}; it can be a {'whole ' if is_whole else ''}number up to 600")
    return int(text) if is_whole else float(text)


def import_library() -> Any:
    """The module ``mooncake.store``. Raises ``ConfigError`` with the command that installs what is missing."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as problem:
        if not (problem.name or "").startswith("mooncake"):
            raise ConfigError(f"mooncake needs a package: pip install {problem.name}") from problem
        raise ConfigError(
            "mooncake: the package is missing: pip install 'kvtier[mooncake]' "
            f"({PACKAGE}; on CUDA machines mooncake-transfer-engine or mooncake-transfer-engine-cuda13 instead)"
        ) from problem
    except ImportError as problem:
        said = str(problem)
        library = said.partition(":")[0] if ".so" in said.partition(":")[0] else ""
        known = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}
        fix = f": apt install {known[library]} (Debian, Ubuntu)" if library in known else ""
        raise ConfigError(f"mooncake: the package is there, but cannot be loaded{fix}: {said}") from problem


LIMITS = {
    "MC_RPC_TIMEOUT_MS": 1000,
    "MC_RPC_CONNECT_TIMEOUT_MS": 1000,
    "MC_TCP_STATUS_TIMEOUT_SEC": 1,
    "MC_TCP_PROGRESS_TIMEOUT_SEC": 1,
    "MC_HANDSHAKE_CONNECT_TIMEOUT": 1,
}
"""Time limits in the environment, and their units in a second."""
_set_here: dict[str, str] = {}


def set_environment(timeout_s: float) -> None:
    """Time limits, and fewer words, unless the user has set them."""
    wanted = {name: str(math.ceil(timeout_s * unit)) for name, unit in LIMITS.items()} | {
        "MC_TCP_LANES_PER_PEER": str(LANES),
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
        "MC_LOG_LEVEL": "ERROR",  # on standard error; it does not go higher
    }
    for name, value in wanted.items():
        if os.environ.get(name) == _set_here.get(name):
            os.environ[name] = _set_here[name] = value


def seconds_in_force() -> float:
    """The longest of the limits; a value that is no number counts as the library's default, 30 s."""
    values = [(os.environ.get(name, ""), unit) for name, unit in LIMITS.items()]
    return max(int(value) / unit if value.isascii() and value.isdigit() else 30.0 for value, unit in values)


def connect(library: Any, host: str, port: int, options: MooncakeOptions) -> Any:
    """A client that owns no memory of the backend. Raises ``ConfigError`` if there is no master."""
    set_environment(options.timeout_s)
    try:
        with socket.create_connection((host, port), timeout=options.timeout_s) as link:
            ours = link.getsockname()[0]
    except OSError as problem:
        raise ConfigError(f"mooncake: no master at {host}:{port}: {problem}") from problem
    client = library.MooncakeDistributedStore()
    code = client.setup(
        local_hostname=options.local_hostname or ours,
        metadata_server=options.metadata_server,
        global_segment_size=0,
        local_buffer_size=LOCAL_BUFFER_BYTES,
        protocol=options.protocol,
        rdma_devices=options.devices,
        master_server_addr=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        tenant_id=options.tenant,
    )
    if code != 0:
        client.close()
        raise ConfigError(
            f"mooncake: no connection to the master at {host}:{port} by {options.protocol!r} (code {code}); "
            "MC_LOG_LEVEL=INFO in the environment shows the library's own words"
        )
    return client
