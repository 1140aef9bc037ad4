"""What a command line says wrongly, told before torch, transformers and numba are imported.

Promises   the rules are the engine's own, from modules that import none of these. Raises ``KVTierError``.
Does not   know a model's config or the free memory: the engine checks those before it reads weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SIZES = ("device_memory", "host_memory", "remote")


def check_engine(args: argparse.Namespace, *, config_alone: bool = False) -> None:
    """Checks those of an engine's options that there are. ``config_alone``: a model without weights will do."""
    from kvtier.attention.names import check_name
    from kvtier.cache.kv_events.config import KVEventsConfig
    from kvtier.geometry.sizing import parse_bytes
    from runner.model import place
    from runner.model.device import check_device_name
    from runner.model.kv_scales import check_kv_text

    for name in _SIZES:
        if getattr(args, name, None) is not None:
            parse_bytes(getattr(args, name), f"--{name.replace('_', '-')}")
    _given(args, "model", place.check_config if config_alone else place.check)
    _given(args, "dtype", _kv_dtype if config_alone else place.weights_dtype_name)
    _given(args, "device", lambda name: None if name == "auto" else check_device_name(name))
    _given(args, "attention", check_name)
    check_kv_text(getattr(args, "kv_cache_dtype", None), getattr(args, "kv_scales", None))
    _given(args, "kv_events_config", KVEventsConfig.read)


def _given(args: argparse.Namespace, name: str, check: Callable[[Any], object]) -> None:
    value = getattr(args, name, None)
    if value is not None:
        check(value)


def _kv_dtype(name: str) -> None:
    from kvtier.geometry.dtypes import dtype_name

    dtype_name(name, "--dtype")


def read_file(option: str, path: str) -> bytes:
    """The file's bytes. Raises ``ConfigError``, with the option's name."""
    from kvtier.machine.errors import ConfigError

    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{option} {path}: {getattr(problem, 'strerror', None) or problem}") from problem


def check_file(option: str, path: str) -> None:
    """Raises ``ConfigError`` for a file that cannot be opened; it may be a large one."""
    from kvtier.machine.errors import ConfigError

    try:
        with Path(path).expanduser().open("rb"):
            pass
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{option} {path}: {getattr(problem, 'strerror', None) or problem}") from problem


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raises ``ConfigError`` for files that HTTPS cannot be served with."""
    import ssl

    from kvtier.machine.errors import ConfigError

    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile is for a certificate: give --ssl-certfile as well")
        return
    check_file("--ssl-certfile", certificate)
    if key is not None:
        check_file("--ssl-keyfile", key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: "")
    except (OSError, ValueError) as problem:
        pair = certificate if key is None else f"{certificate} with --ssl-keyfile {key}"
        raise ConfigError(f"--ssl-certfile {pair} cannot be used: {problem}") from problem
