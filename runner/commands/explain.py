"""``kvtier explain``: why a request of a running server took as long as it did."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from runner.commands.access_arguments import KEY_VARIABLE


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    explain = commands.add_parser(
        "explain",
        help="tell where the time of a served request went",
        description="Asks a running `kvtier serve` about one of its requests: which group limited its hit and at which "
        "token, what was loaded, what computing it would have cost, each wait and preemption, and what it pushed out.",
        epilog="Status 0 if the request is known, 2 if not, or if the server does not answer.",
    )
    explain.add_argument("request_id", help='the "id" of its answer, or the X-Request-Id that it was sent with')
    explain.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    explain.add_argument("--api-key", help=f"if the server asks for one; {KEY_VARIABLE} may hold it too")
    explain.add_argument("--json", action="store_true", help="all that is known, as JSON")
    explain.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    key = args.api_key or os.environ.get(KEY_VARIABLE, "").split(",")[0].strip()
    try:
        found = _ask(args.url, args.request_id, key)
    except _Refused as problem:
        print(f"kvtier: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if args.json else found["text"])
    return 0


class _Refused(Exception):
    """The server gave no explanation."""


def _ask(url: str, request_id: str, key: str) -> dict[str, Any]:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    if not url.startswith(("http://", "https://")):
        raise _Refused(f"--url must begin with http:// or https://, got {url!r}")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    place = f"{url.rstrip('/').removesuffix('/v1')}/v1/requests/{quote(request_id, safe='')}/explain"
    try:
        with urlopen(Request(place, headers=headers), timeout=30) as answer:
            found = json.load(answer)
            if not isinstance(found, dict) or not isinstance(found.get("text"), str):
                raise ValueError("this is no explanation; is the server kvtier's?")
            return found
    except HTTPError as problem:
        raise _Refused(_reason(problem.read(), problem.code)) from problem
    except (URLError, OSError, ValueError, HTTPException) as problem:
        raise _Refused(f"no explanation from {url}: {getattr(problem, 'reason', problem)}") from problem


def _reason(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}; is it kvtier's?"
