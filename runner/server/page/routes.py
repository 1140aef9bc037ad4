"""``/``, its files under ``/page/``, and ``/watch``.

Promises   the page is static and holds no data, so that it needs no key. ``/watch`` needs one if the server asks for
           keys, and names requests to their owners alone. A policy lets the page load nothing from elsewhere, and run
           no script that is not a file of its own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runner.server.errors import ApiError
from runner.server.page.sampler import Listener, Sampler
from runner.server.page.snapshot import Snapshots

STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Adds the routes, unless the settings say that there is no page."""
    served = app.state.served
    if not served.settings.page:
        return
    sampler = app.state.sampler = Sampler(Snapshots(served, served.finished))
    files = {path.name: _File(path) for path in STATIC.iterdir() if path.suffix in _TYPES}

    async def page(request: Request) -> Response:
        return files["index.html"].respond(request)

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise ApiError(404, "the page has no such file")
        return found.respond(request)

    async def watch(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=Watching.media_type)
        return Watching(sampler, request.state.caller.sees)

    for path, handler in (("/", page), ("/page/{name}", file), ("/watch", watch)):
        app.router.add_route(path, handler, ["GET"], include_in_schema=False)  # not for clients; a stream has no end


class Watching(StreamingResponse):
    """A stream of events without end, for ``owner``; it leaves the sampler with its reader. Raises as
    ``Sampler.listen``."""

    media_type = "text/event-stream"

    def __init__(self, sampler: Sampler, owner: str | None) -> None:
        self._listener: Listener = sampler.listen(owner)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(sampler.events(self._listener), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._listener.close()


class _File:
    """A file of the page, read once."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        etag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
        self._headers = {**_HEADERS, "ETag": etag, "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8"}

    def respond(self, request: Request) -> Response:
        """The file, or 304 to a browser that has it."""
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
