"""``ObjectBackend``: a ``Backend`` in S3, Google Cloud Storage, Azure or this process's memory, by ``obstore``.

Promises   an object is there as a whole or not at all: no backend of these shows a half-written one. Nothing is retried
           past ``timeout_s``.
Does not   evict: a bucket's lifecycle rules do, or ``kvtier remote gc``.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.machine.errors import ConfigError
from kvtier.remote.backends.contract import Buffers, Outcome
from kvtier.remote.backends.threaded import ThreadedBackend, check_size
from kvtier.remote.backends.threads import Failure, reason_of
from kvtier.remote.names import ROOT

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger("kvtier.remote")

_FULL = re.compile(r"status code: (401|403|507)\b|quota ?exceeded", re.IGNORECASE)
"""Unauthorized, Forbidden, Insufficient Storage."""
_NEVER = re.compile(r"status code: (?!408|429)[34]\d\d\b")
"""Answers that another try would not change."""
_MOST_LOOKS = 64
"""Names that one call asks for at the same time."""
_SMALL_PIECE = 32 << 10
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")


def load_obstore() -> ModuleType:
    """The package; ``ConfigError`` names the fix if it is not installed."""
    try:
        import obstore
    except ModuleNotFoundError as problem:
        raise ConfigError("this backend needs obstore; install it with: pip install 'kvtier[remote]'") from problem
    return obstore


def http_options(timeout_s: float, retries: int = 1) -> dict[str, Any]:
    """obstore's arguments for HTTP: no request takes longer than ``timeout_s``, its retries included."""
    whole = timedelta(seconds=timeout_s)
    return {
        "client_options": {"timeout": whole, "connect_timeout": min(whole, timedelta(seconds=5))},
        "retry_config": {"max_retries": retries, "retry_timeout": whole},
    }


def check_bucket(backend: ObjectStore, place: str) -> None:
    """Asks for a list of objects. Raises ``ConfigError`` for a bucket that is not there or refuses.

    One that does not answer now may do so later: the log is told.
    """
    try:
        next(iter(load_obstore().list(backend, ROOT)), None)
    except Exception as problem:
        if _NEVER.search(str(problem)):
            raise ConfigError(f"{place} cannot be used: {reason_of(problem)}") from problem
        log.warning("%s does not answer: %s", place, reason_of(problem))


class ObjectBackend(ThreadedBackend):
    """Objects of an obstore ``ObjectStore``."""

    def __init__(self, backend: ObjectStore, kind: str, threads: int) -> None:
        self._obstore = load_obstore()
        self.backend = backend
        self.kind = kind
        super().__init__(threads)

    def _exists(self, names: Sequence[str]) -> list[bool]:
        if self.kind == "memory":
            return [self._is_there(name) for name in names]
        return asyncio.run(self._exist_together(names))

    def _is_there(self, name: str) -> bool:
        try:
            self._obstore.head(self.backend, name)
        except FileNotFoundError:
            return False
        return True

    async def _exist_together(self, names: Sequence[str]) -> list[bool]:
        turns = asyncio.Semaphore(_MOST_LOOKS)

        async def ask(name: str) -> None:
            async with turns:
                await self._obstore.head_async(self.backend, name)

        found = await asyncio.gather(*map(ask, names), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, FileNotFoundError):
                raise answer
        return [not isinstance(answer, FileNotFoundError) for answer in found]

    def _put(self, name: str, buffers: Buffers) -> None:
        # obstore takes buffers as they are; its memory store would go on pointing to them, so that gets a copy. Many
        # small buffers cost it more than a copy does.
        is_copied = self.kind == "memory" or sum(map(len, buffers)) < len(buffers) * _SMALL_PIECE
        pieces = [b"".join(buffers)] if is_copied else list(buffers)
        try:
            self._obstore.put(self.backend, name, pieces, use_multipart=False)
        except Exception as problem:
            raise _failure(problem) from problem

    def _get(self, name: str, buffers: Buffers, check: Callable[[int | None], None]) -> None:
        found = self._obstore.get(self.backend, name)
        check_size(found.meta["size"], buffers)
        data = np.frombuffer(found.bytes(), np.uint8)
        check_size(len(data), buffers)
        at = 0
        for piece in buffers:
            np.copyto(np.frombuffer(piece, np.uint8), data[at : at + len(piece)])  # without the GIL
            at += len(piece)
        check(None)

    def _delete(self, name: str) -> None:
        if self.kind == "memory":
            self._obstore.head(self.backend, name)  # its delete does not say that nothing is there
        try:
            self._obstore.delete(self.backend, name)
        except FileNotFoundError:
            raise
        except Exception as problem:
            raise _failure(problem) from problem


def _failure(problem: Exception) -> Failure:
    refused = type(problem).__name__ in _DENIED or _FULL.search(str(problem))
    return Failure(Outcome.REFUSED if refused else Outcome.FAILED, reason_of(problem))
