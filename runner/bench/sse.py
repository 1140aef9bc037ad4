"""Server-sent events out of bytes, however they were cut.

Promises   lines may end with CR, LF or both; comments and other fields are passed over; data of several lines is
           joined. A line, and an event, of more than ``LONGEST_EVENT`` bytes raises ``Malformed``. Each byte of a line
           is copied a fixed number of times, however many pieces it comes in.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner.bench.told import Malformed

LONGEST_EVENT = 2**24
"""Bytes."""
_BOM = b"\xef\xbb\xbf"


class EventReader:
    """Feed it what has come; it yields the data of each event that is whole."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The line that is not whole yet."""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._is_first = True

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of events that ``received`` has completed."""
        is_held = self._rest.endswith(b"\r")
        self._rest += received
        if self._is_first:
            if _BOM.startswith(self._rest[:3]) and len(self._rest) < 3:
                return
            if self._rest.startswith(_BOM):
                del self._rest[:3]
            self._is_first = False
        elif not is_held and b"\n" not in received and b"\r" not in received:
            self._check(len(self._rest))
            return
        rest = bytes(self._rest)
        if b"\r" in rest:
            held = rest.endswith(b"\r")  # its LF may be on the way
            rest = (rest[:-1] if held else rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *lines, last = rest.split(b"\n")
        if lines:
            self._rest = bytearray(last)
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
                self._data_bytes = 0
        self._check(len(self._rest))

    def _take(self, data: bytes) -> None:
        """Another line of an event."""
        self._data.append(data)
        self._data_bytes += len(data) + 1
        self._check(self._data_bytes)

    def _check(self, count: int) -> None:
        if count > LONGEST_EVENT:
            raise Malformed(f"an event that is longer than {LONGEST_EVENT:,} bytes")
