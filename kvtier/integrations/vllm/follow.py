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
from kvtier.machine.arguments import NO_KEYS

if TYPE_CHECKING:
    from kvtier.host_tier.scheduler import HostTierScheduler
    from kvtier.host_tier.text import HostText

Ids = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Table:
    """Device blocks of one group by logical block: append only. They stay vLLM's list until they are asked for."""

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._ids = list(blocks)

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, blocks: Sequence[int]) -> None:
        """vLLM's block ids; 0 is no block."""
        self._ids += blocks

    def at(self, at: Int64s) -> Ids:
        """The ids of these logical blocks, int64 [n], ascending: int32 [n], -1 if there is no block."""
        found = np.full(len(at), -1, np.int32)
        end = int(np.searchsorted(at, len(self._ids)))
        if end:
            first = int(at[0])
            found[:end] = np.array(self._ids[first : int(at[end - 1]) + 1], np.int32)[at[:end] - first]
            found[found == 0] = -1
        return found


class TrackedRequest:
    """``books``: the host tier's; ``stride``: of vLLM's block hashes, every so many name a key."""

    def __init__(self, books: HostTierScheduler, request: Any, stride: int) -> None:
        self.request = request
        """vLLM's ``Request``."""
        self.tables: list[Table] = []
        self.local = 0
        """Tokens that vLLM's own prefix cache has brought."""
        self.from_remote = 0
        """Tokens of its last hit that the remote tier has brought for it."""
        self.end = 0
        """Tokens with KV on the device, or in the step that is being planned."""
        self.told = 0
        """Tokens up to which the host tier was told."""
        self.due = 0
        """Tokens with which the host tier is to be told again; less may be told earlier."""
        self.asked = 0
        """Tokens that it had when the host tier was asked for its hit. No prompt is known to part from it later."""
        self.last_state = 0
        """The last boundary of its prompt, or beyond, whose state was stored; 0 if there is none."""
        self.is_wrong = False
        """Its logits were no numbers: nothing of it is stored any more."""
        self.asked_s: float | None = None
        """When its hit was first found to be still under way."""
        self._books = books
        self._stride = stride
        self._num_keys = 0
        self._text: HostText | None = None
        self._with_remote = getattr(request, "lora_request", None) is None  # an adapter's content has no name

    def text(self) -> HostText:
        """Its tokens' text in the host tier, with keys of all of vLLM's block hashes so far: read when needed."""
        count = len(self.request.block_hashes) // self._stride
        if self._text is None or count < self._num_keys:
            self.close()
            self._text = self._books.text(NO_KEYS, self._with_remote, are_distinct=True)
        if count > self._num_keys:
            self._text.announce(count, self._keys)
            self._num_keys = count
        return self._text

    def _keys(self, first: int, end: int) -> npt.NDArray[np.uint64]:
        return keys_of(self.request.block_hashes, first, end, self._stride)

    def hashes_since(self, tokens: int) -> tuple[Sequence[bytes], int]:
        """vLLM's hashes of its blocks, and the number of the first one behind ``tokens``."""
        return self.request.block_hashes, tokens // self._books.hash_tokens * self._stride

    def place(self, blocks: Sequence[Sequence[int]]) -> None:
        """Its whole table, by group."""
        self.tables = [Table(ids) for ids in blocks]

    def blocks_of(self, g: int, at: Int64s) -> Ids:
        """Its device blocks, int32 [n], of logical blocks ``at`` of group ``g``, ascending; -1 if there is none."""
        return self.tables[g].at(at)

    def blocks(self, groups: Ids, at: Int64s) -> Ids:
        """Its device blocks, int32 [n], of logical blocks ``at``, group after group."""
        return np.concatenate([self.blocks_of(g, at[groups == g]) for g in range(len(self.tables))])

    def drop_hit(self) -> None:
        """It loads nothing."""
        if self._text is not None:
            self._text.drop()

    def leave_device(self) -> None:
        """Its blocks are not its own any more."""
        self.tables, self.end, self.told, self.due = [], 0, 0, 0
        self.drop_hit()

    def disown(self) -> set[int]:
        """Nothing that it has stored is found again. Returns the copies under way with some of it, by ticket."""
        self.is_wrong = True
        return self.text().disown()

    def close(self) -> None:
        """It has ended."""
        if self._text is not None:
            self._text.close()
            self._text, self._num_keys = None, 0
