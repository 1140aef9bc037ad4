"""A hybrid-attention language model whose K and V live in kvtier's pools.

Owns       the weights, the tokenizer, and the forward pass over a ragged step.
Promises   forward writes K and V of every new token to its slot in every group. It returns the logits that
           transformers' own forward gives each request alone. ``load`` tries this (selfcheck.py) and refuses other
           families (``UnsupportedModel``).
Does not   schedule, sample, or hold any state between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.attention import choice
from kvtier.attention._flashinfer_latents import MOST_WORK, latent_workspace_bytes, most_work
from kvtier.attention.choice import Choice
from kvtier.attention.flashinfer import DEFAULT_WORKSPACE_BYTES, Held, workspace_bytes_for
from kvtier.attention.kernels import words
from kvtier.audit.run import AuditLevel, level_from_environment
from kvtier.geometry.dtypes import DTYPE_BYTES, dtype_name
from kvtier.geometry.kinds import Kind, RecurrentState
from kvtier.geometry.spec import CacheSpec
from kvtier.integrations.refusals import refuse_to_attend
from kvtier.integrations.transformers import latent_groups, query_heads, text_config
from kvtier.machine.device import check_device_memory, forget_last_error
from kvtier.machine.errors import AttentionUnavailable, MemoryUnavailable, NotExact
from runner.model import checkpoint, mxfp4
from runner.model.attention import NAME, StepContext, owners, scales_of, take_temperatures
from runner.model.compressed import Compressed, PlacesOfStep
from runner.model.device import ask_for_large_pages, model_device
from runner.model.fused.table import fuse
from runner.model.latents import give_back, take_latents
from runner.model.pooled.table import take
from runner.model.recorded import RecordedSteps
from runner.model.state_steps import StatesOfDecode, StatesOfStep
from runner.model.states import Mixers, turned, with_inputs

_GRAPH_ROWS = 256
"""Rows of the largest captured decode step that the attention's workspace is sized for at load; see ``make_room``."""
_TOO_LARGE = "load them in a smaller dtype or on another device"


def _spec_to_attend(hf_config: Any, weights: torch.dtype | None = None) -> CacheSpec:
    """The groups of a model that can be run, in blocks as short as can be. Raises ``UnsupportedModel``.

    ``weights``: their dtype, which need not be one that K and V can have; None: the config's.
    """
    named = "float32" if weights and str(weights).removeprefix("torch.") not in DTYPE_BYTES else None
    spec = CacheSpec.from_config(hf_config, dtype=named, block_tokens=1)
    refuse_to_attend(text_config(hf_config), spec)
    return spec


def _chosen(
    attention: str, device: Any, spec: CacheSpec, dtype: torch.dtype | None, config: Any, batch_invariant: bool
) -> Choice:
    """The backend for a model of these groups."""
    latents, attended = latent_groups(config, spec), {place[0] for place in spec.places("kv") if place is not None}
    own = "what an index picks of keys per head" if any(spec.places("index")) and latents != attended else None
    own = "compressed entries" if any(spec.places("entries")) else own
    heads = max(query_heads(config, spec)) if latents else 1
    how: Any = {"latents": latents, "heads": heads, "batch_invariant": batch_invariant, "only_torch": own}
    return choice.choose(attention, device, [g for g in spec.groups if g.name in attended], dtype, **how)


def _check_exact(spec: CacheSpec, config: Any) -> None:
    """Raises ``NotExact`` for a model with compressed entries."""
    if any((*spec.places("entries"), *spec.places("index"))):
        raise NotExact(
            f"exact=True cannot be kept for {config.model_type}: its entries and its index are computed by products "
            "whose bits depend on how a prompt is cut; leave exact out"
        )


class HybridModel:
    """A causal LM from transformers, attending through kvtier. Make one with ``load``."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = "",
        backend: Any = None,
        attention: str | Choice = "auto",
        batch_invariant: bool = False,
        kv_scales: Mapping[int, Mapping[str, Any]] | None = None,
        exact: bool = False,
    ) -> None:
        """``model``: loaded with attn_implementation="kvtier".

        ``backend``: PagedBatch, write_kv and attend; None makes one by ``attention`` and ``batch_invariant`` (see
        ``load``). ``kv_scales``: the checkpoint's, for K and V in float8. ``exact``: as in ``load``, but not tried.
        """
        spec = _spec_to_attend(model.config, model.dtype)
        if exact:
            _check_exact(spec, model.config)
            attention = choice.exactly("auto", model.device, model.dtype)
        elif backend is not None:
            name_of_it = getattr(backend, "name", getattr(backend, "__name__", "custom"))
            attention = Choice(name_of_it, "given by the caller", required=True)
        elif isinstance(attention, str):
            attention = _chosen(attention, model.device, spec, model.dtype, model.config, batch_invariant)
        self.attention: Choice = attention
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.kv_scales = kv_scales
        self.config = model.config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        text = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self.max_tokens = max_tokens(model.config)
        self.eos_token_ids = checkpoint.eos_token_ids(model)
        self.temperatures = take_temperatures(model)
        self.latents = take_latents(model, NAME, indexed=self.attention.name == "flashinfer")
        self.mixers = Mixers.of(model)
        """Its recurrent layers."""
        self.compressed = Compressed.of(model, spec)
        """Its layers with compressed entries."""
        self.unsound: Sequence[int] = ()
        """Entries of the last forward that have left a state which is not finite where others find it; ascending."""
        self.fused = fuse(model, self.device, exact)
        """Modules that run as fewer kernels, by sort."""
        self.proven: frozenset[int] = frozenset()
        """Layers whose own mask is known to be their group's; the trial at load finds them."""
        self.backend: Any = backend
        self.exact = exact
        """Whether no bit of an answer depends on hits, chunks or neighbours."""
        if backend is None or exact:
            self._make_backend(batch_invariant)
        recurs = self.mixers.layers or self.compressed.layers
        self.recorded = RecordedSteps(model) if self.device.type == "cpu" and not recurs else None
        """Its decode steps on a CPU, which may run twice: a recurrent state would advance twice, so there are none."""
        self.pooled = self._take_kernels()
        """Why its recurrent layers run by the family's code; "" if they run by FlashInfer's kernels (pooled/)."""

    @classmethod
    def load(
        cls,
        path_or_id: str | Path,
        device: str | torch.device = "cpu",
        dtype: Any = None,
        *,
        backend: Any = None,
        attention: str = "auto",
        batch_invariant: bool = False,
        self_check: bool = True,
        exact: bool = False,
    ) -> HybridModel:
        """A model from a local folder or a hub id (safetensors only), or a GGUF file.

        ``dtype``: a name or torch.dtype; None keeps the checkpoint's (of a GGUF file: float32, on a GPU bfloat16).
        ``attention``: "auto" (FlashInfer if it can run this model, else the torch reference), "flashinfer" or
        "reference". ``batch_invariant``: FlashInfer never splits a query's keys by the rest of the batch.
        ``self_check`` compares a short packed and chunked forward with the family's own attention and costs a few small
        forwards. ``exact``: no bit of K, V or logits depends on hits, chunks or neighbours; on a CPU, by an attention
        and products of its own. A trial computes 591 tokens in three ways, fewer for large models.

        Raises ``ModelLoadError`` for files that cannot be read, ``UnsupportedModel`` for families that the cache
        cannot serve, ``AttentionUnavailable`` if "flashinfer" cannot run, and ``NotExact`` if ``exact`` cannot be kept.
        If the config tells, the last three come before any weight is read. The trial may raise ``NotExact``, too.
        ``MemoryUnavailable`` means that the device has no room for the weights.
        """
        from runner.model.exact.trial import make_exact
        from runner.model.selfcheck import self_check as check

        device = model_device(device)
        ask_for_large_pages(device)
        folder = checkpoint.find_folder(path_or_id)
        config = checkpoint.read_config(folder)
        spec = _spec_to_attend(config)
        wanted = checkpoint.weights_dtype(folder, dtype, device)
        known = wanted if isinstance(wanted, torch.dtype) else None
        if exact:
            _check_exact(spec, config)
            chosen = choice.exactly(attention, device, known)
        else:
            chosen = _chosen(attention, device, spec, known, config, batch_invariant)
        model = cls(
            _weights_on(device, folder, config, wanted),
            checkpoint.read_tokenizer(folder),
            name=checkpoint.name_of(path_or_id, folder),
            backend=backend,
            kv_scales=checkpoint.kv_scales(folder),
            attention=chosen,
            batch_invariant=batch_invariant,
            exact=exact,
        )
        if self_check:
            try:
                check(model)
            except AttentionUnavailable as problem:  # such as kernels that cannot be compiled here
                model.fall_back(problem)
                check(model)
        if exact:
            make_exact(model)
        return model

    def spec(
        self, block_tokens: int = 16, dtype: Any = None, kv_scales: Mapping[int, Mapping[str, Any]] | None = None
    ) -> CacheSpec:
        """The groups of this model's cache; ``dtype`` of K and V defaults to the weights'.

        In float8, ``kv_scales`` (``CacheSpec.with_kv_scales``) default to the checkpoint's own, and without them to 1.
        States of an exact model have the inputs since their last boundary, too (states.py).
        """
        dtype = self.dtype if dtype is None or dtype == "auto" else dtype_name(dtype, "kv_cache_dtype")
        if kv_scales is None and isinstance(dtype, str) and DTYPE_BYTES[dtype] == 1:
            kv_scales = self.kv_scales
        spec = CacheSpec.from_config(self.config, dtype=dtype, block_tokens=block_tokens, kv_scales=kv_scales)
        refuse_to_attend(text_config(self.config), spec)
        if self.mixers.is_turned:
            spec = turned(spec)
        if self.exact and self.mixers.layers:
            spec = with_inputs(spec, self.config.get_text_config(decoder=True).hidden_size, dtype_name(self.dtype, ""))
        return spec

    @torch.no_grad()
    def forward(self, step: Any, cache: Any, also: Sequence[int] | npt.NDArray[np.int64] = ()) -> Tensor:
        """Logits float32 [len(step.sample_rows) + len(also), vocab], on the device.

        First come the last tokens of the sampled entries, then the tokens ``also`` of the step. ``step``: from
        kvtier.Scheduler.schedule; ``cache``: the KVCache it was scheduled for.
        """
        if step.num_tokens == 0:
            return torch.empty(0, self.vocab_size, device=self.device)
        batches, states, own = {}, {}, self.compressed.groups(cache.spec)
        for group in cache.spec.groups:
            if group.attention.kind is Kind.STATE:
                states[group.name] = StatesOfStep.from_step(step, group, self.device)
            elif group.name in own:
                batches[group.name] = PlacesOfStep.from_step(step, group, self.device)
            else:
                batches[group.name] = self.backend.PagedBatch.from_step(step, group, self.device)
        last = np.asarray(step.query_start)[1:][np.asarray(step.sample_rows, np.int64)] - 1
        context = self.context(cache, batches, self._ids(step.positions), states)
        if self.compressed.layers:
            context.starts = np.asarray(step.query_start).tolist()
            context.before = (np.asarray(step.seq_lens) - np.diff(step.query_start)).tolist()
        rows = np.concatenate([last, also]).astype(np.int64) if len(also) else last
        inputs = self._ids(step.token_ids), context, self._ids(rows)
        if self.recorded is None or not len(last) == len(rows) == step.num_tokens:
            logits = self.run(*inputs)
        else:
            logits = self.recorded.forward(self.run, *inputs)
        self.unsound = sorted(set().union(*(found.unsound for found in states.values()))) if states else ()
        return logits

    def context(
        self,
        cache: Any,
        batches: Mapping[str, Any],
        positions: Tensor,
        states: Mapping[str, StatesOfStep | StatesOfDecode] = MappingProxyType({}),
    ) -> StepContext:
        """The inputs for one forward: a batch, or what becomes of states, per group name, and positions int64 [T]."""
        return StepContext(
            spec=cache.spec,
            cache=cache,
            backend=self.backend,
            batches=batches,
            positions=positions,
            temperatures=self.temperatures,
            latents=self.latents,
            places=cache.spec.places("kv"),
            owned=owners(cache.spec),
            scales=scales_of(cache.spec, self.device),
            proven=self.proven,
            states=states,
        )

    def run(self, token_ids: Tensor, context: StepContext, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits float32 [len(rows), vocab] of the tokens ``rows``; int64 [T] and [n] on the device. No waiting.

        ``out``: the tensor for them.
        """
        self.mixers.step = self.compressed.step = context
        context.served.clear()
        try:
            output = self.model(
                input_ids=token_ids[None],
                position_ids=context.positions[None],
                use_cache=False,
                logits_to_keep=rows,
                kvtier=context,
            )
        finally:
            self.mixers.step = self.compressed.step = None
        context.check_complete()
        logits: Tensor = output.logits[0]
        return logits.float() if out is None else out.copy_(logits)

    def try_attention(self, spec: CacheSpec) -> int:
        """Tries FlashInfer on K and V of ``spec``, in two small steps; returns the kinds of plans it takes.

        If it cannot run them (head sizes in float8, kernels that cannot be compiled here), the torch reference takes
        over. If FlashInfer was asked for by name, raises ``AttentionUnavailable`` instead. 0 for other backends, which
        are not tried.
        """
        from runner.model.selfcheck import try_forward

        if self.attention.name != "flashinfer":
            return 0
        try:
            self.backend.forget()
            try_forward(self, spec)
        except AttentionUnavailable as problem:
            self.fall_back(problem)
            return 0
        kinds: int = self.backend.kinds
        self.backend.forget()
        return kinds

    def check_steps(self, tokens: int, rows: int) -> None:
        """Makes sure that FlashInfer can plan steps of this many tokens and entries; else the torch reference takes
        over, or ``AttentionUnavailable`` is raised, as in ``try_attention``."""
        if self.attention.name != "flashinfer" or not self.latents:
            return
        heads = max(query_heads(self.config, self.spec(1)))
        units = _multiprocessors(self.device)
        picking = tokens + units if self.compressed.layers else 0  # each query has keys of its own
        if max(picking, most_work(heads, max(tokens, rows), rows, units)) > MOST_WORK:
            problem = f"it cannot plan steps of {tokens:,} tokens with {heads} heads over latents"
            self.fall_back(AttentionUnavailable(f"FlashInfer: {problem}; lower max_batched_tokens"))

    def make_room(self, rows: int) -> None:
        """Enlarges FlashInfer's workspace for captured decode steps of ``rows`` rows; never shrinks it.

        Raises ``MemoryUnavailable``.
        """
        if self.attention.name == "flashinfer":
            self.backend.enlarge_workspace(_workspace_bytes(self.config, self.spec(1), self.device, rows))

    def attention_memory(self, kinds: int, captured: int) -> Held:
        """The attention's memory in the end beside the pools.

        It is for ``kinds`` of plans (``try_attention``) and ``captured`` sizes of decode steps.
        """
        if self.attention.name != "flashinfer":
            return Held(0, 0)
        found: Held = self.backend.most_bytes(kinds, captured)
        return found

    def attention_stats(self) -> dict[str, Any]:
        """The backend that attends, why it is this one, and the bytes that it holds beside weights and pools."""
        sizes = {name: getattr(self.backend, name, None) for name in ("workspace_bytes", "pinned_bytes")}
        return {"backend": self.attention.name, "reason": self.attention.reason} | {
            name: 0 if count is None else count() for name, count in sizes.items()
        }

    def fall_back(self, problem: AttentionUnavailable) -> None:
        """The torch reference takes over, for this reason; raises it if FlashInfer was asked for by name."""
        if self.attention.required:
            raise problem
        forget_last_error(self.device)
        self.latents = give_back(self.model, self.latents)
        self.attention = Choice("reference", str(problem))
        self.backend = choice.make(self.attention, self.device)

    def _make_backend(self, batch_invariant: bool) -> None:
        if self.attention.name in ("reference", "exact"):
            self.backend = choice.make(self.attention, self.device)
            return
        try:
            self.backend = choice.make(
                self.attention,
                self.device,
                workspace_bytes=max(
                    DEFAULT_WORKSPACE_BYTES,
                    _workspace_bytes(self.config, self.spec(block_tokens=1), self.device, _GRAPH_ROWS),
                ),
                batch_invariant=batch_invariant,
                check_indices=level_from_environment() >= AuditLevel.COUNTS,
            )
        except AttentionUnavailable as problem:
            self.fall_back(problem)

    def _take_kernels(self) -> str:
        """Gives recurrent layers FlashInfer's kernels if they run right; returns why not, or ""."""
        if self.attention.name != "flashinfer":
            return f"the attention is {self.attention.name}"
        states = [g.attention for g in self.spec(1).groups if isinstance(g.attention, RecurrentState)]
        return take(self.mixers, states[0].parts, self.device, self.dtype) if states else "it has no recurrent layers"

    def _ids(self, array: Any) -> Tensor:
        """A step's integer array as int64 on the device."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.array(array, np.int64))
        staged = words.staged(len(array), torch.long, self.device)
        staged.numpy()[:] = array
        return words.sent(staged, self.device)


def max_tokens(config: Any) -> int | None:
    """The longest sequence that a model of this config was made for; None if the family names none."""
    try:
        return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    except NotImplementedError:
        return None


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _workspace_bytes(config: Any, spec: CacheSpec, device: torch.device, rows: int) -> int:
    """Bytes of FlashInfer's shared workspace: the greatest need of a layer for graphs of ``rows`` rows."""
    units = _multiprocessors(device)
    most, latents = 0, latent_groups(config, spec)
    for heads, place in zip(query_heads(config, spec), spec.places("kv"), strict=True):
        if place is None:
            continue
        group = spec.group(place[0])
        if place[0] in latents:
            most = max(most, latent_workspace_bytes(group.head_dim, units))
            continue
        most = max(most, workspace_bytes_for(heads, group.num_kv_heads, group.head_dims[1], rows, units))
    return most


def _weights_on(device: str, folder: Path, config: Any, dtype: Any) -> Any:
    """The model of a folder, in this dtype; raises ``MemoryUnavailable``."""
    packed = mxfp4.stays_packed(config, device, dtype)
    taken = checkpoint.weights_bytes(folder, dtype, packed=packed or not mxfp4.is_stored(config))
    check_device_memory(device, taken, "loading the weights", _TOO_LARGE)
    weights = checkpoint.read_model(folder, config, dtype, NAME, packed=packed)
    try:
        return weights.to(device)
    except torch.OutOfMemoryError as problem:  # another process was faster, or it is not there in one piece
        raise MemoryUnavailable(f"the weights do not fit on {device} ({problem}); {_TOO_LARGE}") from problem
