"""A Mooncake Store on this machine's loopback: a master, storage processes, and what happens to them."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

HOST, PORT = "127.0.0.1", 50081
UP_S = 60.0
CLIENT_TTL_S = 2
LEASE_MS = 2000
"""A read that takes longer fails."""
SSD = {
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(1 << 30),
    "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(1 << 30),
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "4",
}
"""Small buckets: an object is on the disk once its bucket is full."""


def program(name: str) -> str:
    """A program of the wheel."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / name)


class Process:
    """A program that listens; its words are in a file."""

    def __init__(self, port: int, log: Path, command: list[str], environment: Mapping[str, str]) -> None:
        self.port = port
        self.log = log
        with log.open("ab") as words:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, env={**os.environ, **environment}
            )
        until = time.monotonic() + UP_S
        while True:
            assert self._process.poll() is None, f"{command[0]} ended:\n{log.read_text()[-2000:]}"
            try:
                socket.create_connection((HOST, port), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < until, f"{command[0]} does not listen"
                time.sleep(0.02)

    def cpu_s(self) -> float:
        """CPU seconds of it so far."""
        return time.clock_gettime((~self._process.pid << 3) | 2)  # /proc may be that of other processes

    def freeze(self) -> None:
        """It stops where it is, as on a machine that hangs."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It ends at once."""
        self._process.kill()
        self._process.wait()


class Cluster:
    """Processes by name; ``close`` ends them."""

    def __init__(
        self,
        folder: Path,
        *,
        offload: bool = False,
        lease_ms: int = LEASE_MS,
        client_ttl_s: int = CLIENT_TTL_S,
        metadata_port: int = 0,
    ) -> None:
        """``metadata_port``: there the master tells where storage processes are, which else ask each other."""
        self.folder = folder
        self.lease_ms = lease_ms
        self.client_ttl_s = client_ttl_s
        self.metadata_port = metadata_port
        self.offload = offload
        self.processes: dict[str, Process] = {}
        self.start_master()

    @property
    def master(self) -> Process:
        return self.processes["master"]

    @property
    def metadata_server(self) -> str:
        """As an option of clients."""
        return f"http://{HOST}:{self.metadata_port}/metadata" if self.metadata_port else "P2PHANDSHAKE"

    def start_master(self) -> Process:
        """Starts it, or starts it again."""
        flags = {
            "rpc_address": HOST,
            "rpc_port": PORT,
            "metrics_host": HOST,
            "metrics_port": 9105,
            "default_kv_lease_ttl": self.lease_ms,
            "client_ttl": self.client_ttl_s,
            "put_start_discard_timeout_sec": 2,
            "enable_offload": str(self.offload).lower(),
            "enable_http_metadata_server": str(bool(self.metadata_port)).lower(),
            "http_metadata_server_host": HOST,
            "http_metadata_server_port": self.metadata_port or 8080,
            "logtostderr": "true",
        }
        return self._start("master", PORT, "mooncake_master", flags, {})

    def start_storage(self, name: str = "storage", *, memory_mb: int = 64, ssd: Path | None = None) -> Process:
        """Starts one, or starts it again. ``ssd``: the folder that it keeps objects in."""
        names = [each for each in self.processes if each != "master"]
        port = self.processes[name].port if name in names else PORT + 1 + len(names)
        flags = {
            "master_server_address": f"{HOST}:{PORT}",
            "host": HOST,
            "port": port,
            "protocol": "tcp",
            "metadata_server": self.metadata_server,
            "global_segment_size": f"{memory_mb} MB",
            "enable_offload": str(ssd is not None).lower(),
            "logtostderr": "true",
        }
        environment = {} if ssd is None else SSD | {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(ssd)}
        return self._start(name, port, "mooncake_client", flags, environment)

    def _start(
        self, name: str, port: int, program_name: str, flags: Mapping[str, object], environment: Mapping[str, str]
    ) -> Process:
        command = [program(program_name), *(f"--{flag}={value}" for flag, value in flags.items())]
        self.processes[name] = Process(port, self.folder / f"{name}.log", command, environment)
        return self.processes[name]

    def close(self) -> None:
        """Ends all of them, frozen ones too."""
        for process in self.processes.values():
            process.kill()
