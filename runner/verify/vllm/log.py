"""Why an engine did not start: the first exception in its processes' log."""

from __future__ import annotations

import re

_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^(\(\w+[^)]*\) )?((ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]+\] ?)?")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")
_MOST = 600
"""Characters of a reason."""


def reason_in(log: str) -> str | None:
    """ "Name: message" of the exception that the first traceback ends with; None if there is no traceback."""
    lines = [_PREFIX.sub("", line, count=1) for line in log.splitlines()]
    if _TRACEBACK not in [line.strip() for line in lines]:
        return None
    start = next(i for i, line in enumerate(lines) if line.strip() == _TRACEBACK)
    for i, line in enumerate(lines[start + 1 :], start + 1):
        if _RAISED.match(line):
            more = []
            for following in lines[i + 1 :]:  # a message of several lines, such as pydantic's, is indented
                if not following.startswith("  ") or following.strip() == _TRACEBACK:
                    break
                more.append(following.strip())
            return " ".join([line.split(".")[-1] if ": " not in line else _short(line), *more])[:_MOST]
    return None


def _short(line: str) -> str:
    name, message = line.split(": ", 1)
    return f"{name.split('.')[-1]}: {message}"
