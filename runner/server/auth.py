"""API keys and request ids."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import uuid
from collections.abc import Sequence

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


class ApiKeys:
    """Refuses, with 401, requests without one of the keys, compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or self._knows(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        problem = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await JSONResponse(problem.body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as it came: headers are bytes
        same = [hmac.compare_digest(given, mine) for mine in self._keys]  # all of them, whichever it is
        return scheme.lower() == "bearer" and any(same)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def owner_of(headers: Headers, keys: Sequence[str]) -> str:
    """What tells the holder of one of several ``keys`` from the holders of others; "" if there is one key at most."""
    if len(keys) < 2:
        return ""
    key = headers.get("authorization", "").partition(" ")[2].strip()
    return hashlib.blake2b(key.encode("latin-1"), digest_size=16, key=_OWN).hexdigest()


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
