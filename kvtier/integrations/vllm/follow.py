"""One request of vLLM, as the host tier follows it.

Owns       its block table as far as vLLM has told it, and how far it has come.
Promises   a block that vLLM has taken out of the table (its null block, 0) is -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.integrations.vllm.geometry import keys_of

if TYPE_CHECKING:
    from kvtier.host_text import HostText
    from kvtier.relayed_books import RelayedBooks

Ids = npt.NDArray[np.int32]
ROOM = 64
"""Blocks that a new table has room for."""


class Table:
    """Device blocks of one group by logical block: append only."""

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._ids: Ids = np.empty(max(ROOM, 2 * len(blocks)), np.int32)
        self._len = 0
        self.append(blocks)

    def append(self, blocks: Sequence[int]) -> None:
        """vLLM's block ids; 0 is no block."""
        end = self._len + len(blocks)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(end, len(self._ids)), np.int32)])
        self._ids[self._len : end] = blocks
        new = self._ids[self._len : end]
        new[new == 0] = -1
        self._len = end

    @property
    def blocks(self) -> Ids:
        """int32 [n]"""
        return self._ids[: self._len]


class Follow:
    """``books``: the host tier's; ``stride``: of vLLM's block hashes, every so many name a key."""

    def __init__(self, books: RelayedBooks, request: Any, stride: int) -> None:
        self.request = request
        """vLLM's ``Request``."""
        self.tables: list[Table] = []
        self.local = 0
        """Tokens that vLLM's own prefix cache has brought."""
        self.end = 0
        """Tokens with KV on the device, or in the step that is being planned."""
        self.told = 0
        """Tokens up to which the host tier was told."""
        self.asked_s: float | None = None
        """When its hit was first found to be still under way."""
        self._books = books
        self._stride = stride
        self._num_keys = 0
        self._text: HostText | None = None

    def text(self) -> HostText:
        """Its tokens' text in the host tier, with keys of all of vLLM's block hashes so far."""
        hashes = self.request.block_hashes
        count = len(hashes) // self._stride
        if self._text is None or count < self._num_keys:
            self.close()
            self._text, self._num_keys = self._books.text(keys_of(hashes, 0, self._stride)), count
        elif count > self._num_keys:
            self._text.extend(keys_of(hashes, self._num_keys, self._stride))
            self._num_keys = count
        return self._text

    def hashes_since(self, tokens: int) -> Sequence[bytes]:
        """vLLM's hashes of the blocks behind ``tokens``."""
        hashes: Sequence[bytes] = self.request.block_hashes
        return hashes[tokens // self._books.hash_tokens * self._stride :]

    def place(self, blocks: Sequence[Sequence[int]]) -> None:
        """Its whole table, by group."""
        self.tables = [Table(ids) for ids in blocks]

    def drop_hit(self) -> None:
        """It loads nothing."""
        if self._text is not None:
            self._text.drop()

    def leave_device(self) -> None:
        """Its blocks are not its own any more."""
        self.tables, self.end, self.told = [], 0, 0
        self.drop_hit()

    def close(self) -> None:
        """It has ended."""
        if self._text is not None:
            self._text.close()
            self._text, self._num_keys = None, 0
