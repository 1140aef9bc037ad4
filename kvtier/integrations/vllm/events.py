"""KV events of the host and the remote tier, in vLLM's form: blocks with medium "CPU" or "STORAGE", by group.

Owns       vLLM's full hash of each block that was published or may soon be stored.
Promises   each published block is taken back once it cannot be found any more. A block is published unless its hash has
           been forgotten, which takes many later ones. Of the remote tier: what this engine has put or seen there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm.geometry import HASH_BYTES, keys_of

if TYPE_CHECKING:
    from kvtier.geometry.keys import KeyArray
    from kvtier.host_tier.books import HostBooks
    from kvtier.remote.known import Changes
    from kvtier.remote.objects import Name
    from kvtier.remote.tier import RemoteTier

PERIOD_S = 0.1
"""Seconds between two looks at all host blocks, which take some nanoseconds each."""
NAMES_A_BLOCK = 4
"""Hashes that are remembered, by host blocks; the oldest are forgotten first."""

MEDIUM_STORAGE = "STORAGE"
"""vLLM's word, which its first versions of these events do not define."""

Block = tuple[int, bytes]
"""Its group, and vLLM's hash."""


class Hashes:
    """vLLM's hashes of the newest texts, by key; ``most`` of them. Every ``stride``-th is a key's."""

    def __init__(self, most: int, stride: int) -> None:
        self._most, self._stride = most, stride
        self._at = dict[bytes, tuple[Sequence[bytes], int]]()  # the text that has it, and where
        self._newest: tuple[Sequence[bytes], KeyArray] | None = None  # the text that was looked at last, and its keys

    def add(self, text: Sequence[bytes], first: int) -> None:
        """Blocks with the hashes of a text, from the first on, may be stored."""
        for i in range(first, len(text)):
            self._at.pop(text[i][:HASH_BYTES], None)
            self._at[text[i][:HASH_BYTES]] = text, i
        while len(self._at) > self._most:
            del self._at[next(iter(self._at))]

    def of(self, key: bytes) -> bytes | None:
        """The hash with this key; None if it was forgotten."""
        text, i = self._at.get(key, ((), 0))
        return text[i] if text else None

    def up_to(self, key: bytes) -> KeyArray | None:
        """The keys of a text up to this one, uint64 [n, 2]; None if it was forgotten."""
        text, i = self._at.get(key, ((), 0))
        if not text:
            return None
        count = (i + 1) // self._stride
        if self._newest is None or self._newest[0] is not text or len(self._newest[1]) < count:
            self._newest = text, keys_of(text, 0, len(text) // self._stride, self._stride)
        return self._newest[1][:count]


class InRemote:
    """The blocks of the objects that are known to lie in the remote tier. Several objects may have a block."""

    def __init__(self, remote: RemoteTier, hashes: Hashes) -> None:
        self._remote, self._hashes = remote, hashes
        self._changes: Changes | None = remote.listen()
        self._objects: dict[Name, list[Block]] = {}
        self._uses = dict[Block, int]()

    def take(self) -> dict[Block, bool]:
        """Blocks that have come (True) or gone since the last call; after a reset all have gone."""
        news = dict[Block, bool]()
        if not self._remote.is_on:
            self._changes = None
        changes: Mapping[Name, bool] = dict.fromkeys(self._objects, False)
        if self._changes is not None:
            changes = self._changes.take()
        for name, is_there in changes.items():
            if is_there:
                self._objects[name] = self._blocks_of(name)
            for block in self._objects[name] if is_there else self._objects.pop(name, ()):
                uses = self._uses.get(block, 0)
                self._uses[block] = uses + 1 if is_there else uses - 1
                if self._uses[block] == 0 or uses == 0:
                    self._note(news, block, is_there)
        return news

    def _note(self, news: dict[Block, bool], block: Block, is_there: bool) -> None:
        if not is_there:
            del self._uses[block]
        if news.pop(block, None) is None:  # else it is as it was
            news[block] = is_there

    def _blocks_of(self, name: Name) -> list[Block]:
        kind, key = name
        keys = self._hashes.up_to(key)
        if keys is None:
            return []
        objects = self._remote.plan.named(kind, keys)
        hashes = [self._hashes.of(row.tobytes()) for row in objects.keys]
        return [(g, one) for g, one in zip(objects.groups.tolist(), hashes, strict=True) if one is not None]


class BlockEvents:
    """The events of ``books``. ``block_tokens``: by group. ``stride``: hashes of vLLM for each key."""

    def __init__(self, books: HostBooks, block_tokens: Sequence[int], stride: int) -> None:
        from kvtier.cache.events import HostEvents

        self._books = books
        self._changes = HostEvents(books)
        self._block_tokens = block_tokens
        self._number = {name: g for g, name in enumerate(books.spec.names)}
        self._hashes = Hashes(NAMES_A_BLOCK * sum(stats.usable for stats in books.stats().host.values()), stride)
        self._published: dict[str, dict[bytes, bytes]] = {name: {} for name in books.spec.names}
        self._in_remote: InRemote | None = None
        self._next_s = 0.0

    def name(self, text: Sequence[bytes], first: int = 0) -> None:
        """Blocks with these hashes of vLLM's, from the first on, may be stored, or are asked for."""
        self._hashes.add(text, first)

    def take(self) -> Iterator[Any]:
        """Changes since the last call, as vLLM's events; at most some times a second."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PERIOD_S
        yield from self._of_host()
        if self._in_remote is None and self._books.remote is not None:
            self._in_remote = InRemote(self._books.remote, self._hashes)
        if self._in_remote is not None:
            yield from self._of_remote(self._in_remote.take())

    def _of_host(self) -> Iterator[Any]:
        from vllm.distributed.kv_events import MEDIUM_CPU

        from kvtier.cache.events import EventKind

        for event in self._changes.poll():
            published, keys = self._published[event.group], [row.tobytes() for row in event.keys]
            is_stored = event.kind is EventKind.STORED
            if is_stored:
                known = {key: one for key in keys if (one := self._hashes.of(key)) is not None}
                published |= known
            else:
                known = {key: published.pop(key) for key in keys if key in published}
            if known:
                yield self._event(is_stored, list(known.values()), self._number[event.group], MEDIUM_CPU)

    def _of_remote(self, news: Mapping[Block, bool]) -> Iterator[Any]:
        for is_stored in (False, True):
            for g in range(len(self._block_tokens)):
                hashes = [one for (of, one), is_there in news.items() if of == g and is_there is is_stored]
                if hashes:
                    yield self._event(is_stored, hashes, g, MEDIUM_STORAGE)

    def _event(self, is_stored: bool, blocks: Sequence[bytes], g: int, medium: str) -> Any:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        hashes: list[Any] = [maybe_convert_block_hash(one) for one in blocks]
        if not is_stored:
            return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=g)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=self._block_tokens[g],
            lora_id=None,
            medium=medium,
            lora_name=None,
            group_idx=g,
        )
