"""``open_backend``: a ``Backend`` from a URI such as ``file:///var/cache/kvtier`` or ``s3://bucket/prefix?threads=16``.

Promises   a URI that cannot work is a ``ConfigError`` that says what is accepted, before anything is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown
from kvtier.remote.backends.contract import Backend
from kvtier.remote.backends.folder import PRIVATE
from kvtier.remote.backends.mooncake_library import MooncakeOptions, import_library
from kvtier.remote.backends.threads import reason_of

if TYPE_CHECKING:
    from obstore.store import MemoryStore, ObjectStore

ACCEPTED = (
    "file:///directory, memory://, memory://name, s3://bucket/prefix, gs://bucket/prefix, "
    "az://container/prefix or mooncake://host:port"
)
DIGESTS = ("none", "blake2b")
PATIENCE = 0.5
"""See ``RemoteURI.patience``."""
_COMMON = ("threads", "timeout_s", "digest", "spill", "patience")
_OF = {"s3": ("endpoint", "region"), "file": ("mode",)}
_CLOUD = ("s3", "gs", "az")
_ENDPOINT = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[^?#\s]*)?", re.ASCII)
_MOST_THREADS = 256
_DEFAULTS = {"file": (4, 10.0), "memory": (4, 10.0), "mooncake": (1, 2.0)} | dict.fromkeys(_CLOUD, (16, 10.0))
"""Threads and seconds. Mooncake's own, which it is told only if the URI gives others."""

_memories: dict[str, MemoryStore] = {}


class SpillWhen(Enum):
    """When a text is due."""

    LANDING = "landing"
    """Spilled as soon as it is offered. Spilling begins once its copies are in the host."""
    EVICTION = "eviction"
    """Spilled once it is among the colder half of the host's content, and the host is nearly full."""


@dataclass(frozen=True)
class RemoteURI:
    """The parts of a backend's URI."""

    scheme: str
    host: str
    port: int | None
    path: str
    threads: int
    timeout_s: float
    digest: str
    """"blake2b" if objects have a digest that only holders of the secret can make, else "none"."""
    spill: SpillWhen
    patience: float
    """The share of its estimated prefill that a request waits for the backend's answers."""
    mode: int
    """Rights of files in a directory."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of one kind of backend."""


def parse_uri(uri: str) -> RemoteURI:
    """Raises ``ConfigError``."""
    try:
        parts = urlsplit(uri)
        port = parts.port
    except (ValueError, AttributeError, TypeError) as problem:
        raise ConfigError(f"{shown(uri)} is no URI of a remote tier: {problem}; use {ACCEPTED}") from None
    if parts.scheme not in _OPENERS:
        raise ConfigError(f"{shown(uri)} is no URI of a remote tier; use {ACCEPTED}")
    if parts.username or parts.password:
        raise ConfigError("a backend's URI holds no credentials; give them to the process as its environment")
    if parts.fragment:
        raise ConfigError(f"{shown(uri)}: '#' has no meaning in a backend's URI")
    options = _options(uri, parts.query)
    if "@" in options.get("endpoint", ""):
        raise ConfigError("a backend's endpoint holds no credentials; give them to the process as its environment")
    digest, spill = options.pop("digest", "none"), options.pop("spill", SpillWhen.LANDING.value)
    if digest not in DIGESTS:
        raise ConfigError(f"digest={digest} is none of {', '.join(DIGESTS)}")
    if spill not in {when.value for when in SpillWhen}:
        raise ConfigError(f"spill={spill} is none of {', '.join(when.value for when in SpillWhen)}")
    patience = _number(options, "patience", PATIENCE, 0.0, 10.0)
    given = dict(options)
    threads, timeout_s = _DEFAULTS[parts.scheme]
    found = RemoteURI(
        parts.scheme,
        parts.hostname or "",
        port,
        unquote(parts.path),
        int(_number(options, "threads", threads, 1, _MOST_THREADS)),
        _number(options, "timeout_s", timeout_s, 0.01, 3600),
        digest,
        SpillWhen(spill),
        patience,
        _mode(options.pop("mode", f"{PRIVATE:04o}")) if parts.scheme == "file" else PRIVATE,
        given if parts.scheme == "mooncake" else options,
    )
    _check_place(uri, found)
    if found.scheme == "mooncake":
        MooncakeOptions.read(found.options)
    return found


def check_packages(uri: RemoteURI) -> None:
    """Raises ``ConfigError`` if a package is missing that the backend needs."""
    if uri.scheme == "mooncake":
        import_library()
    elif uri.scheme != "file":
        from kvtier.remote.backends.object_store import load_obstore

        load_obstore()


def open_backend(uri: str | RemoteURI) -> Backend:
    """The backend that a URI names. Raises ``ConfigError``, also for a package that is not installed."""
    parsed = parse_uri(uri) if isinstance(uri, str) else uri
    return _OPENERS[parsed.scheme](parsed)


def _options(uri: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError(f"{shown(uri)}: options are written as ?threads=8&timeout_s=5") from None
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"{shown(uri)} gives an option twice")
    scheme = uri.partition(":")[0].lower()
    known = _COMMON + _OF.get(scheme, ())
    unknown = [name for name in options if name not in known]
    if unknown and scheme != "mooncake":  # which knows its own
        raise ConfigError(f"unknown option {unknown[0]!r}; {scheme}:// takes {', '.join(known)}")
    return options


def _number(options: dict[str, str], name: str, default: float, least: float, most: float) -> float:
    text = options.pop(name, None)
    if text is None:
        return default
    is_number = re.fullmatch(r"\d+" if name == "threads" else r"\d+(\.\d+)?", text)
    if not is_number or not least <= float(text) <= most:
        raise ConfigError(f"{name}={text} is not a number from {least:g} to {most:g}")
    return float(text)


def _mode(text: str) -> int:
    if not re.fullmatch("0?6[046][046]", text):
        raise ConfigError(f"mode={text} is not the rights of files that their owner reads and writes, such as 0660")
    return int(text, 8)


def _check_place(uri: str, found: RemoteURI) -> None:
    if found.port is not None and found.scheme != "mooncake":
        raise ConfigError(f"{shown(uri)} has a port; only mooncake:// takes one")
    if found.scheme == "file" and (found.host or not found.path.startswith("/")):
        raise ConfigError(
            f"{shown(uri)}: a directory is written with three slashes and its whole path, file:///directory"
        )
    if found.scheme == "file" and "\0" in found.path:
        raise ConfigError(f"{shown(uri)}: a directory's path has no NUL")
    if found.scheme == "memory" and found.path not in ("", "/"):
        raise ConfigError(f"{shown(uri)}: a memory has a name and no path, memory://name")
    if found.scheme in _CLOUD and not found.host:
        raise ConfigError(f"{shown(uri)} names no bucket or container; use {ACCEPTED}")
    endpoint = found.options.get("endpoint")
    if found.scheme == "s3" and endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"endpoint={endpoint} is no address; it is written http://host:port or https://host:port")
    if found.scheme == "mooncake" and (not found.host or found.port is None or found.path not in ("", "/")):
        raise ConfigError(f"{shown(uri)}: Mooncake's master is written mooncake://host:port")


def _open_directory(uri: RemoteURI) -> Backend:
    from kvtier.remote.backends.directory import DirectoryBackend

    return DirectoryBackend(Path(uri.path), uri.threads, uri.mode)


def _open_memory(uri: RemoteURI) -> Backend:
    from kvtier.remote.backends.object_store import ObjectBackend, load_obstore

    load_obstore()
    from obstore.store import MemoryStore

    backend = _memories.setdefault(uri.host, MemoryStore()) if uri.host else MemoryStore()
    return ObjectBackend(backend, "memory", uri.threads)


def _open_cloud(uri: RemoteURI) -> Backend:
    from kvtier.remote.backends.object_store import ObjectBackend, check_bucket

    backend = bucket(uri)
    check_bucket(backend, f"{uri.scheme}://{uri.host}{uri.path}")
    return ObjectBackend(backend, uri.scheme, uri.threads)


def bucket(uri: RemoteURI) -> ObjectStore:
    """obstore's store for a bucket. Raises ``ConfigError``."""
    from kvtier.remote.backends.object_store import http_options, load_obstore

    load_obstore()
    from obstore.store import from_url

    arguments: dict[str, Any] = http_options(uri.timeout_s)
    arguments |= uri.options
    if uri.scheme == "s3" and not uri.options.get("endpoint", "").startswith("https://"):
        arguments["client_options"]["allow_http"] = True  # as the environment may say; AWS itself is asked by https
    try:
        return from_url(f"{uri.scheme}://{uri.host}{uri.path}", **arguments)
    except Exception as problem:
        raise ConfigError(f"{uri.scheme}://{uri.host}{uri.path} cannot be opened: {reason_of(problem)}") from problem


def _open_mooncake(uri: RemoteURI) -> Backend:
    MooncakeBackend = import_module("kvtier.remote.backends.mooncake").MooncakeBackend  # noqa: N806
    assert uri.port is not None
    backend: Backend = MooncakeBackend(uri.host, uri.port, uri.options)
    return backend


_OPENERS: dict[str, Callable[[RemoteURI], Backend]] = {
    "file": _open_directory,
    "memory": _open_memory,
    "s3": _open_cloud,
    "gs": _open_cloud,
    "az": _open_cloud,
    "mooncake": _open_mooncake,
}
