"""A model, its cache and its engine, put together: the common part of ``LLM`` and ``AsyncLLM``.

Owns       one model, one cache, one engine and its thread.
Promises   options are checked before weights are read, and a prompt before anything is queued.
Does not   wait for answers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from kvtier import CacheSpec, ConfigError, InvalidRequest, KVCache, KVTierError, Request, Scheduler
from kvtier.attention import choice
from kvtier.attention.flashinfer import Held
from kvtier.attention.names import check_name
from kvtier.cache.kv_events.config import KVEventsConfig
from kvtier.cache.kv_events.publisher import KVEventPublisher
from kvtier.coordinator.running import check_limits
from kvtier.integrations.refusals import refuse_to_attend
from kvtier.machine.integers import shown
from runner.engine import memory, options
from runner.engine.answers import Answer, Answers
from runner.engine.explanations import Explanations, RequestExplanation
from runner.engine.inputs import Given, Inputs
from runner.engine.loop import Engine
from runner.engine.memory import Memory
from runner.engine.shares import Shares
from runner.engine.stops import StopStrings
from runner.engine.streams import Mail
from runner.engine.thread import EngineThread
from runner.engine.words import Words
from runner.errors import ModelLoadError
from runner.model import checkpoint, graphs, identity as model_identity
from runner.model.device import model_device
from runner.model.graphs import bucket_sizes, captured, why_eager
from runner.model.hybrid import HybridModel
from runner.model.kv_scales import check_kv_options
from runner.sampling.bad_words import tokens_of
from runner.sampling.grammars.matching import Grammar, Meter
from runner.sampling.grammars.structured import LIMIT_S, GrammarCompiler
from runner.sampling.params import SamplingParams
from runner.sampling.state import SamplingState

JOURNAL_EVENTS = 2**15
"""Events kept for ``explain``, unless told otherwise: some 4,000 requests."""
STEP_TOKENS, STEP_TOKENS_OF_A_CPU = 8192, 2048
"""Tokens of a step at most, unless told otherwise. The C library gives arrays of more than 32 MiB back to the system
and fetches them anew for each layer. With 8,192 tokens that is a tenth of a prompt's time on a CPU."""
STORE_S = 10.0
"""Time that ``close`` gives to what is on its way to a remote."""
PROMPT_LOGITS_BYTES = 2**30
"""The most bytes of one prompt's logits, in float32."""


class _Steps(NamedTuple):
    """The maxima of steps: tokens, rows, the attention's kinds of plans, and whether decodes are captured."""

    tokens: int
    rows: int
    kinds: int
    captured: bool


class Service:
    """Base of ``LLM`` and ``AsyncLLM``, which document the options."""

    settles = False
    """Whether the engine's thread goes on, without requests, until all copies have ended."""
    shares_steps = False
    """Whether callers of many answers leave steps to callers of few."""

    def __init__(
        self,
        model: str | Path | HybridModel | None = None,
        device: str = "auto",
        device_memory: Memory | None = None,
        host_memory: Memory | None = None,
        block_tokens: int = 16,
        max_batched_tokens: int | None = None,
        max_running: int = 256,
        dtype: Any = None,
        kv_cache_dtype: Any = None,
        kv_scales: str | Path | Mapping[Any, Any] | None = None,
        attention: str = "auto",
        batch_invariant: bool = False,
        exact: bool = False,
        cuda_graphs: bool = True,
        grammar_limit_s: float = LIMIT_S,
        kv_events_config: KVEventsConfig | Mapping[str, Any] | str | None = None,
        **cache_options: Any,
    ) -> None:
        if model is None:
            raise ModelLoadError(
                f"{type(self).__name__} needs the argument model: a model is given as a folder or a hub id, or as a "
                "HybridModel; the bundled demo model's folder is kvtier.needle.weights_path()"
            )
        mine = [name for name in inspect.signature(Service).parameters if name not in ("model", "cache_options")]
        cache_options = options.cache_options(cache_options, mine)
        options.check_flags(batch_invariant=batch_invariant, exact=exact, cuda_graphs=cuda_graphs)
        options.check_seconds(grammar_limit_s=grammar_limit_s)
        scales = check_kv_options(kv_cache_dtype, kv_scales)
        device = _device(model, device)
        max_batched_tokens, max_running = check_limits(_step_tokens(max_batched_tokens, device), max_running)
        has_remote = cache_options.get("remote_uri") is not None
        if options.needs_tier(host_memory, has_remote):
            options.check_host_link(device, cache_options)
        config, weights_dtype = _config(model, device, dtype, attention, bool(exact))
        kv_dtype = weights_dtype if kv_cache_dtype in (None, "auto") else kv_cache_dtype
        spec = CacheSpec.from_config(config, kv_dtype, block_tokens, scales)
        refuse_to_attend(config.get_text_config(decoder=True), spec)
        known = {"model_id": "of its weights"} if has_remote and not isinstance(model, HybridModel) else {}
        kv_events = _kv_events(kv_events_config, spec)
        options.check_cache(spec, device, device_memory, host_memory, known | cache_options)
        source = model
        if not isinstance(model, HybridModel):
            options_of_it: Any = {"attention": attention, "batch_invariant": batch_invariant, "exact": bool(exact)}
            model = HybridModel.load(model, device, dtype, **options_of_it)
        self.model = model
        if has_remote and not isinstance(source, HybridModel) and "model_id" not in cache_options:
            cache_options["model_id"] = model_identity.model_id(model, checkpoint.find_folder(source))
        self.spec = self.model.spec(block_tokens, kv_cache_dtype, scales)
        steps = self._prepare_steps(max_batched_tokens, max_running, cuda_graphs)
        self.cache = self._new_cache(device_memory, host_memory, steps, cache_options)
        try:
            self.scheduler = Scheduler(self.cache, max_batched_tokens, max_running)
            self.graphs = captured(self.model, self.cache, max_running) if steps.captured else None
            self.kv_events = None if kv_events is None else KVEventPublisher(self.cache, kv_events)
        except BaseException:
            self.cache.close()
            raise
        self._start_engine(grammar_limit_s)

    def _prepare_steps(self, max_tokens: int, max_rows: int, cuda_graphs: bool) -> _Steps:
        """The model's attention tried, and room made for captured decodes, before pools are sized."""
        self.model.check_steps(max_tokens, max_rows)
        kinds = self.model.try_attention(self.spec)
        capturing = cuda_graphs and why_eager(self.model) is None
        if capturing:
            self.model.make_room(max_rows)
        return _Steps(max_tokens, max_rows, kinds, capturing)

    def _new_cache(
        self, device_memory: Memory | None, host_memory: Memory | None, steps: _Steps, cache_options: dict[str, Any]
    ) -> KVCache:
        """Pools of the given memory, or of a share of the free memory, less the other memory held there."""
        model = self.model
        if device_memory is None:
            auto = memory.automatic_device(model.device)
            device_memory = auto + model.attention_stats()["workspace_bytes"]  # is no longer free
        if host_memory is None:
            host_memory = memory.automatic_host(model.device)
        held = [
            Held(graphs.memory(model, self.spec, steps.rows) if steps.captured else 0, 0),
            model.attention_memory(steps.kinds, len(bucket_sizes(steps.rows)) if steps.captured else 0),
        ]
        if model.attention.name == "flashinfer":
            sizes = steps.rows, steps.tokens, model.max_tokens, steps.captured
            held.append(memory.index_arrays(self.spec, device_memory, *sizes))
        if model.device.type == "cuda":
            held.append(memory.staging(self.spec, host_memory, cache_options.get("verify") == "full"))
        with memory.named_as_given():
            return KVCache(
                self.spec,
                device=str(model.device),
                **memory.pool_sizes(device_memory, host_memory, memory.total(*held)),
                **_named(model, _defaults(model) | cache_options),
            )

    def _start_engine(self, grammar_limit_s: float) -> None:
        """The engine, what turns prompts into requests and tokens into text, and last the engine's thread."""
        shares = Shares() if self.shares_steps else None
        self.engine = Engine(self.model, self.cache, self.scheduler, self.graphs, self.kv_events, shares)
        self.explanations = Explanations(self.cache.journal, self.engine.pace.seconds)
        self.inputs = Inputs(self.model)
        self.words = Words(self.tokenizer)
        self.grammars = GrammarCompiler(
            self.tokenizer, self.model.vocab_size, self.model.eos_token_ids, grammar_limit_s
        )
        if self.cache.has_remote:
            self.cache.estimate_compute(self.engine.pace.seconds)
        self.thread = EngineThread(self.engine, self.settles or self.cache.has_remote)
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.model.tokenizer

    def encode(self, prompt: Any) -> Any:
        """Token ids of a prompt, int64 [n]; raises ``InvalidRequest`` for ids that the vocabulary does not have."""
        return self.inputs.encode(prompt)

    # --- from prompts to answers ------------------------------------------------------------------

    def _requests(
        self, given: Given, params: SamplingParams, grammar: Grammar | None, request_id: str | None = None
    ) -> tuple[str, list[tuple[Request, SamplingState]]]:
        """The requests of one prompt, one for each answer, checked; and their common name. ``grammar``: what
        ``params.structured_outputs`` compiles to."""
        number = next(self._ids)
        name = f"{number}" if request_id is None else request_id
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"request_id must be a non-empty string, got {shown(name)}")
        own = name if request_id is None else f"{name}#{number}"  # a name may be used again before its end is reported
        limit, length = self.inputs.max_tokens, len(given.token_ids)
        most = params.max_tokens if limit is None else min(params.max_tokens, limit - length)
        eos = () if params.ignore_eos and grammar is None else self.model.eos_token_ids
        ends = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        params.check_token_ids(self.model.vocab_size)
        words = tokens_of(params.bad_words or (), self.tokenizer)
        if params.prompt_logprobs is not None:
            self._check_prompt_logprobs(length)
        rows, meter = [], Meter()
        for index in range(params.n):
            one, beside = params if params.n == 1 else params.child(index), dict(given.beside)
            if one.prompt_logprobs is not None and index == 0:
                beside["extra_keys"] = ("prompt_logprobs", number)  # cached content has no logits
            elif one.prompt_logprobs is not None:
                one = replace(one, prompt_logprobs=None)  # the first answer tells them
            request = Request(
                own if params.n == 1 else f"{own}-{index}", given.token_ids, most, eos_token_ids=ends, **beside
            )
            self.scheduler.check(request)
            matcher = None if grammar is None else grammar.matcher(meter)
            rows.append((request, SamplingState.of(one, request.tokens, ends, matcher, words)))
        return name, rows

    def _check_prompt_logprobs(self, length: int) -> None:
        most = PROMPT_LOGITS_BYTES // (4 * self.model.vocab_size)
        if length > most:
            raise InvalidRequest(
                f"prompt_logprobs needs the logits of all tokens of a prompt, {most:,} at most with this vocabulary; "
                f"this prompt has {length:,}"
            )

    def _submit(
        self,
        given: Given,
        name: str,
        rows: list[tuple[Request, SamplingState]],
        mail: Mail,
        arrived_s: float,
        share: str | None = None,
    ) -> Answers:
        """Queues all requests of one prompt. ``share``: as in ``AsyncLLM.generate``."""
        strings = rows[0][1].params.stop_strings
        stop = StopStrings(strings) if strings else None
        answers = Answers(
            name,
            given.text,
            given.token_ids,
            [Answer(i, request, state, mail, self.words, stop) for i, (request, state) in enumerate(rows)],
            arrived_s,
        )
        self.explanations.name(name, [answer.request.request_id for answer in answers.answers])
        self.thread.submit(
            [(answer.request, answer.state, answer.stream) for answer in answers.answers],
            share or rows[0][0].request_id,
        )
        return answers

    # --- looking in, and leaving ------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether requests are served: False once the engine has died or is closed."""
        return self.thread.is_alive

    @property
    def death(self) -> BaseException | None:
        """The exception that the engine has died of, if it has; nothing is served any more then."""
        return self.thread.death

    def stats(self) -> dict[str, Any]:
        """The state of both tiers and the engine, as nested plain values."""
        return {
            "model": self.model.name,
            "device": str(self.model.device),
            "attention": self.model.attention_stats(),
            "fused": dict(self.model.fused),
            "graphs": None if self.graphs is None else self.graphs.stats(),
            "recorded": None if self.model.recorded is None else self.model.recorded.stats(),
            "cache": self.cache.stats().to_dict(),
            "engine": {
                "computed_tokens": self.engine.computed_tokens,
                "generated_tokens": self.engine.generated_tokens,
                "forward_s": self.engine.forward_s,
            },
        }

    def explain(self, request_id: str, owner: str | None = "") -> RequestExplanation:
        """Where the time of a request went: its hits, loads, waits, preemptions, and what it pushed out.

        ``request_id``: of its ``RequestOutput``, while the request is served and for some thousand requests afterwards.
        ``owner``: who asks, if requests are their owners' alone (``Explanations.name``); None: one who may see all.
        Raises ``UnknownRequest``, and ``ConfigError`` if the model was loaded with ``journal_events=0``. Any thread may
        call it.
        """
        return self.explanations.explain(request_id, owner)

    def settle(self) -> None:
        """Waits until all requests are reported and all copies have ended: for figures that count them."""
        self.thread.settle()

    def close(self) -> None:
        """Ends the step under way, all requests and all copies, and gives the memory back. Twice does nothing.

        If no request is open, what is on its way to a remote (``remote_uri``) has some seconds to get there.
        """
        if self.cache.has_remote and self.thread.is_alive:
            with suppress(KVTierError):
                self.thread.call(self.cache.flush_remote)
                self.thread.end_copies(STORE_S)
        self.grammars.close()
        self.thread.close()
        if self.kv_events is not None:
            self.kv_events.close()
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _defaults(model: HybridModel) -> dict[str, Any]:
    """Options of the cache, unless others are given."""
    return {"model_id": model.name, "journal_events": JOURNAL_EVENTS}


def _named(model: HybridModel, cache_options: dict[str, Any]) -> dict[str, Any]:
    """``cache_options``, whose ``model_id`` names an exact model's arithmetic, too, whoever has chosen it."""
    if model.exact:
        cache_options["model_id"] = f"{cache_options['model_id']}/{model_identity.arithmetic(model.dtype)}"
    return cache_options


def _device(model: str | Path | HybridModel, device: str) -> str:
    """The full name of the model's device, now or later."""
    if isinstance(model, HybridModel):
        return str(model.device)
    if isinstance(device, str) and device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return model_device(device)


def _step_tokens(given: int | None, device: str) -> int:
    """The most tokens of a step: those given, or the device's default."""
    if given is not None:
        return given
    return STEP_TOKENS_OF_A_CPU if device.startswith("cpu") else STEP_TOKENS


def _kv_events(given: Any, spec: CacheSpec) -> KVEventsConfig | None:
    """The publisher of KV events, if there is to be one; raises ``ConfigError`` if it cannot be."""
    config = None if given is None else KVEventsConfig.read(given)
    if config is None or not config.is_on:
        return None
    config.check(spec)
    return config


def _config(
    model: str | Path | HybridModel, device: str, dtype: Any, attention: str, exact: bool
) -> tuple[Any, torch.dtype | str]:
    """The config of a model, loaded or not, and the dtype of its weights; "auto" for the checkpoint's own.

    Raises ``ConfigError`` for an unknown dtype or attention, or if a loaded model has another; ``NotExact`` if
    ``exact`` cannot be kept with them. A loaded model that is exact need not be asked for it again.
    """
    weights_dtype = checkpoint.torch_dtype(dtype)
    check_name(attention)
    if not isinstance(model, HybridModel):
        folder = checkpoint.find_folder(model, ["config.json"])
        config, wanted = checkpoint.read_config(folder), checkpoint.weights_dtype(folder, dtype, device)
        if exact:
            choice.exactly(attention, device, wanted if isinstance(wanted, torch.dtype) else None)
        return config, wanted
    if exact and not model.exact:
        raise ConfigError("this model was loaded with exact=False; load it with exact=True")
    for name, asked, has in (("attention", attention, model.attention.name), ("dtype", weights_dtype, model.dtype)):
        if asked not in ("auto", has):
            raise ConfigError(f"this model was loaded with {name}={has!r}; load it with {name}={asked!r}")
    return model.config, model.dtype
