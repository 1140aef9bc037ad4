"""What requests are called on the page, for one who may see some of them.

Promises   nobody learns a name that another holder's request has, neither the client's nor the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from runner.server.admission import Ticket


class Names:
    """Names of requests for one who may see those of ``owner``; None: all."""

    def __init__(self, tickets: Iterable[Ticket], owner: str | None) -> None:
        self._tickets = {engine: ticket for ticket in tickets if ticket.name for engine in ticket.engine_ids}
        self._owner = owner

    def shows(self, engine_id: str) -> bool:
        """Whether a request may be named."""
        ticket = self._tickets.get(_asked(engine_id)[0])
        return self._owner in ("" if ticket is None else ticket.owner, None)

    def row(self, engine_id: str) -> dict[str, Any]:
        """The id that its client knows, the engine's, and which of several answers it is."""
        asked, answer = _asked(engine_id)
        ticket = self._tickets.get(asked)
        return {"id": asked if ticket is None else ticket.name, "engine_id": engine_id, "answer": answer}

    def told(self, why: str) -> str:
        """A reason that may name another request as the engine does."""
        quoted = next(islice(why.split("'"), 1, 2), "")
        if not quoted:
            return why
        if self.shows(quoted):
            return why.replace(quoted, self.row(quoted)["id"])
        return why.replace(f"'{quoted}'", "of another caller")


def _asked(engine_id: str) -> tuple[str, int | None]:
    """What was asked of the engine, and which of several answers. It appends "#", a number of its own, and an answer's
    number behind "-"."""
    asked, _, number = engine_id.rpartition("#")
    own, _, answer = number.partition("-")
    if not asked or not own.isdigit():
        return engine_id, None
    return asked, int(answer) if answer else None
