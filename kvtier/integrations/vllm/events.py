"""KV events of the host tier, in vLLM's form: blocks with medium "CPU", by group.

Owns       vLLM's full hash of each block that was published or may soon be stored.
Promises   each published block is taken back once it cannot be found any more. A block is published unless its hash has
           been forgotten, which takes many later ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm.geometry import HASH_BYTES

if TYPE_CHECKING:
    from kvtier.host_tier.books import HostBooks

PERIOD_S = 0.1
"""Seconds between two looks at all host blocks, which take some nanoseconds each."""
NAMES_A_BLOCK = 4
"""Hashes that are remembered, by host blocks; the oldest are forgotten first."""


class BlockEvents:
    """The events of ``books``. ``block_tokens``: by group."""

    def __init__(self, books: HostBooks, block_tokens: Sequence[int]) -> None:
        from kvtier.cache.events import HostEvents

        self._changes = HostEvents(books)
        self._block_tokens = dict(zip(books.spec.names, block_tokens, strict=True))
        self._number = {name: g for g, name in enumerate(books.spec.names)}
        self._most = NAMES_A_BLOCK * sum(stats.usable for stats in books.stats().host.values())
        self._hashes = dict[bytes, bytes]()
        self._published: dict[str, dict[bytes, bytes]] = {name: {} for name in books.spec.names}
        self._next_s = 0.0

    def name(self, hashes: Sequence[bytes]) -> None:
        """Blocks with these hashes of vLLM may be stored."""
        for one in hashes:
            self._hashes[one[:HASH_BYTES]] = one
        while len(self._hashes) > self._most:
            del self._hashes[next(iter(self._hashes))]

    def take(self) -> Iterator[Any]:
        """Changes since the last call, as vLLM's events; at most some times a second."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PERIOD_S
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        from kvtier.cache.events import EventKind

        for event in self._changes.poll():
            published, keys = self._published[event.group], [row.tobytes() for row in event.keys]
            if event.kind is EventKind.REMOVED:
                known = {key: published.pop(key) for key in keys if key in published}
            else:
                known = {key: self._hashes[key] for key in keys if key in self._hashes}
                published |= known
            hashes: list[Any] = [maybe_convert_block_hash(one) for one in known.values()]
            if not hashes:
                continue
            g = self._number[event.group]
            if event.kind is EventKind.REMOVED:
                yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=g)
                continue
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None,
                token_ids=[],
                block_size=self._block_tokens[event.group],
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=None,
                group_idx=g,
            )
