"""``LLM``: the offline API, as vLLM users know it.

Owns       one model, one cache, one engine.
Promises   all prompts of a call are checked before the first is queued; after any error, or an interrupt, the next
           call finds an empty, working engine.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kvtier import CacheSpec, ConfigError, InvalidRequest, KVCache, Request, Scheduler
from kvtier._integers import shown
from kvtier.attention import choice
from kvtier.attention.flashinfer import Held
from kvtier.coordinator.scheduler import check_limits
from runner import checkpoint, graphs, memory, options
from runner.device import model_device
from runner.engine import Engine
from runner.graphs import bucket_sizes, captured, why_eager
from runner.kv_scales import check_kv_options
from runner.memory import Memory
from runner.model import HybridModel
from runner.outputs import RequestOutput
from runner.sampling import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A hybrid-attention language model served offline, with its KV cache in two tiers.

    ``model``             a local folder or a hub id (safetensors), or a ``HybridModel``.
    ``device``            "auto" (CUDA if there is one), "cpu" or "cuda:N".
    ``device_memory``     for the device pools and what serves them (the attention's workspaces and index arrays,
                          captured decode steps, checksums): bytes or text such as "8GiB"; or blocks per group, for the
                          pools alone; None picks a share of what is free.
    ``host_memory``       for the host tier and pinned buffers, likewise; 0 turns the tier off.
    ``block_tokens``      tokens per block.
    ``max_batched_tokens``  tokens a step computes at most; longer prompts run in chunks of this.
    ``max_running``       requests that run at the same time.
    ``dtype``             of weights and KV: "float32", "float16", "bfloat16"; None keeps the checkpoint's.
    ``kv_cache_dtype``    of KV where it is another: "fp8" (e4m3) takes half the room of bfloat16 in both tiers.
    ``kv_scales``         for "fp8": {layer: {"k": ..., "v": ...}} or a file of that (`kvtier calibrate`); None takes
                          the checkpoint's k_scale and v_scale if it has any, else 1.
    ``attention``         "auto" (FlashInfer where it can run this model, else the torch reference; ``stats`` says which
                          and why), "flashinfer" or "reference".
    ``batch_invariant``   FlashInfer never splits a query's keys by what else is in the batch.
    ``cuda_graphs``       with FlashInfer, decode steps are captured at start-up and replayed; False runs all eagerly.
    ``cache_options``     further keyword arguments of ``KVCache``: store, verify, on_load_error, deadline_s, model_id,
                          key_secret, copy_engine.

    Options of vLLM are taken with the value that says what is so here (``tensor_parallel_size=1``,
    ``enable_prefix_caching=True``, ``trust_remote_code=False``); otherwise the error says what to use instead
    (``runner.options``). All that the config tells is checked before weights are read.

    Raises ``ModelLoadError``, ``UnsupportedModel``, ``AttentionUnavailable``, ``ConfigError``, ``MemoryUnavailable``.
    """

    def __init__(
        self,
        model: str | Path | HybridModel,
        device: str = "auto",
        device_memory: Memory | None = None,
        host_memory: Memory | None = None,
        block_tokens: int = 16,
        max_batched_tokens: int = 8192,
        max_running: int = 256,
        dtype: Any = None,
        kv_cache_dtype: Any = None,
        kv_scales: str | Path | Mapping[Any, Any] | None = None,
        attention: str = "auto",
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
        **cache_options: Any,
    ) -> None:
        mine = [name for name in inspect.signature(LLM).parameters if name not in ("model", "cache_options")]
        cache_options = options.cache_options(cache_options, mine)
        max_batched_tokens, max_running = check_limits(max_batched_tokens, max_running)
        options.check_flags(batch_invariant=batch_invariant, cuda_graphs=cuda_graphs)
        scales = check_kv_options(kv_cache_dtype, kv_scales)
        device = _device(model, device)
        if host_memory is not None and options.has_tier(host_memory):
            options.check_host_link(device, cache_options)
        config, weights_dtype = _config(model, dtype, attention)
        kv_dtype = weights_dtype if kv_cache_dtype in (None, "auto") else kv_cache_dtype
        spec = CacheSpec.from_config(config, kv_dtype, block_tokens, scales)
        options.check_cache(spec, device, device_memory, host_memory, cache_options)
        if not isinstance(model, HybridModel):
            model = HybridModel.load(model, device, dtype, attention=attention, batch_invariant=batch_invariant)
        self.model = model
        self.spec = self.model.spec(block_tokens, kv_cache_dtype, scales)
        kinds = self.model.try_attention(self.spec)
        capturing = cuda_graphs and why_eager(self.model) is None
        if capturing:
            self.model.make_room(max_running)
        in_graphs = graphs.memory(self.model, self.spec, max_running) if capturing else 0
        if device_memory is None:
            auto = memory.automatic_device(self.model.device)
            device_memory = auto + self.model.attention_stats()["workspace_bytes"]  # is no longer free
        if host_memory is None:
            host_memory = memory.automatic_host(self.model.device)
        held = [
            Held(in_graphs, 0),
            self.model.attention_memory(kinds, len(bucket_sizes(max_running)) if capturing else 0),
        ]
        if self.model.attention.name == "flashinfer":
            held.append(
                memory.index_arrays(
                    self.spec, device_memory, max_running, max_batched_tokens, self.model.max_tokens, capturing
                )
            )
        if self.model.device.type == "cuda":
            verifies = cache_options.get("verify") == "full"
            held.append(memory.staging(self.spec, host_memory, verifies))
        with memory.named_as_given():
            self.cache = KVCache(
                self.spec,
                device=str(self.model.device),
                **memory.pool_sizes(device_memory, host_memory, memory.total(*held)),
                model_id=cache_options.pop("model_id", self.model.name),
                **cache_options,
            )
        try:
            self.scheduler = Scheduler(self.cache, max_batched_tokens, max_running)
            self.graphs = captured(self.model, self.cache, max_running) if capturing else None
        except BaseException:
            self.cache.close()
            raise
        self.engine = Engine(self.model, self.cache, self.scheduler, self.graphs)
        self._ids = itertools.count()
        self._turn = threading.Lock()  # calls from several threads take turns; each call is one batch

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.model.tokenizer

    # --- generating -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts; outputs are in the order of the prompts.

        A prompt is text, a list of token ids, or {"prompt": text} or {"prompt_token_ids": ids}, the latter two with an
        optional "cache_salt" and "priority". Raises ``InvalidRequest`` and ``RequestTooLarge`` before any prompt runs.
        """
        called_s = time.perf_counter()
        rows = _as_list(prompts)
        params = self._params_for(rows, sampling_params)
        requests = [self._request(prompt, p) for prompt, p in zip(rows, params, strict=True)]
        for request in requests:
            self.scheduler.check(request)
        with self._turn, self.engine.interrupts.held():
            return self._run(requests, params, called_s, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of {"role", "content"}) or several, through the model's chat template.

        Raises as ``generate`` does, and ``InvalidRequest`` for messages that the template refuses.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise InvalidRequest("this model has no chat template; use generate() with the prompt written out")
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequest('messages must be a list of {"role": ..., "content": ...}, or a list of such lists')
        many = not isinstance(messages[0], Mapping)
        chats = messages if many else [messages]
        _check_unicode(chats)
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        try:
            prompts = [self.tokenizer.apply_chat_template(list(chat), **options) for chat in chats]
        except Exception as problem:  # a checkpoint's template raises what it likes
            text = " ".join(f"{type(problem).__name__}: {problem}".split())
            raise InvalidRequest(f"the chat template refuses these messages ({text})") from problem
        return self.generate(prompts, sampling_params, use_tqdm)

    def _run(
        self, requests: list[Request], params: list[SamplingParams], called_s: float, use_tqdm: bool
    ) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        self.engine.drop_all()  # empty already, unless something has raised where nothing may
        before = self.engine.computed_tokens
        shape: dict[str, Any] = {"disable": not use_tqdm, "dynamic_ncols": True, "miniters": 0}
        try:
            for request, p in zip(requests, params, strict=True):
                self.engine.add(request, p, called_s)
            with tqdm(total=len(requests), desc="Processed prompts", **shape) as bar:
                while self.engine.has_requests():
                    outputs = self.engine.step()
                    done |= {output.request_id: output for output in outputs}
                    bar.set_postfix_str(f"{self.engine.computed_tokens - before:,} tokens computed", refresh=False)
                    bar.update(len(outputs))
        except BaseException:
            self.engine.drop_all()
            raise
        return [done[request.request_id] for request in requests]

    def _params_for(self, rows: list[Prompt], params: Any) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * len(rows)
        if not isinstance(params, Iterable):
            raise InvalidRequest(f"give one SamplingParams, or one per prompt, not {shown(params)}")
        params = list(params)
        if len(params) != len(rows) or not all(isinstance(p, SamplingParams) for p in params):
            raise InvalidRequest(
                f"give one SamplingParams, or one per prompt: {len(rows)} prompts, {len(params)} params"
            )
        return params

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        extra = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        given = [extra.pop(name) for name in ("prompt", "prompt_token_ids") if name in extra]
        if len(given) != 1 or set(extra) - {"cache_salt", "priority"}:
            raise InvalidRequest(
                "a prompt as a dict has either prompt or prompt_token_ids, and may have cache_salt and priority; this "
                f"one has {sorted(map(str, prompt)) if isinstance(prompt, Mapping) else 'neither'}"
            )
        ids = self.encode(given[0])
        name = f"{next(self._ids)}"
        limit, length = self.model.max_tokens, len(ids)
        if limit is not None and length >= limit:
            raise InvalidRequest(f"the prompt has {length:,} tokens, but this model was made for {limit:,}; shorten it")
        most = params.max_tokens if limit is None else min(params.max_tokens, limit - length)
        eos = () if params.ignore_eos else self.model.eos_token_ids
        return Request(name, ids, most, eos_token_ids=eos, **extra)

    def encode(self, prompt: Any) -> np.ndarray:
        """Token ids of a prompt, int64 [n]; raises ``InvalidRequest`` for ids that the vocabulary does not have."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("this model's folder has no tokenizer; give token ids")
            _check_unicode(prompt)
            prompt = self.tokenizer(prompt)["input_ids"]
        if isinstance(prompt, np.ma.MaskedArray):
            raise InvalidRequest("a prompt is a masked array; give the ids that count, as compressed() does")
        if isinstance(prompt, (list, tuple)) and any(isinstance(x, (bool, np.bool_)) for x in prompt):
            raise InvalidRequest(f"a prompt has True or False among its token ids: {shown(prompt)}")
        try:
            ids = np.asarray(prompt)
        except Exception as problem:  # whatever an object's __array__ raises
            raise InvalidRequest(f"a prompt is text or a list of token ids: {problem}") from None
        if ids.ndim != 1 or len(ids) == 0 or ids.dtype.kind not in "iu":
            if ids.size == 0:
                raise InvalidRequest("a prompt is empty; give at least one token")
            raise InvalidRequest(
                f"a prompt is neither text nor a list of token ids in 0..{self.model.vocab_size - 1}: {shown(prompt)}"
            )
        if ids.min() < 0 or ids.max() >= self.model.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.model.vocab_size)][0]
            raise InvalidRequest(
                f"token id {bad} is out of the vocabulary; this model has ids 0..{self.model.vocab_size - 1}"
            )
        return ids

    # --- looking in, and leaving ------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What both tiers and the engine are doing, as nested plain values."""
        return {
            "model": self.model.name,
            "device": str(self.model.device),
            "attention": self.model.attention_stats(),
            "graphs": None if self.graphs is None else self.graphs.stats(),
            "cache": self.cache.stats().to_dict(),
            "engine": {
                "computed_tokens": self.engine.computed_tokens,
                "generated_tokens": self.engine.generated_tokens,
                "forward_s": self.engine.forward_s,
            },
        }

    def close(self) -> None:
        """Ends all copies and gives the memory back. Calling it again does nothing."""
        self.cache.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _device(model: str | Path | HybridModel, device: str) -> str:
    """The full name of the device that ``model`` is on, or will be."""
    if isinstance(model, HybridModel):
        return str(model.device)
    if isinstance(device, str) and device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return model_device(device)


def _config(model: str | Path | HybridModel, dtype: Any, attention: str) -> tuple[Any, torch.dtype | str]:
    """The config of a model, loaded or not, and the dtype of its weights; "auto" for what the checkpoint says.

    Raises ``ConfigError`` for a dtype or an attention that there is not, or that a loaded model has not.
    """
    weights_dtype = checkpoint.torch_dtype(dtype)
    choice.check_name(attention)
    if not isinstance(model, HybridModel):
        return checkpoint.read_config(checkpoint.find_folder(model, ["config.json"])), weights_dtype
    for name, asked, has in (("attention", attention, model.attention.name), ("dtype", weights_dtype, model.dtype)):
        if asked not in ("auto", has):
            raise ConfigError(f"this model was loaded with {name}={has!r}; load it with {name}={asked!r}")
    return model.config, model.dtype


def _check_unicode(prompt: Any) -> None:
    """Raises ``InvalidRequest`` if text, or text anywhere in messages, cannot be encoded."""
    if isinstance(prompt, str):
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise InvalidRequest("a prompt is no Unicode text: it holds half of a surrogate pair; decode it anew")
    elif isinstance(prompt, Mapping):
        _check_unicode([*prompt.keys(), *prompt.values()])
    elif isinstance(prompt, (list, tuple)):
        for part in prompt:
            _check_unicode(part)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be text, token ids, or a list of those, got {shown(prompts)}")
    rows = list(prompts)
    if not rows:
        raise InvalidRequest("there is no prompt; give text, token ids, or a list of those")
    return [rows] if all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in rows) else rows
