"""Options of ``kvtier serve`` that say who may call the server, and what for.

Promises   what cannot be meant is a ``ConfigError``, before any weights are read.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

KEY_VARIABLE = "KVTIER_API_KEY"
ADMIN_VARIABLE = "KVTIER_ADMIN_API_KEY"


def add_to(http: Any) -> None:
    """Adds them to a parser, or to a group of its arguments."""
    http.add_argument(
        "--api-key",
        nargs="+",
        help=f"open the server only to requests with one of these keys; {KEY_VARIABLE} may hold them too, with commas "
        "between, where other users of this machine do not see them",
    )
    http.add_argument(
        "--admin-api-key",
        nargs="+",
        help=f"keys that may do more: empty the cache, and see everybody's requests; or {ADMIN_VARIABLE}. Without one, "
        "nobody may empty a cache that several keys share",
    )
    http.add_argument("--salt-by-api-key", action="store_true", help="holders of different keys share no cached "
                      "blocks, and so cannot tell what others have asked")  # fmt: skip
    http.add_argument(
        "--allowed-hosts",
        nargs="+",
        help='names that the server may be called by, beside addresses and localhost; "*" is all of them (default: all '
        "if it asks for keys; else what --host says, and, unless that is this machine alone, names that nobody can "
        "register)",
    )
    http.add_argument("--allowed-origins", nargs="+", help='web pages that may call from a browser; "*" is all of them')


def read(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``Settings`` that they are. Raises ``ConfigError``."""
    from kvtier.cache.kv_events.config import KVEventsConfig
    from kvtier.machine.errors import ConfigError

    keys = _keys(args, "api_key", KEY_VARIABLE)
    found = {
        "api_keys": keys,
        "admin_api_keys": _keys(args, "admin_api_key", ADMIN_VARIABLE),
        "salt_by_api_key": hasattr(args, "salt_by_api_key"),
        "host": args.host,
        "allowed_hosts": _list(args, "allowed_hosts"),
        "allowed_origins": _list(args, "allowed_origins"),
    }
    if set(keys) & set(found["admin_api_keys"]):
        raise ConfigError("a key is both --api-key and --admin-api-key; give each holder one of its own")
    if found["salt_by_api_key"]:
        if not keys:
            raise ConfigError("--salt-by-api-key needs keys: give --api-key as well")
        if hasattr(args, "kv_events_config") and KVEventsConfig.read(args.kv_events_config).is_on:
            raise ConfigError("--salt-by-api-key leaves nothing to tell routers, since salted prompts are never told; "
                              "leave out --kv-events-config")  # fmt: skip
    return found


def _keys(args: argparse.Namespace, name: str, variable: str) -> tuple[str, ...]:
    from kvtier.machine.errors import ConfigError

    keys = [*getattr(args, name, []), *os.environ.get(variable, "").split(",")]
    kept = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if hasattr(args, name) and not kept:
        raise ConfigError(f"--{name.replace('_', '-')} is empty, which would leave the server open")
    return kept


def _list(args: argparse.Namespace, name: str) -> tuple[str, ...]:
    """Values one by one, or as the JSON list that vLLM takes."""
    given: Sequence[str] = getattr(args, name, [])
    if len(given) == 1 and given[0].startswith("[") and '"' in given[0]:
        try:
            given = [str(one) for one in json.loads(given[0])]
        except ValueError as problem:
            from kvtier.machine.errors import ConfigError

            raise ConfigError(f"--{name.replace('_', '-')} is no JSON list: {problem}") from problem
    return tuple(given)
