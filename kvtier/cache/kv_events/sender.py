"""The sockets: batches go out to whoever listens, and again to whoever asks for what was missed.

Owns       the XPUB and the ROUTER socket, the number of the next batch, and the last batches.
Promises   nothing here waits for a listener: a slow one misses batches, and may ask for them. What is kept is bounded
           by ``buffer_steps`` and by ``KEPT_BYTES``.
Does not   know blocks. All calls come from one thread.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress

import zmq

from kvtier.cache.kv_events.config import KVEventsConfig
from kvtier.machine.errors import ConfigError

KEPT_BYTES = 64 * 2**20
"""Most bytes of batches that are kept for those who have missed them."""
LINGER_MS = 200
"""Time for what is still on its way when the sockets close."""
END = (-1).to_bytes(8, "big", signed=True)
_MOST_ASKED = 64  # replays answered in one go


class Sender:
    """Listens at the endpoints of ``config``; raises ``ConfigError`` if it cannot."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._kept_bytes = 0
        self.next_batch = int(1000 * time.time())
        """The next batch's number. It begins as the clock's milliseconds, and fewer than a thousand batches a second
        are sent. So an engine that comes back has higher numbers than before, and its listeners see a gap."""
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.XPUB, config.endpoint, config.hwm)
            self._asks = None
            if config.replay_endpoint is not None:
                self._asks = self._bind(zmq.ROUTER, config.replay_endpoint, max(config.hwm, config.buffer_steps + 1))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._pub.set(zmq.XPUB_VERBOSE, 1)
        self.endpoint = _address(self._pub)
        """Where it listens, with the port that was free if a wildcard asked for one."""
        self.replay_endpoint = None if self._asks is None else _address(self._asks)

    def _bind(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, hwm)
        socket.set(zmq.LINGER, LINGER_MS)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as problem:
            raise ConfigError(
                f"KV events cannot listen at {endpoint} ({zmq.strerror(problem.errno or 0)})"
            ) from problem
        return socket

    @property
    def readable(self) -> list[zmq.Socket[bytes]]:
        """The sockets to read from when somebody begins to listen, or asks for batches."""
        return [self._pub] if self._asks is None else [self._pub, self._asks]

    def has_joined(self) -> bool:
        """Whether somebody has begun to listen since the last call."""
        joined = False
        with suppress(zmq.ZMQError):
            while True:
                joined |= self._pub.recv(zmq.NOBLOCK)[:1] == b"\1"
        return joined

    @property
    def oldest(self) -> int:
        """The first batch that is still kept; that of the next one if none is."""
        return self._buffer[0][0] if self._buffer else self.next_batch

    def send(self, payload: bytes) -> None:
        """The next batch."""
        number, self.next_batch = self.next_batch, self.next_batch + 1
        if len(self._buffer) == self._buffer.maxlen:
            self._kept_bytes -= len(self._buffer.popleft()[1])
        self._buffer.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > KEPT_BYTES and len(self._buffer) > 1:
            self._kept_bytes -= len(self._buffer.popleft()[1])
        with suppress(zmq.ZMQError):  # nobody can be told
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def asked(self) -> list[tuple[bytes, int]]:
        """Who has asked for batches, each with the number to begin at."""
        found: list[tuple[bytes, int]] = []
        while self._asks is not None and len(found) < _MOST_ASKED:
            try:
                frames = self._asks.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            if len(frames) == 3 and len(frames[2]) == 8:
                found.append((frames[0], int.from_bytes(frames[2], "big")))
        return found

    def answer(self, who: bytes, start: int) -> None:
        """The batches from ``start`` on that are still kept, and an end."""
        for number, payload in self._buffer:
            if number >= start:
                self._say(who, self._topic, number.to_bytes(8, "big"), payload)
        self._say(who, b"", END, b"")

    def _say(self, who: bytes, *frames: bytes) -> None:
        if self._asks is not None:
            with suppress(zmq.ZMQError):  # it has gone, or reads nothing
                self._asks.send_multipart((who, b"", *frames), zmq.NOBLOCK)

    def close(self) -> None:
        """Gives the addresses back; waits ``LINGER_MS`` at most."""
        self._context.destroy()


def _address(socket: zmq.Socket[bytes]) -> str:
    found = socket.get(zmq.LAST_ENDPOINT)
    return found.decode().rstrip("\0") if isinstance(found, bytes) else str(found)
