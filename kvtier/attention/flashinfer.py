"""The attention backend for CUDA: FlashInfer's paged kernels over the pools as they lie.

Owns       the mapping of a step to FlashInfer's arguments: windows, virtual batches, scales, views.
Promises   K and V are read in place (strided views of block-major pools, no copy). There is one plan a step for all
           layers of a group that attend alike. With ``check_indices`` nothing is planned on index arrays that break
           I15. Nothing is silently left out: unsupported work raises ``AttentionUnavailable``.
Does not   decide where blocks lie, choose itself (choice.py), or write K and V (kernels/write_kv.py).

Prefill and decode run the same kernels, FA2 with tensor cores, through BatchPrefillWithPagedKVCacheWrapper. A packed
step mixes both anyway. The decode wrapper's CUDA-core kernels read pages from token 0 in spite of a window, and support
some GQA ratios only. Hopper's own kernels may take steps of prompts (_flashinfer_fa3.py).

A window of W tokens is ``window_left = W - 1`` over tables that begin at the first page some query sees. A chunked
group comes as virtual batches, one entry per request and chunk, under a plain causal mask. FlashInfer fixes window,
soft cap, scale and geometry in ``plan``. Layers that differ in them are planned separately, once a step each, when the
first of them attends.

K and V in 8-bit floats are read as they are. They have one scale per KV head, which no argument of FlashInfer can
express. So scales go into the queries before and into the output after (fp8.py), and soft caps and sinks see true
scores.

Latents (MLA) have wrappers and kernels of their own (_flashinfer_latents.py), on Hopper FlashInfer's "fa3".

``batch_invariant`` keeps FlashInfer from splitting the keys of a query over thread blocks by the load of the batch. The
tile of queries still depends on the batch: FlashInfer picks it by the mean number of queries of its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.attention import _flashinfer_batch as batches, kernels
from kvtier.attention._flashinfer_fa3 import Given, Prompts
from kvtier.attention._flashinfer_latents import LatentKey, by_rows, cannot_run_latents, padded_heads
from kvtier.attention._flashinfer_plan import Held as Held, Key, Lane, PlanKey, Wrappers
from kvtier.attention.fp8 import fold_output, fold_query
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import GroupSpec
from kvtier.machine.errors import AttentionUnavailable, ConfigError, StepError

DEFAULT_WORKSPACE_BYTES = 128 << 20
"""Size of the workspace that all wrappers share; ``workspace_bytes_for`` gives the need of a geometry."""
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
"""Head sizes of K and V that the FA2 kernels compute. They compile for other sizes too. Below 64, and with 192 of V,
they throw at run time. Of a size that is no multiple of 64 they load only a part."""
HEAD_DIMS_8_BITS = ((64, 64), (128, 128), (256, 256))
"""Head sizes of K and V in 8-bit floats. They are loaded in strips of 128: of a head of 192 the last 64 would be
left out."""
DTYPES = (torch.float16, torch.bfloat16)
RING = 2
_ALIGN_BYTES = 16
_MAX_STRIDE = 2**32


class FlashInfer:
    """The backend. ``device``: the device of the pools; all its calls come with one and the same stream current.

    ``workspace_bytes``: for partial results of split keys, shared by all wrappers. ``ring``: wrappers that eager steps
    take turns on. ``batch_invariant``: keys are never split, so that a row does not depend on the rest of the batch;
    long contexts decode slower. ``check_indices``: look at every index array before it is planned (I15). ``fa3``: steps
    of prompts may run Hopper's kernels (choice.py). Raises ``AttentionUnavailable`` if FlashInfer is too old or cannot
    be imported, ``MemoryUnavailable`` for the workspace.
    """

    name = "flashinfer"
    PagedBatch = batches.PagedBatch
    GraphBatch = batches.GraphBatch

    def __init__(
        self,
        device: torch.device | str,
        *,
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        ring: int = RING,
        batch_invariant: bool = False,
        check_indices: bool = False,
        fa3: bool = False,
    ) -> None:
        self.check_indices = check_indices
        self._batch_invariant = batch_invariant
        device = torch.device(device)
        self._capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        self._wrappers = Wrappers(device, workspace_bytes, ring, split_kv=not batch_invariant)
        self._prompts = Prompts(self._wrappers, self._lane) if fa3 and not batch_invariant else None
        self._sound_views: set[tuple[Any, ...]] = set()

    def workspace_bytes(self) -> int:
        """Device bytes that it holds beside the pools; rises with the first step of each kind."""
        return self._wrappers.held().device_bytes

    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory that it holds."""
        return self._wrappers.held().pinned_bytes

    @property
    def kinds(self) -> int:
        """The number of different plans that an eager step needs, as far as was seen since ``forget``."""
        return self._wrappers.kinds(self._prompts.expected if self._prompts else set())

    def forget(self) -> None:
        """Gives up the plans of eager steps: after a trial whose kinds of plans do not come again."""
        self._wrappers.forget()
        if self._prompts:
            self._prompts.expected.clear()

    def most_bytes(self, kinds: int, captured: int) -> Held:
        """The memory that it comes to hold for ``kinds`` of plans, each also for ``captured`` sizes of decode steps."""
        return self._wrappers.most(kinds, captured)

    def enlarge_workspace(self, workspace_bytes: int) -> None:
        """Makes the shared workspace at least that large, and forgets all plans. Captured batches keep their old
        workspace. Raises ``MemoryUnavailable``."""
        self._wrappers.enlarge(workspace_bytes)

    def refill(self, batch: batches.GraphBatch, view: Any) -> None:
        """The next step of a captured batch: its arrays (``view``, the step's GroupView), and its layers' plans."""
        batch.fill(view.padded(batch.rows), view.slot_mapping)
        if self.check_indices and batch.lanes:
            batch.check()
        for lane in batch.lanes.values():
            self._wrappers.replan(lane, batch, batch.indices)

    @torch.no_grad()
    def write_kv(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        key: Tensor,
        value: Tensor,
        batch: batches.Batch,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Puts K [T, Hkv, D] and V [T, Hkv, Dv] of the step's new tokens into their slots, and nothing elsewhere.

        ``k_cache`` and ``v_cache``: a layer's views [blocks, block_tokens, Hkv, D or Dv] of the pool. Values are cast
        to its dtype, in float8 after division by ``k_scale`` and ``v_scale``, float32 [Hkv] (None: 1). Raises
        ``StepError`` if T is not the step's.
        """
        _check_rows(batch, key)
        kernels.write_kv(k_cache, v_cache, key, value, batch.slot_mapping, k_scale, v_scale)

    @torch.no_grad()
    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: batches.Batch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``query`` [T, Hq, D] to the content of its entries' blocks; returns [T, Hq, Dv] in query's
        dtype.

        Call it after ``write_kv``. ``softcap`` c turns a score s into c * tanh(s / c). ``sinks`` [Hq] adds a logit per
        query head to the softmax's denominator, without a value. Values of float8 pools are multiplied by ``k_scale``
        and ``v_scale``, float32 [Hkv]. Raises ``StepError`` if T is not the step's or a later step was planned. Raises
        ``AttentionUnavailable`` without a FlashInfer kernel, ``MemoryUnavailable``, and ``ConfigError`` for views that
        it cannot read in place. With ``check_indices`` it also raises ``InvariantBroken``. Errors of the device itself
        are torch's and FlashInfer's own.
        """
        _check_rows(batch, query)
        self._check_views(check_views, k_cache, v_cache)
        key = _plan_key(query, k_cache, v_cache, batch.group, scale, softcap, sinks)
        out = query.new_empty(*query.shape[:2], v_cache.shape[3])
        if not batch.tokens:
            return out
        logits = None if sinks is None else sinks.float().contiguous()
        given: Given = _readable(fold_query(query, k_scale)), k_cache, v_cache, logits
        if self._prompts and batch.group.attention.kind is Kind.FULL:
            key = self._prompts.key(batch, key, given, out)
        self._lane(batch, key, k_cache.shape[0]).run(batch, *given, out)
        return fold_output(out, v_scale)

    @torch.no_grad()
    def attend_latent(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: batches.Batch,
        *,
        scale: float,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``query`` [T, Hq, r + p] to latents and rotated keys; returns mixed latents [T, Hq, r].

        ``k_cache`` [blocks, block_tokens, 1, r] has the latents, ``v_cache`` [..., p] the rotated keys: together they
        are a token's key, and the latent is its value, too. Scales of float8 pools are float32 [1]. Raises what
        ``attend`` raises.
        """
        _check_rows(batch, query)
        self._check_views(check_latent_views, k_cache, v_cache)
        key = self._latent_key(query, k_cache, v_cache, batch.group, scale)
        heads, rank = query.shape[1], key.rank
        rows = query.new_zeros(len(query), key.num_heads, query.shape[2])
        rows[:, :heads, :rank] = fold_query(query[..., :rank], k_scale)
        rows[:, :heads, rank:] = fold_query(query[..., rank:], v_scale)
        out = query.new_empty(*rows.shape[:2], rank)
        if batch.tokens:
            self._lane(batch, key, k_cache.shape[0]).run(batch, rows, k_cache, v_cache, None, out)
        return fold_output(out[:, :heads], k_scale)

    @torch.no_grad()
    def attend_picked(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        lengths: Sequence[int],
        group: GroupSpec,
        *,
        scale: float,
    ) -> Tensor:
        """Attention of ``query`` [n, Hq, r + p] to the latents that each of its rows has picked; returns [n, Hq, r].

        ``slots`` int64 [n, K]: of row i the first ``lengths[i]`` count, at least one; they need not be in order.
        Slots are pages of one row here: the pools' views are read as rows that overlap, so that blocks may lie apart.
        Raises what ``attend_latent`` raises.
        """
        self._check_views(check_latent_views, k_cache, v_cache)
        key = self._latent_key(query, k_cache, v_cache, group, scale)._replace(block_tokens=1)
        k, v, every = by_rows(k_cache, v_cache)
        rows = query.new_zeros(len(query), key.num_heads, query.shape[2])
        rows[:, : query.shape[1]] = query
        out = query.new_empty(*rows.shape[:2], key.rank)
        picked = self._wrappers.picked(key, tuple(lengths), slots.shape[1])
        block_tokens = k_cache.shape[1]
        picked.take(slots // block_tokens * every[0] + slots % block_tokens * every[1])
        picked.lane.run(picked, rows, k, v, None, out)
        return out[:, : query.shape[1]]

    def _latent_key(self, query: Tensor, k: Tensor, v: Tensor, group: GroupSpec, scale: float) -> LatentKey:
        """What a wrapper is planned for; raises ``AttentionUnavailable``."""
        heads = query.shape[1]
        how: Any = {"heads": heads, "batch_invariant": self._batch_invariant}
        problem = cannot_run_latents(group, query.dtype, k.dtype, self._capability, **how)
        if problem is not None:
            raise _unavailable(group, problem)
        return LatentKey(
            group=group.name,
            block_tokens=k.shape[1],
            num_heads=padded_heads(heads),
            rank=k.shape[3],
            rotated=v.shape[3],
            q_dtype=query.dtype,
            kv_dtype=k.dtype,
            scale=float(scale),
            kernels="fa3" if self._capability[0] == 9 else "fa2",
        )

    def _lane(self, batch: batches.Batch, key: Key, blocks: int) -> Lane:
        """The wrapper that is planned for ``key`` in this batch; planned now, if it is the first layer."""
        lane = batch.lanes.get(key)
        if lane is None:
            batch.blocks = blocks
            if self.check_indices:
                batch.check()
            lane = batch.lanes[key] = batch.lane(self._wrappers, key)
        return lane

    def _check_views(self, check: Callable[[Tensor, Tensor], None], k: Tensor, v: Tensor) -> None:
        """The rules for pools that are read in place; checked once per view."""
        seen = k.data_ptr(), v.data_ptr(), k.stride(), v.stride(), k.dtype
        if seen not in self._sound_views:
            check(k, v)
            self._sound_views.add(seen)


def cannot_run(head_dim: int, head_dim_v: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> str | None:
    """Why FlashInfer's kernels cannot compute this geometry; None if they can. ``kv_dtype`` None: ``dtype``."""
    narrow = kv_dtype is not None and kv_dtype.itemsize == 1
    for computed in (dtype,) if narrow or kv_dtype is None else (dtype, kv_dtype):
        if computed not in DTYPES:
            name = str(computed).removeprefix("torch.")
            return f"it computes in float16 and bfloat16, not {name}; load the model with dtype='bfloat16'"
    known = HEAD_DIMS_8_BITS if narrow else HEAD_DIMS
    if (head_dim, head_dim_v) not in known:
        sizes = ", ".join(str(k) if k == v else f"{k} with {v}" for k, v in known)
        have = str(head_dim) if head_dim == head_dim_v else f"{head_dim} with {head_dim_v}"
        return f"it computes heads of {sizes}{' over K and V in 8 bits' if narrow else ''}, not {have}"
    return None


def check_views(k: Tensor, v: Tensor) -> None:
    """Raises ``ConfigError`` unless FlashInfer can read ``k`` and ``v`` [blocks, block_tokens, Hkv, D or Dv] in place.

    Rows are loaded 16 bytes at a time: base addresses and strides must be multiples of 16, the last dimension
    contiguous. K and V need equal strides (others take a second kernel, compiled at first use), below 2**32 elements.
    """
    _check_readable("K", k)
    _check_readable("V", v)
    if k.stride() != v.stride() or k.dtype != v.dtype:
        raise ConfigError(
            f"K has strides {k.stride()} of {k.dtype} and V {v.stride()} of {v.dtype}; they must be equal"
        )


def check_latent_views(k: Tensor, v: Tensor) -> None:
    """Raises ``ConfigError`` unless FlashInfer can read latents ``k`` and rotated keys ``v`` [..., 1, r or p] in place.

    The rules of ``check_views``, but that strides may differ.
    """
    _check_readable("the pool of latents", k)
    _check_readable("the pool of rotated keys", v)
    if k.shape[:3] != v.shape[:3] or k.shape[2] != 1 or k.dtype != v.dtype:
        raise ConfigError(
            f"latents are {k.dtype} {list(k.shape)} and rotated keys {v.dtype} {list(v.shape)}; each token has one of "
            "each, in one dtype"
        )


def _check_readable(what: str, x: Tensor) -> None:
    item = x.element_size()
    if x.stride(-1) != 1 or any(s * item % _ALIGN_BYTES or s >= _MAX_STRIDE for s in x.stride()[:-1]):
        raise ConfigError(f"{what} has strides {x.stride()} of {item} bytes; FlashInfer reads 16 bytes at a time")
    if x.data_ptr() % _ALIGN_BYTES:
        raise ConfigError(f"{what} begins at an address that is no multiple of {_ALIGN_BYTES}; FlashInfer needs one")


def workspace_bytes_for(num_qo_heads: int, num_kv_heads: int, head_dim_v: int, rows: int, multiprocessors: int) -> int:
    """An upper bound of the bytes for partial results of split keys.

    FlashInfer splits until ``2 * multiprocessors`` thread blocks are busy. Each tile of packed query heads has an
    output in float32 and a log-sum-exp for every head. Heads that share a tile counted twice up to 0.7.0; since then
    less is reserved. A graph of ``rows`` decode entries reserves its tiles' worst case.
    """
    group = num_qo_heads // num_kv_heads
    widest = 128 if head_dim_v < 256 else 64
    eager = max(1, 2 * multiprocessors // num_kv_heads) * widest
    tile = 16 if group <= 16 else 64 if group <= 64 else widest
    graph = max(2 * multiprocessors // num_kv_heads * tile, (-(-rows * group // tile) + rows) * tile)
    return num_qo_heads * max(eager, graph) * (head_dim_v + 1) * 4


def _plan_key(
    query: Tensor, k: Tensor, v: Tensor, group: GroupSpec, scale: float, softcap: float | None, sinks: Tensor | None
) -> PlanKey:
    heads, kv_heads, head_dim = query.shape[1], k.shape[2], query.shape[2]
    problem = cannot_run(head_dim, v.shape[3], query.dtype, k.dtype)
    if heads % kv_heads:
        problem = f"it needs query heads that are a multiple of the KV heads, not {heads} on {kv_heads}"
    if sinks is not None and softcap is not None:
        problem = "it has no kernel with both sinks and a soft cap"
    if problem is not None:
        raise _unavailable(group, problem)
    if sinks is not None and sinks.shape != (heads,):
        raise StepError(f"{list(sinks.shape)} sinks for {heads} query heads")
    window = group.attention.span_tokens - 1 if group.attention.kind is Kind.WINDOW else -1
    return PlanKey(
        group=group.name,
        block_tokens=k.shape[1],
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        q_dtype=query.dtype,
        kv_dtype=k.dtype,
        window_left=window,
        softcap=None if softcap is None else float(softcap),
        scale=float(scale),
        sinks=sinks is not None,
    )


def _unavailable(group: GroupSpec, problem: str) -> AttentionUnavailable:
    return AttentionUnavailable(f"FlashInfer cannot run group {group.name!r}: {problem}; use attention='reference'")


def _check_rows(batch: batches.Batch, rows: Tensor) -> None:
    if len(rows) != batch.tokens:
        raise StepError(f"got {len(rows)} tokens for a step of {batch.tokens}")


def _readable(query: Tensor) -> Tensor:
    """``query`` itself if its heads can be loaded 16 bytes at a time, else a copy."""
    item = query.element_size()
    aligned = query.data_ptr() % _ALIGN_BYTES == 0 and all(s * item % _ALIGN_BYTES == 0 for s in query.stride()[:2])
    return query if query.stride(2) == 1 and aligned else query.clone(memory_format=torch.contiguous_format)
