"""Server-sent events out of bytes, however they were cut.

Promises   lines may end with CR, LF or both; comments and other fields are passed over; data of several lines is
           joined.
"""

from __future__ import annotations

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class EventReader:
    """Feed it what has come; it yields the data of each event that is whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._is_first = True

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of events that ``received`` has completed."""
        rest = self._rest + received
        if self._is_first:
            if _BOM.startswith(rest[:3]) and len(rest) < 3:
                self._rest = rest
                return
            rest = rest.removeprefix(_BOM)
            self._is_first = False
        if b"\r" in rest:
            held = rest.endswith(b"\r")  # its LF may be on the way
            rest = (rest[:-1] if held else rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *lines, self._rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()

    @property
    def is_between_events(self) -> bool:
        """Whether nothing of a further event has come."""
        return not self._rest.strip() and not self._data
