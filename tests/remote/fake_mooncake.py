"""Mooncake's client as ``MooncakeBackend`` calls it, over a dict: with the library's codes, and no library."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class FakeClient:
    """``failing``: the code that every call gives; ``moves``: set if transfers may go on."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.begun: set[str] = set()
        """Names of puts that failed half-way."""
        self.failing = 0
        self.calls: list[str] = []
        self.batches: list[int] = []
        """Objects in each batch that was read."""
        self.entered = threading.Event()
        """A put has begun."""
        self.moves = threading.Event()
        self.moves.set()
        self.is_closed = False

    def setup(self, **given: Any) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], where: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], config: object
    ) -> list[int]:
        self.calls.append("put")
        self.entered.set()
        self.moves.wait()
        return [self._put(key, *spans) for key, *spans in zip(keys, where, sizes, strict=True)]

    def _put(self, key: str, where: Sequence[int], sizes: Sequence[int]) -> int:
        if self.failing:
            self.begun.add(key)
            return self.failing
        if key not in self.begun:
            data = b"".join(ctypes.string_at(address, size) for address, size in zip(where, sizes, strict=True))
            self.objects.setdefault(key, data)
        return 0

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], where: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[int]:
        self.calls.append("get")
        self.batches.append(len(keys))
        self.moves.wait()
        return [self._get(key, *spans) for key, *spans in zip(keys, where, sizes, strict=True)]

    def _get(self, key: str, where: Sequence[int], sizes: Sequence[int]) -> int:
        if self.failing:
            return self.failing
        data = self.objects.get(key)
        if data is None or len(data) != sum(sizes):
            return -704 if data is None else -600 if len(data) > sum(sizes) else -800
        at = 0
        for address, size in zip(where, sizes, strict=True):
            ctypes.memmove(address, data[at : at + size], size)
            at += size
        return len(data)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        self.calls.append("look")
        return [self.failing or int(key in self.objects) for key in keys]

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        return [self.failing or (-704 if self.objects.pop(key, None) is None else 0) for key in keys]

    def get_size(self, key: str) -> int:
        return len(self.objects[key]) if key in self.objects else -704


def library(client: FakeClient) -> SimpleNamespace:
    """Stands for the module ``mooncake.store``."""
    return SimpleNamespace(MooncakeDistributedStore=lambda: client, ReplicateConfig=SimpleNamespace)
