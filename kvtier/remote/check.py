"""``check_remote``: whether a cache with these options can have a remote.

Promises   faults of the URI and its options, and a missing package, raise ``ConfigError`` here. Nothing is opened, so a
           caller can check before it loads a model.
Does not   ask the remote: ``open_backend`` does.
"""

from __future__ import annotations

from kvtier.geometry.options import STORE_MODES
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown
from kvtier.remote.backends.contract import PROTOCOL
from kvtier.remote.backends.uri import check_packages, parse_uri


def check_remote(
    uri: object, has_host: bool, device: str, model_id: str, key_secret: bytes | None, store: str = "eager"
) -> None:
    """Raises ``ConfigError`` for a remote that cannot be opened, or that these options give no names or no room."""
    if not has_host or device == "meta":
        raise ConfigError("remote_uri needs a host tier with memory: blocks come from the remote tier into it")
    mode = STORE_MODES[store]
    if not (mode.feeds_remote or mode.only_reads):
        raise ConfigError(
            f"store={store!r} brings texts to the host too late for remote_uri, or not whole; use 'eager'"
        )
    if not model_id or key_secret is None:
        raise ConfigError(
            "remote_uri needs model_id and key_secret: they name the blocks; random names would never be found again"
        )
    check_uri(uri)


def check_uri(uri: object) -> None:
    """Raises ``ConfigError`` for what is neither the URI of a remote nor a ``Backend``."""
    if isinstance(uri, str) and "://" in uri:
        check_packages(parse_uri(uri))
    elif isinstance(uri, (str, type)) or not all(callable(getattr(uri, name, None)) for name in PROTOCOL):
        raise ConfigError(
            "remote_uri must be such as file:///var/kv, s3://bucket or mooncake://host:port, or a Backend, got "
            f"{shown(uri)}"
        )
