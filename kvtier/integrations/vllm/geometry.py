"""vLLM's KV cache as a host tier sees it: groups, blocks in fragments, keys.

Owns       the translation of a ``KVCacheConfig``.
Promises   a group, a page or a placement that the host tier cannot serve raises ``UnsupportedModel`` by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.machine.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

    from kvtier.geometry.outside import OutsideGroup
    from kvtier.host_tier.plan import HostPlan

GPU_WORD = 16
"""Bytes: what a GPU's copies come in."""
HASH_BYTES = 16
"""Bytes of vLLM's block hashes: a key of 128 bits."""

REPLAYED = "keeps windows out of vLLM's prefix cache, and rebuilds them by replay"
PLACES = (
    "keeps a layer's window, entries, index keys and rows in pages of several sizes, of which vLLM tells its "
    "scheduler one"
)
FAMILIES = {"deepseek_v4": PLACES, "deepseek_v41": REPLAYED}
"""Why not, by ``model_type``."""

MIXED = (
    "this model keeps latent vectors (MLA), which are the same on each rank, beside layers whose blocks are not; "
    "kvtier's connector takes it on one rank only: --tensor-parallel-size 1, with --data-parallel-size for more GPUs"
)
REASONS = {
    "CrossAttentionSpec": "attends to an encoder",
    "EncoderOnlyAttentionSpec": "attends in both directions",
    "SinkFullAttentionSpec": "has blocks of sink tokens that belong to no prompt",
    "SlidingWindowMLASpec": f"is a window of a model that {PLACES}",
    "CircularBufferSpec": "overwrites its blocks in place",
    "RSWASpec": "mixes full attention to the prompt with a window over generated tokens",
    "HiddenStateCacheSpec": "keeps hidden states, which no prefix names",
}


@dataclass(frozen=True)
class Geometry:
    """``groups``: of the host tier, in the order of vLLM's. ``memory_bytes``: of the device memory of one worker.

    ``hashes_per_key``: hashes of vLLM per key of the host tier.
    """

    groups: tuple[OutsideGroup, ...]
    memory_bytes: int
    hashes_per_key: int

    def describe(self, plan: HostPlan, workers: int) -> str:
        """The host tier in a line: its groups, bytes, and tokens that it has room for."""
        groups = ", ".join(
            f"{g.name} ({len(g.fragments)} layers, {g.block_tokens} tokens and {g.block_bytes:,} bytes a block)"
            for g in self.groups
        )
        full = sum(g.block_bytes / g.block_tokens for g in self.groups if not g.attention.span_tokens)
        room = f"room for about {int(plan.layout.num_bytes / full):,} tokens" if full else "windows or states only"
        whose = f"that {workers} workers share" if plan.sharers > 1 else f"a worker, {workers} worker(s)"
        return f"{plan.layout.num_bytes:,} bytes of host memory {whose}, {room}; groups {groups}"

    @property
    def states(self) -> frozenset[int]:
        """The numbers of the groups that keep recurrent states."""
        return frozenset(g for g, group in enumerate(self.groups) if group.attention.kind.name == "STATE")

    @property
    def hash_tokens(self) -> int:
        """Tokens per key: the gcd of the groups' block_tokens."""
        return int(np.gcd.reduce([group.block_tokens for group in self.groups]))

    @property
    def hit_tokens(self) -> int:
        """A hit is a multiple of it: the lcm of the groups' block_tokens."""
        return int(np.lcm.reduce([group.block_tokens for group in self.groups]))


def geometry_of(config: Any) -> Geometry:
    """How a ``KVCacheConfig`` of vLLM lays out its blocks. Raises ``UnsupportedModel``."""
    from kvtier.geometry.outside import Fragment, OutsideGroup

    places, strides = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    for tensor in config.kv_cache_tensors:
        if getattr(tensor, "host_resident", False):
            raise UnsupportedModel(f"layers {tensor.layers[:2]} keep their KV in host memory already")
        for i, layer in enumerate(tensor.layers):
            places[layer] = tensor.offset + i * tensor.layer_stride, tensor.block_stride
            strides[layer] = tensor.layer_stride, tensor.block_stride
    groups = []
    for g, group in enumerate(config.kv_cache_groups):
        specs = _layer_specs(group)
        kind = _attention(group.layer_names[0], next(iter(specs.values())))
        pages = {layer: _page_bytes(spec) for layer, spec in specs.items()}
        if len(set(pages.values())) > 1:
            raise UnsupportedModel(
                f"the layers of group {g} have pages of {sorted(set(pages.values()))} bytes, of which vLLM tells its "
                "scheduler one; kvtier's connector needs pages of one size in a group"
            )
        page = min(pages.values())
        if any(stride < page for layer in group.layer_names for stride in strides[layer]):
            raise UnsupportedModel(
                f"the KV cache lies so that the heads lie outside the blocks (layout "
                f"{getattr(config, 'kv_cache_layout', None) or 'LHBNC, BHLNC'}); kvtier's connector needs each layer's "
                "block in one piece: set VLLM_KV_CACHE_LAYOUT=LBHNC in the environment, or another attention backend"
            )
        fragments = tuple(Fragment(*places[layer], page) for layer in group.layer_names)
        name = f"{g}:{_word(kind, next(iter(specs.values())))}"
        groups.append(OutsideGroup(name, kind, group.kv_cache_spec.block_size, config.num_blocks, fragments))
    sizes = {int(tensor.size) for tensor in config.kv_cache_tensors}
    if len(sizes) != 1:
        raise UnsupportedModel(f"the KV cache lies in {len(sizes)} allocations; kvtier's connector takes one")
    hash_block = getattr(config, "hash_block_size", None) or min(group.block_tokens for group in groups)
    unit = int(np.gcd.reduce([group.block_tokens for group in groups]))
    if unit % hash_block:
        raise UnsupportedModel(f"vLLM names every {hash_block} tokens, but blocks share multiples of {unit} only")
    if any(group.attention.kind.name == "STATE" for group in groups):
        check_finer_hashes(hash_block, unit)
    return Geometry(tuple(groups), sizes.pop(), unit // hash_block)


def sharers_of(config: Any, workers: int) -> int:
    """How many of an engine's workers have the same bytes in their blocks: all, if every layer keeps latents (MLA).

    Raises ``UnsupportedModel`` for latents beside other layers, on several workers.
    """
    specs = [spec for group in config.kv_cache_groups for spec in _layer_specs(group).values()]
    latents = sum(type(spec).__name__ == "MLAAttentionSpec" for spec in specs)
    if workers > 1 and 0 < latents < len(specs):
        raise UnsupportedModel(MIXED)
    return workers if latents else 1


def check_finer_hashes(hash_tokens: int, block_tokens: int) -> None:
    """Raises ``UnsupportedModel`` if vLLM keeps a model's states within blocks (ADR 46)."""
    if hash_tokens != block_tokens:
        raise UnsupportedModel(
            f"vLLM matches prefixes every {hash_tokens} tokens, finer than its blocks of {block_tokens}, and then "
            "keeps recurrent states within blocks, as kvtier's connector does not: leave --prefix-match-unit out"
        )


def _layer_specs(group: Any) -> dict[str, Any]:
    """Each layer's spec."""
    spec = group.kv_cache_spec
    if hasattr(spec, "kv_cache_specs"):
        return {layer: spec.kv_cache_specs[layer] for layer in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _page_bytes(spec: Any) -> int:
    """Bytes of a layer's block that mean something. A state lies at the beginning of a page as large as those of K and
    V."""
    page = int(spec.page_size_bytes)
    if type(spec).__name__ != "MambaSpec":
        return page
    return min(page, -(-int(spec.real_page_size_bytes) // GPU_WORD) * GPU_WORD)


def _state(layer: str, spec: Any) -> Any:
    """The kind of a layer that keeps a state. Raises ``UnsupportedModel``."""
    from kvtier.geometry.kinds import Part, RecurrentState

    if spec.mamba_cache_mode != "align":
        raise UnsupportedModel(
            f"layer {layer!r} keeps its states in mode {spec.mamba_cache_mode!r}, in which a block is not the state at "
            "its end: kvtier's connector needs --mamba-cache-mode align"
        )
    if spec.num_speculative_blocks:
        raise UnsupportedModel(f"layer {layer!r} keeps states of tokens that speculative decoding may take back")
    shapes = zip(spec.shapes, spec.dtypes, strict=True)
    return RecurrentState(tuple(Part(f"{n}", tuple(shape), dtype) for n, (shape, dtype) in enumerate(shapes)))


def _attention(layer: str, spec: Any) -> Any:
    """The attention kind of a layer's spec. Raises ``UnsupportedModel``."""
    from kvtier.geometry.kinds import ChunkedLocal, FullAttention, SlidingWindow

    name = type(spec).__name__
    makes: dict[str, Callable[[], Any]] = {
        "FullAttentionSpec": FullAttention,
        "MLAAttentionSpec": FullAttention,
        "SlidingWindowSpec": lambda: SlidingWindow(spec.sliding_window),
        "ChunkedLocalAttentionSpec": lambda: ChunkedLocal(spec.attention_chunk_size),
        "MambaSpec": lambda: _state(layer, spec),
    }
    reason = None if name in makes else REASONS.get(name, "is of a kind that kvtier does not know")
    if getattr(spec, "bounded_replay", False):
        reason = f"is of a model that {REPLAYED}"
    elif name == "MLAAttentionSpec" and getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1)) > 1:
        reason = f"has one entry for several tokens, of a model that {PLACES}"
    if reason:
        raise UnsupportedModel(f"layer {layer!r} ({name}) {reason}; kvtier's connector cannot keep it")
    if getattr(spec, "extra_retained_tokens", 0):
        raise UnsupportedModel(f"layer {layer!r} keeps tokens beyond its window, as kvtier's connector does not")
    if not spec.prefix_cacheable:
        raise UnsupportedModel(f"layer {layer!r} ({name}) is not part of vLLM's prefix cache")
    return makes[name]()


def _word(kind: Any, spec: Any) -> str:
    """The word for an attention kind: "full", "window-1024", "chunk-8192", "state-mamba2"."""
    word: str = kind.kind.name.lower()
    if word == "state":  # an enum, of a name
        return f"{word}-{str(getattr(spec.mamba_type, 'name', spec.mamba_type)).lower()}"
    return f"{word}-{kind.span_tokens}" if kind.span_tokens else word


def keys_of(hashes: Sequence[bytes], first: int, end: int, stride: int) -> npt.NDArray[np.uint64]:
    """Keys ``first`` to ``end``, uint64 [n, 2], of vLLM's block hashes; every ``stride``-th counts."""
    chosen = hashes[(first + 1) * stride - 1 : end * stride : stride]
    if not chosen:
        return np.empty((0, 2), np.uint64)
    a_hash = np.dtype({"names": ["key"], "formats": [f"V{HASH_BYTES}"], "itemsize": len(chosen[0])})
    return np.frombuffer(b"".join(chosen), a_hash)["key"].copy().view(np.uint64).reshape(-1, 2)


def device_memory(config: Any, caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """The memory under vLLM's KV tensors, uint8 [bytes]. Raises ``UnsupportedModel`` if they lie otherwise than it
    says."""
    import torch

    storage = next(iter(caches.values())).untyped_storage()
    for tensor in config.kv_cache_tensors:
        for i, layer in enumerate(tensor.layers):
            view = caches.get(layer)
            expected = storage.data_ptr() + tensor.offset + i * tensor.layer_stride
            if view is not None and view.data_ptr() != expected:
                raise UnsupportedModel(f"the KV of layer {layer!r} does not lie where vLLM's kv_cache_config says")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
