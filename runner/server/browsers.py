"""What web pages may not do. A browser sends requests for whatever page its user looks at, to this machine as well.

Owns       by which names the server may be called (``Host``), and which pages may call it (``Origin``).
Promises   a page of a stranger reads nothing and changes nothing, even if its name was made to point here (DNS
           rebinding). Clients that are no browsers send no ``Origin``, and notice nothing.
Does not   ask who the user is: ``auth`` does.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from runner.server.auth import is_open
from runner.server.errors import ApiError
from runner.server.settings import Settings
from runner.server.sparing import Sparing

log = logging.getLogger("kvtier.server")

_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Types of bodies that pages may send anywhere without asking."""
_NOBODYS = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that cannot be registered."""
_LONGEST_NAME = 80


class Hosts:
    """The names that a server goes by.

    An address is a name that nobody can make point elsewhere, so all addresses are taken. So is every name if there are
    ``allowed`` ones with "*" among them, or if a key is asked for: a stranger's page has none. Of a server that the
    network reaches (``bound``), names are taken that nobody can register, such as a service's in its own network.
    """

    def __init__(self, allowed: Collection[str], bound: str, needs_key: bool) -> None:
        self._takes_all = "*" in allowed or (needs_key and not allowed)
        self._names = {_bare(name) for name in allowed}
        self._takes_private = False
        if not allowed:
            self._names.add(_bare(bound))
            self._takes_private = not _is_loopback(bound)
        if self._takes_private:
            self._names.add(socket.gethostname().lower())

    def takes(self, host: str) -> bool:
        """Whether a ``Host`` header, with a port or not, is one of them."""
        name = _bare(host)
        if self._takes_all or name in self._names or name == "localhost" or _is_address(name):
            return True
        if name.endswith(".localhost"):
            return True
        return self._takes_private and ("." not in name or name.endswith(_NOBODYS))


class Browsers:
    """Refuses what a stranger's page makes a browser send."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._hosts = Hosts(settings.allowed_hosts, settings.host, bool(settings.api_keys))
        self._origins = frozenset(settings.allowed_origins)
        self._host_news, self._page_news = Sparing(log), Sparing(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            problem = self._problem(scope["method"], Headers(scope=scope))
            if problem is not None:
                await JSONResponse(problem.body, problem.status_code)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _problem(self, method: str, headers: Headers) -> ApiError | None:
        strange = [host for host in headers.getlist("host") if host and not self._hosts.takes(host)]
        if strange:
            name = _bare(strange[0])[:_LONGEST_NAME]
            self._host_news.warning("a request for host %r was refused; --allowed-hosts lets names in", name)
            told = f"this server does not go by the name {name!r}; if it should, start it with --allowed-hosts {name!r}"
            return ApiError(403, told, code="host_not_allowed")
        if self._is_foreign(headers):
            origin = headers["origin"][:_LONGEST_NAME]
            self._page_news.warning("a request of the web page %r was refused; --allowed-origins lets pages in", origin)
            told = f"web pages of {origin!r} may not call this server; --allowed-origins lets them"
            return ApiError(403, told, code="origin_not_allowed")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind in _FORMS:
            return ApiError(400, "a body must be JSON, sent as application/json")
        return None

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a page that is neither the server's own nor an allowed one has asked."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return False
        site = headers.get("sec-fetch-site")  # no page can write it
        if site is not None:
            return site not in ("same-origin", "none")
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _bare(host: str) -> str:
    """Without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)
