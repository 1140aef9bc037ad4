"""API keys, what their holders may see and do, and request ids.

Owns       which key a request came with.
Promises   keys are compared in constant time, and never told on: what has to tell holders apart is a keyed digest.
           Holders of different keys see nothing of each other's requests; the holder of an admin key sees all.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.server import logs
from runner.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/"})
OPEN_FOLDER = "/page/"
"""Files of the page, which are the same on every server."""
_OWN = secrets.token_bytes(16)
_NAME = re.compile(r"[!-~]{1,128}")
_SALT = b"kvtier cache_salt\0"


@dataclass(frozen=True)
class Caller:
    """The one whose request it is.

    ``owner``: tells the holder of one of several keys from the holders of others; "" if there is one key at most.
    """

    owner: str = ""
    is_admin: bool = False
    key: bytes = field(default=b"", repr=False)

    @property
    def sees(self) -> str | None:
        """The owner whose requests the caller may see; None: everybody's."""
        return None if self.is_admin else self.owner

    def salt(self, asked: str | None) -> str:
        """The salt ``asked`` for, as this key's own: the same for each server with the key, another for other keys."""
        return hmac.digest(self.key, _SALT + (asked or "").encode(), "sha256").hex()


class Keys:
    """The keys of a server. Without API keys it is open; ``admin_keys`` open it as well, and may do all."""

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        several = len(api_keys) > 1
        callers = [Caller(_owner(key) if several else "", key=key.encode()) for key in api_keys]
        callers += [Caller(_owner(key), is_admin=True, key=key.encode()) for key in admin_keys]
        self._callers = callers
        self.are_needed = bool(api_keys)
        self._has_admin = bool(admin_keys)
        self._are_several = several

    def caller(self, headers: Headers) -> Caller | None:
        """The one who asks; None without a key where one is needed."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as it came: headers are bytes
        found = None if self.are_needed else Caller()
        for caller in self._callers:  # all of them, whichever it is
            is_same = hmac.compare_digest(given, caller.key)
            if is_same and scheme.lower() == "bearer":
                found = caller
        return found

    def check_reset(self, caller: Caller) -> None:
        """Raises ``ApiError`` 403 for one who may not empty the cache, which all share."""
        if caller.is_admin or not (self._has_admin or self._are_several):
            return
        way = "an admin key" if self._has_admin else "an admin key, and this server has none: start it with one"
        told = f"the cache is everybody's; to empty it takes {way} (--admin-api-key)"
        raise ApiError(403, told, code="admin_key_needed")


def _owner(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16, key=_OWN).hexdigest()


class ApiKeys:
    """Refuses, with 401, requests without one of the keys. The app finds the caller in the request's state."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._keys.caller(Headers(scope=scope))
            if caller is None and not is_open(scope["path"]):
                problem = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
                await JSONResponse(problem.body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self.app(scope, receive, send)


def is_open(path: str) -> bool:
    """Whether a path tells nothing that is not the same on every server, but for how this one is."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class RequestIds:
    """Gives each request an id: the client's ``X-Request-Id``, or a new one. Answers carry it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _NAME.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        logs.serve(name)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("X-Request-Id", name)
            await send(message)

        await self.app(scope, receive, named)
