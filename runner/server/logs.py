"""The lines that ``kvtier serve`` logs: each has its time, and a request's lines have the name of its answer.

Owns       which request the running task serves.
Promises   a name is one printable word, whoever gave it: no client makes a line of its own.
"""

from __future__ import annotations

import logging
import logging.config
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

from uvicorn.config import LOGGING_CONFIG

_served: ContextVar[str] = ContextVar("kvtier_request", default="")


def serve(name: str) -> None:
    """This task serves the request ``name`` from here on, and so do the tasks that it starts."""
    _served.set(name)


def options() -> dict[str, Any]:
    """Options for ``logging.config.dictConfig``: uvicorn's way of logging, for our own lines as well."""
    config = deepcopy(LOGGING_CONFIG)
    config["filters"] = {"request": {"()": _Request}}
    for handler in config["handlers"].values():
        handler["filters"] = ["request"]
    for formatter in config["formatters"].values():
        formatter["fmt"] = formatter["fmt"].replace("%(levelprefix)s", "%(asctime)s %(levelprefix)s%(request)s")
    config["loggers"]["kvtier"] = {"handlers": ["default"], "level": "INFO", "propagate": True}
    return config


class _Request(logging.Filter):
    """Lets all lines pass, and names their request."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = _served.get()
        record.request = f" [{name}]" if name else ""
        return True
