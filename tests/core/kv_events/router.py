"""A router's index, fed by what goes over the wire: a tree of the tokens of blocks, as real ones have it.

It decodes with vLLM's field names alone, and shares no code with kvtier.
"""

from __future__ import annotations

from typing import Any

import msgspec

Path = tuple[tuple[int, ...], ...]
"""The tokens of the blocks from a text's beginning on."""

MEDIA = ("GPU", "CPU", "STORAGE")
STORED = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
STORED |= {"group_idx", "kv_cache_spec_kind"}


class Router:
    """What a listener believes of one engine. If it ``joins`` an engine that runs, all is told to it at first: what
    comes before that was news for others."""

    def __init__(self, block_tokens: int, joins: bool = False) -> None:
        self._block_tokens = block_tokens
        self._joins = joins
        self._paths: dict[int, Path] = {}
        self.found: dict[str, set[Path]] = {medium: set() for medium in MEDIA}

    @property
    def believed(self) -> set[Path]:
        """Blocks in any medium, each with all before it."""
        return set().union(*self.found.values())

    def hear(self, payload: bytes) -> list[dict[str, Any]]:
        """One batch. An event says only what is news, and has its parent there."""
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        self._joins &= all(event["type"] != "AllBlocksCleared" for event in events)
        if self._joins:
            return []
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    assert set(event) == {"type", "block_hashes", "medium", "group_idx"}, event
                    assert event["group_idx"] == 0
                    gone = {self._paths[key] for key in event["block_hashes"]}
                    assert len(gone) == len(event["block_hashes"]) > 0
                    assert gone <= self.found[event["medium"]], "removed, and was not there"
                    self.found[event["medium"]] -= gone
                case "AllBlocksCleared":
                    assert set(event) == {"type"}
                    self.found = {medium: set() for medium in MEDIA}
                case other:
                    raise AssertionError(other)
        believed = self.believed
        assert all(path[:-1] in believed for path in believed if len(path) > 1), "a block without the one before it"
        return events

    def _store(self, event: dict[str, Any]) -> None:
        assert set(event) == STORED, event
        assert (event["group_idx"], event["kv_cache_spec_kind"]) == (0, "full_attention")
        assert (event["lora_id"], event["lora_name"], event["block_size"]) == (None, None, self._block_tokens)
        keys, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
        assert len(tokens) == len(keys) * self._block_tokens > 0
        assert all(0 <= key < 2**64 for key in keys)
        path: Path = ()
        if parent is not None:
            path = self._paths[parent]
            assert path in self.believed, "its parent is not there"
        for i, key in enumerate(keys):
            path += (tuple(tokens[i * self._block_tokens : (i + 1) * self._block_tokens]),)
            assert self._paths.setdefault(key, path) == path, "a key stands for one text"
            assert path not in self.found[event["medium"]], "stored, and was there"
            self.found[event["medium"]].add(path)
