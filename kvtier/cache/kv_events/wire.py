"""Batches of KV events as vLLM writes them, in msgpack.

A batch is an array: time, events, rank. An event is a map with a "type", and leaves out what has its default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
"""Media: the device tier, the host tier, and the remote tier. No event has an ``ownership`` (docs/adr/0030)."""
FULL_GROUP = 0
"""``group_idx`` of full attention: the only group that routers count."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """A run of blocks of one chain has come. ``token_ids``: of all of them, ``block_size`` for each."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """These blocks have gone."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Tells that what was said of this engine before no longer holds."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """The content of one message."""

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = 0


def stored(keys: list[int], parent: int | None, token_ids: list[int], block_tokens: int, medium: str) -> BlockStored:
    """A run of full-attention blocks."""
    return BlockStored(
        block_hashes=keys,
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=block_tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=FULL_GROUP,
        kv_cache_spec_kind="full_attention",
    )


def removed(keys: list[int], medium: str) -> BlockRemoved:
    """Full-attention blocks."""
    return BlockRemoved(block_hashes=keys, medium=medium, group_idx=FULL_GROUP)


class Encoder:
    """Makes payloads of events."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[Event]) -> bytes:
        """One batch, stamped with the present time."""
        return self._encoder.encode(Batch(time.time(), events))
