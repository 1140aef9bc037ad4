"""The publisher's thread: from texts and changes to batches, and to whoever asks for a batch again.

Owns       the claims, the sockets, and what waits for the thread.
Promises   who hands something over never waits: beyond ``max_queue_size`` entries it is refused. ``close`` is bounded.
           An error here ends the events and not the engine. In a forked child it has ended.
Does not   hold the cache.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from kvtier.cache.events import KVEvent
from kvtier.cache.kv_events import wire
from kvtier.cache.kv_events.claims import Claims
from kvtier.cache.kv_events.config import KVEventsConfig
from kvtier.cache.kv_events.sender import Sender
from kvtier.cache.kv_events.stored import RemoteNews
from kvtier.geometry.keys import KeyChain
from kvtier.machine.forks import watch
from kvtier.machine.kept import KEPT

log = logging.getLogger("kvtier.cache.kv_events")

CLOSE_S = 2.0
"""The longest wait for the thread to end."""

PART_BLOCKS = 16_384
"""About the blocks in a part of a batch that tells everything: a millisecond or two."""
GREET_S = 0.5
"""Between two times that everything is told to who begins to listen, at least."""

Text = npt.NDArray[np.int32]


class Worker:
    """The thread of one publisher."""

    def __init__(self, config: KVEventsConfig, chain: KeyChain, claims: Claims) -> None:
        """Raises ``ConfigError`` if the sockets cannot be had."""
        self._chain, self._claims = chain, claims
        self._root = chain.root(None, None, ())
        self._units = claims.block_tokens // chain.unit_tokens
        self._most, self._kept = config.max_queue_size, config.buffer_steps
        self._queue: deque[Text | list[KVEvent] | RemoteNews] = deque()
        self._encoder = wire.Encoder()
        self._closing = False
        self._joined, self._greets_from_s = False, 0.0
        self._sender = Sender(config)
        self.addresses = self._sender.endpoint, self._sender.replay_endpoint
        """Where it listens."""
        self._news = _waker()
        self._thread = threading.Thread(target=self._run, name="kvtier-kv-events", daemon=True)
        self._thread.start()
        watch(self)

    def on_fork(self) -> None:
        """The sockets are the parent's, and so is what wakes its thread."""
        self._closing, self._news = True, _waker()
        KEPT.append(self._sender)

    @property
    def takes_more(self) -> bool:
        """Whether ``hand`` would take something."""
        return len(self._queue) < self._most and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether it takes nothing any more."""
        return self._closing or not self._thread.is_alive()

    def hand(self, news: Text | list[KVEvent]) -> None:
        """A text without a salt, or changes in what can be found; lost unless ``takes_more``. From any thread."""
        if len(news) and self.takes_more:
            self._put(news)

    def hand_of_remote(self, news: RemoteNews) -> None:
        """Lost only if ``has_ended``: nobody knows afterwards what has changed. Ask ``takes_more`` first."""
        if not self.has_ended:
            self._put(news)

    def _put(self, news: Text | list[KVEvent] | RemoteNews) -> None:
        self._queue.append(news)
        os.eventfd_write(self._news, 1)

    def close(self) -> bool:
        """Ends the thread, which tells listeners that nothing is there any more. Returns whether it has ended in time.

        Twice does nothing. The garbage collector may call it, on any thread.
        """
        self._closing = True
        with suppress(OSError):  # closed already
            os.eventfd_write(self._news, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poller: Any = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        for socket in self._sender.readable:
            poller.register(socket, zmq.POLLIN)
        try:
            self._tell_everything()
            while not self._closing:
                poller.poll(1000 * GREET_S if self._joined else None)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._news)
                for _ in range(len(self._queue)):
                    self._take(self._queue.popleft())
                self._publish(self._claims.take())
                self._greet()
                self._answer()
            self._publish([wire.AllBlocksCleared()])
        except Exception:
            log.exception("no more KV events; the engine goes on")
        finally:
            self._closing = True
            self._queue.clear()
            self._sender.close()

    def _take(self, news: Text | list[KVEvent] | RemoteNews) -> None:
        if isinstance(news, RemoteNews):
            self._claims.note_remote(news.changes, news.is_used)
            return
        if isinstance(news, list):
            self._claims.note(news)
            return
        keys = self._chain.extend(self._root, news, np.empty((0, 2), np.uint64))
        self._claims.add_text(keys[self._units - 1 :: self._units, 0], news)

    def _greet(self) -> None:
        """Sends a snapshot to all when somebody begins to listen. Several in a moment share it."""
        self._joined |= self._sender.has_joined()
        if self._joined and time.monotonic() >= self._greets_from_s:
            self._joined, self._greets_from_s = False, time.monotonic() + GREET_S
            self._tell_everything()

    def _answer(self) -> None:
        """Sends a snapshot to all when somebody asks for more than is kept: in the next batch."""
        asked = self._sender.asked()
        if any(start < self._sender.oldest for _, start in asked):
            self._tell_everything()
        for who, start in asked:
            self._sender.answer(who, start)

    def _tell_everything(self) -> None:
        """Tells everything, in several batches if it is much, all kept: making one holds the interpreter's lock."""
        events = self._claims.everything()
        sizes = [len(event.block_hashes) if isinstance(event, wire.BlockStored) else 0 for event in events]
        most, part, blocks = max(PART_BLOCKS, -(-sum(sizes) // max(1, self._kept - 1))), list[wire.Event](), 0
        for event, size in zip(events, sizes, strict=True):
            part.append(event)
            blocks += size
            if blocks >= most:
                self._publish(part)
                part, blocks = [], 0
        self._publish(part)

    def _publish(self, events: list[wire.Event]) -> None:
        if events:
            self._sender.send(self._encoder.encode(events))


def _waker() -> int:
    """A file (eventfd) that wakes a thread which polls sockets."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
