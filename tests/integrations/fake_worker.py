"""What an engine of vLLM is made of: its configs, its block pool, its requests, and workers whose memory is judged."""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from integrations.standin import be_rank, check_call, install

if TYPE_CHECKING:
    from integrations.fake_vllm import FakeEngine

install()

from kvtier.integrations.vllm import connector as connector_module  # noqa: E402

UNIT = 4
LAYERS, PAGE = 2, 32
STATE = 16
"""Bytes of a page that a layer's state takes: what lies behind is nobody's."""
TICK_S = 0.001
POISON = 0xEE
ROLES = connector_module.KVConnectorRole


def spec_class(name: str) -> type:
    return type(name, (SimpleNamespace,), {"prefix_cacheable": True})


SPECS = {
    "full": lambda: spec_class("FullAttentionSpec")(block_size=UNIT, page_size_bytes=PAGE),
    "window": lambda: spec_class("SlidingWindowSpec")(block_size=UNIT, page_size_bytes=PAGE, sliding_window=10),
    "chunk": lambda: spec_class("ChunkedLocalAttentionSpec")(
        block_size=UNIT, page_size_bytes=PAGE, attention_chunk_size=8
    ),
    "state": lambda: spec_class("MambaSpec")(
        block_size=UNIT,
        page_size_bytes=PAGE,
        real_page_size_bytes=STATE,
        shapes=((4,), (2, 1)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        mamba_type="gdn_attention",
        num_speculative_blocks=0,
    ),
    "rows": lambda: spec_class("SlidingWindowMLASpec")(
        block_size=UNIT, page_size_bytes=PAGE, sliding_window=8, bounded_replay=False
    ),
    "replayed": lambda: spec_class("SlidingWindowMLASpec")(
        block_size=UNIT, page_size_bytes=PAGE, sliding_window=10, bounded_replay=True, prefix_cacheable=False
    ),
    "entries": lambda: spec_class("MLAAttentionSpec")(block_size=UNIT, page_size_bytes=PAGE, tokens_per_state=4),
    "latents": lambda: spec_class("MLAAttentionSpec")(block_size=UNIT, page_size_bytes=PAGE, tokens_per_state=1),
    "wide": lambda: spec_class("FullAttentionSpec")(block_size=2 * UNIT, page_size_bytes=PAGE),
}


def first_visible(kind: str, position: int) -> int:
    """The first token that ``position`` sees, by the definitions of the kinds; of a state, the last token in it."""
    if kind == "window":
        return max(0, position - 10 + 1)
    if kind == "state":
        return max(0, position - 1)
    return position // 8 * 8 if kind == "chunk" else 0


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt, self.key = block_id, 0, None


class BlockPool:
    """vLLM's: a free list in the order of eviction; blocks keep their content until they are given out."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(n) for n in range(num_blocks)]
        self.free = deque(self.blocks[1:])
        self.cached: dict[tuple[int, bytes], Block] = {}

    def take(self) -> Block:
        block = self.free.popleft()
        self.forget(block)
        block.ref_cnt = 1
        return block

    def forget(self, block: Block) -> None:
        if block.key is not None:
            self.cached.pop(block.key, None)
            block.key = None

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                (self.free.append if block.key is not None else self.free.appendleft)(block)


class Request:
    def __init__(self, request_id: str, prompt: list[int], new_tokens: int) -> None:
        self.request_id, self.tokens = request_id, list(prompt)
        self.num_prompt_tokens, self.most = len(prompt), len(prompt) + new_tokens
        self.num_computed_tokens = self.num_nans_in_logits = 0
        self.status = "waiting"
        self.tables: list[list[Block | None]] = []
        self.block_hashes: list[bytes] = []
        self.cached_tokens = self.shared_prefix_boundary = 0
        self.kept: set[int] = set()  # boundaries whose states vLLM's prefix cache has, or will have after the step
        self.extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def held(self, most_users: int = 2**31) -> list[Block]:
        """Its blocks; those that so many requests hold at most."""
        return [block for table in self.tables for block in table if block and block.ref_cnt <= most_users]

    def extend_hashes(self) -> None:
        while (len(self.block_hashes) + 1) * UNIT <= len(self.tokens):
            n = len(self.block_hashes)
            before = self.block_hashes[-1] if n else b""
            text = repr(self.tokens[n * UNIT : (n + 1) * UNIT]).encode()
            self.block_hashes.append(hashlib.sha256(before + text).digest())


class Worker:
    """One rank: memory that all groups share, and its connector."""

    def __init__(self, engine: FakeEngine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        self.storage = torch.zeros(LAYERS * engine.num_blocks * PAGE, dtype=torch.uint8)
        self.connector = connector_module.KvtierConnector(engine.config, ROLES.WORKER, engine.kv_cache_config)
        self.loads: dict[int, Any] = {}  # by ticket, until their end
        caches = {}
        for tensor in engine.kv_cache_config.kv_cache_tensors:
            for i, layer in enumerate(tensor.layers):
                caches[layer] = self.storage[tensor.offset + i * tensor.layer_stride :]
        check_call("register_kv_caches", caches)
        be_rank(rank)
        self.connector.register_kv_caches(caches)

    def row(self, layer: int, block: int) -> np.ndarray:
        at = (layer * self.engine.num_blocks + block) * PAGE
        return self.storage.numpy()[at : at + PAGE]

    def content(self, group: int, layer: int, block_hash: bytes) -> np.ndarray:
        rank = 0 if self.engine.kinds[group] == "latents" else self.rank  # latents are the same on every rank
        seed = b"%d/%d/%d/" % (group, layer, rank) + block_hash
        return np.frombuffer(hashlib.blake2b(seed, digest_size=PAGE).digest(), np.uint8)

    def state(self, group: int, layer: int, request: Request, num_tokens: int) -> np.ndarray:
        """After so many tokens of the request."""
        name = hashlib.sha256(repr(request.tokens[:num_tokens]).encode()).digest()
        if num_tokens % UNIT == 0:
            name = request.block_hashes[num_tokens // UNIT - 1]
        return self.content(group, layer, name)[:STATE]

    def run(self, message: bytes, forward: list[tuple[Request, int, int]], finished: set[str]) -> tuple[Any, ...]:
        connector, meta = self.connector, pickle.loads(message)
        if self.engine.config.use_v2_model_runner:  # it has begun new states before anybody is asked
            self.begin_states(forward)
        check_call("handle_preemptions", meta)
        connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        if not self.engine.config.use_v2_model_runner:
            self.begin_states(forward)
        for request, start, end in forward:
            self.compute(request, start, end)
        check_call("start_load_kv", None)
        connector.start_load_kv(None)
        connector.wait_for_save()
        check_call("get_transfer_results", finished)
        results = connector.get_transfer_results(finished)
        report = connector.build_connector_worker_meta()
        self.loads |= {copy.ticket: copy for copy in meta.orders.copies if copy.is_load}
        self.check_wiped({} if report is None else report.report.ends)
        connector.clear_connector_metadata()
        return results, pickle.loads(pickle.dumps(report))

    def check_wiped(self, ends: dict[int, Any]) -> None:
        """A load that has failed has left zeros before its end is told."""
        for ticket, (_, end) in ends.items():
            load = self.loads.pop(ticket, None)
            if load is not None and end.error:
                bad = slice(None) if end.bad is None else end.bad
                for g, block in zip(load.groups[bad].tolist(), load.device[bad].tolist(), strict=True):
                    size = STATE if self.engine.kinds[g] == "state" else PAGE
                    assert not any(self.row(layer, block)[:size].any() for layer in range(LAYERS)), "something was left"

    def begin_states(self, forward: list[tuple[Request, int, int]]) -> None:
        """The block that a request's step ends in begins with the state that it goes on from."""
        for request, start, end in forward:
            for g in range(len(self.engine.kinds)) if start else ():
                source, target = (start - 1) // UNIT, (end - 1) // UNIT
                if self.engine.kinds[g] == "state" and source != target:
                    table = request.tables[g]
                    for layer in range(LAYERS):
                        row = self.row(layer, table[target].block_id)
                        row[:STATE] = self.row(layer, table[source].block_id)[:STATE]

    def compute_state(self, g: int, request: Request, start: int, end: int) -> None:
        """Judges the state that the step goes on from, and writes the one that it ends with."""
        for layer in range(LAYERS):
            row = self.row(layer, request.tables[g][(end - 1) // UNIT].block_id)[:STATE]
            self.engine.wrong += start > 0 and not np.array_equal(row, self.state(g, layer, request, start))
            row[:] = self.state(g, layer, request, end)

    def compute(self, request: Request, start: int, end: int) -> None:
        """Judges what the tokens from ``start`` on can see, and writes their own."""
        for g, kind in enumerate(self.engine.kinds):
            if kind == "state":
                self.compute_state(g, request, start, end)
                continue
            size = self.engine.sizes[g]
            stride, table = size // UNIT, request.tables[g]
            for j in range(first_visible(kind, start) // size, start // size):
                for layer in range(LAYERS):
                    right = self.content(g, layer, request.block_hashes[(j + 1) * stride - 1])
                    self.engine.wrong += not np.array_equal(self.row(layer, table[j].block_id), right)
            for j in range(start // size, -(-end // size)):
                whole = (j + 1) * size <= min(end, len(request.block_hashes) * UNIT)
                for layer in range(LAYERS):
                    row = self.row(layer, table[j].block_id)
                    row[:] = self.content(g, layer, request.block_hashes[(j + 1) * stride - 1]) if whole else POISON


def vllm_config(extra: dict[str, Any], workers: int = 1, **changes: Any) -> Any:
    """What of vLLM's ``VllmConfig`` the connector reads."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra,
            kv_load_failure_policy=changes.get("policy", "recompute"),
            is_kv_producer=True,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=changes.get("prefix_caching", True),
            prefix_caching_hash_algo=changes.get("hashes", "sha256"),
            cache_dtype=changes.get("cache_dtype", "auto"),
            mamba_cache_mode=changes.get("mamba_cache_mode", "align"),
            prefix_match_unit=changes.get("prefix_match_unit"),
            block_size=UNIT,
        ),
        model_config=SimpleNamespace(
            model=changes.get("model", "no/folder"),
            hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2} | changes.get("hf", {})),
            dtype=changes.get("dtype", "float32"),
            quantization=None,
            max_model_len=changes.get("max_model_len", 100),
            **changes.get("model_fields", {}),
        ),
        device_config=SimpleNamespace(device_type=changes.get("device", "cuda")),
        lora_config=changes.get("lora"),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        parallel_config=SimpleNamespace(**{"world_size": workers} | changes.get("parallel", {})),
        speculative_config=changes.get("speculative"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True) if changes.get("events") else None,
        use_v2_model_runner=changes.get("v2", False),
    )


def kv_cache_config(specs: list[Any], num_blocks: int, **changes: Any) -> Any:
    """vLLM's ``KVCacheConfig``: layer n of every group lies at the same place."""
    names = [[f"{g}.{layer}" for layer in range(LAYERS)] for g in range(len(specs))]
    size = LAYERS * num_blocks * PAGE
    tensors = [
        SimpleNamespace(size=size, layers=of, layer_stride=num_blocks * PAGE, block_stride=PAGE, offset=0)
        for of in names
    ]
    groups = [SimpleNamespace(layer_names=of, kv_cache_spec=spec) for of, spec in zip(names, specs, strict=True)]
    found = {"num_blocks": num_blocks, "kv_cache_tensors": tensors, "kv_cache_groups": groups, "hash_block_size": UNIT}
    return SimpleNamespace(**found | changes)
