"""A hybrid-attention language model whose K and V live in kvtier's pools.

Owns       the weights, the tokenizer, and the forward pass over a ragged step.
Promises   forward writes K and V of every new token to its slot in every group and returns the logits that
           transformers' own forward gives each request alone; a family for which that does not hold is refused by
           ``load`` (``UnsupportedModel``), because it is tried there (selfcheck.py).
Does not   schedule, sample, or hold any state between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.attention import reference
from kvtier.device import resolve_device
from kvtier.spec import DTYPE_BYTES, CacheSpec, dtype_name
from runner import checkpoint
from runner.attention import NAME, StepContext, Temperature, owners, scales_of


class HybridModel:
    """A causal LM from transformers, attending through kvtier. Make one with :meth:`load`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = "",
        backend: Any = None,
        kv_scales: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """``model``: loaded with attn_implementation="kvtier". ``backend``: PagedBatch, write_kv and attend.

        ``kv_scales``: those that came with the checkpoint, for K and V in float8.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.kv_scales = kv_scales
        self.backend = reference if backend is None else backend
        self.config = model.config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        text = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        self.max_tokens = _max_tokens(text)
        self.eos_token_ids = checkpoint.eos_token_ids(model)
        self.temperatures = take_temperatures(model)

    @classmethod
    def load(
        cls,
        path_or_id: str | Path,
        device: str | torch.device = "cpu",
        dtype: Any = None,
        *,
        backend: Any = None,
        self_check: bool = True,
    ) -> HybridModel:
        """A model from a local folder or a hub id, safetensors only.

        ``dtype``: a name or torch.dtype; None keeps the checkpoint's. ``self_check`` compares a short packed and
        chunked forward with the family's own attention and costs a few small forwards.
        Raises ``ModelLoadError`` for files that cannot be read and ``UnsupportedModel`` for families that the cache
        cannot serve, the latter before any weight is read where the config tells.
        """
        from runner.selfcheck import self_check as check

        device = resolve_device(device)
        folder = checkpoint.find_folder(path_or_id)
        config = checkpoint.read_config(folder)
        CacheSpec.from_config(config, block_tokens=1)
        weights = checkpoint.read_model(folder, config, checkpoint.torch_dtype(dtype), NAME)
        name = Path(path_or_id).name if Path(path_or_id).exists() else str(path_or_id)
        model = cls(
            weights.to(device),
            checkpoint.read_tokenizer(folder),
            name=name,
            backend=backend,
            kv_scales=checkpoint.kv_scales(folder),
        )
        if self_check:
            check(model)
        return model

    def spec(
        self, block_tokens: int = 16, dtype: Any = None, kv_scales: Mapping[int, Mapping[str, Any]] | None = None
    ) -> CacheSpec:
        """The groups of this model's cache; ``dtype`` of K and V defaults to the weights'.

        In float8, ``kv_scales`` (``CacheSpec.with_kv_scales``) default to the checkpoint's own, and those to 1.
        """
        dtype = self.dtype if dtype is None or dtype == "auto" else dtype_name(dtype, "kv_cache_dtype")
        if kv_scales is None and isinstance(dtype, str) and DTYPE_BYTES[dtype] == 1:
            kv_scales = self.kv_scales
        return CacheSpec.from_config(self.config, dtype=dtype, block_tokens=block_tokens, kv_scales=kv_scales)

    @torch.no_grad()
    def forward(self, step: Any, cache: Any) -> Tensor:
        """Logits float32 [len(step.sample_rows), vocab], on the device, of the last token of each sampled entry.

        ``step``: as kvtier.Scheduler.schedule gives it; ``cache``: the KVCache it was scheduled for.
        """
        if step.num_tokens == 0:
            return torch.empty(0, self.vocab_size, device=self.device)
        context = self._context(step, cache)
        last = np.asarray(step.query_start)[1:][np.asarray(step.sample_rows, np.int64)] - 1
        output = self.model(
            input_ids=self._ids(step.token_ids)[None],
            position_ids=context.positions[None],
            use_cache=False,
            logits_to_keep=self._ids(last),
            kvtier=context,
        )
        context.check_complete()
        logits: Tensor = output.logits[0]
        return logits.float()

    def _context(self, step: Any, cache: Any) -> StepContext:
        """One PagedBatch per group, shared by the group's layers."""
        spec: CacheSpec = cache.spec
        return StepContext(
            spec=spec,
            cache=cache,
            backend=self.backend,
            batches={g.name: self.backend.PagedBatch.from_step(step, g, self.device) for g in spec.groups},
            positions=self._ids(step.positions),
            temperatures=self.temperatures,
            owned=owners(spec),
            scales=scales_of(spec, self.device),
        )

    def _ids(self, array: Any) -> Tensor:
        """A step's integer array as int64 on the device."""
        return torch.as_tensor(array).to(self.device, torch.long, non_blocking=True)


def _max_tokens(text: Any) -> int | None:
    """The longest sequence the model was made for; None where the family names none."""
    try:
        return getattr(text, "max_position_embeddings", None)
    except NotImplementedError:
        return None


def take_temperatures(model: torch.nn.Module) -> dict[int, Temperature]:
    """Per layer, the query scale that the family computes from its own token count, taken over by our attention.

    Llama 4 scales queries of its layers without positions by arange + cached length: wrong for packed requests.
    """
    found: dict[int, Temperature] = {}
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "layer_idx"):
            if not module.use_rope:
                found[int(module.layer_idx)] = Temperature(float(module.floor_scale), float(module.attn_scale))
            module.attn_temperature_tuning = False
    return found
