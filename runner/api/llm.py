"""``LLM``: the offline API, as vLLM users know it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from kvtier import CacheClosed, InvalidRequest, Violation
from kvtier.machine.integers import shown
from runner.engine.answers import Answers
from runner.engine.inputs import Prompt, as_list
from runner.engine.outputs import RequestOutput
from runner.engine.service import Service
from runner.engine.streams import ThreadMail
from runner.errors import EngineDead, ForwardFailed
from runner.sampling.grammars.matching import Grammar
from runner.sampling.params import SamplingParams

BAR_S = 0.02
"""Seconds after which the bar moves, and answers get their new tokens, even if none has ended."""


class LLM(Service):
    """A hybrid-attention language model served offline, with its KV cache in two tiers.

    ``model``             a local folder or a hub id (safetensors), or a ``HybridModel``.
    ``device``            "auto" (CUDA if there is one), "cpu" or "cuda:N".
    ``device_memory``     bytes or text such as "8GiB", for the device pools and their users: the attention's workspaces
                          and index arrays, captured decode steps, checksums. Or blocks per group, for the pools alone.
                          None picks a share of the free memory.
    ``host_memory``       for the host tier and pinned buffers, likewise; 0 turns the tier off.
    ``block_tokens``      tokens per block.
    ``max_batched_tokens``  tokens a step computes at most; longer prompts run in chunks of this. None: 8,192,
                          on a CPU 2,048.
    ``max_running``       requests that run at the same time.
    ``dtype``             of weights and KV: "float32", "float16", "bfloat16"; None keeps the checkpoint's.
    ``kv_cache_dtype``    of KV if it differs: "fp8" (e4m3) takes half the room of bfloat16 in both tiers.
    ``kv_scales``         for "fp8": {layer: {"k": ..., "v": ...}} or a file with it (`kvtier calibrate`). None takes
                          the checkpoint's k_scale and v_scale if it has any, else 1.
    ``attention``         "auto" (FlashInfer if it can run this model, else the torch reference; ``stats`` says which
                          and why), "flashinfer" or "reference".
    ``batch_invariant``   FlashInfer never splits a query's keys by the rest of the batch.
    ``exact``             no bit of an answer depends on hits, tiers, chunks, preemption, neighbours or restarts. On a
                          CPU (docs/EXACTNESS.md); ``NotExact`` if the model, dtype or device cannot keep it.
    ``cuda_graphs``       with FlashInfer, decode steps are captured at start-up and replayed; False runs all eagerly.
    ``grammar_limit_s``   CPU seconds that compiling one grammar (``structured_outputs``) may take, on a process of its
                          own; 10 unless given.
    ``kv_events_config``  tells routers what is cached (docs/ROUTING.md): a ``KVEventsConfig``, a mapping of its fields,
                          or JSON text.
    ``cache_options``     further keyword arguments of ``KVCache``: store, verify, on_load_error, deadline_s, model_id,
                          key_secret, copy_engine, journal_events, remote_uri. journal_events (32,768) is the number of
                          events that ``explain`` is told from; 0 turns it off. remote_uri ("file:///var/kv",
                          "s3://bucket/prefix", "mooncake://host:port") is a remote tier, which outlives the process.
                          Engines share it. It needs a host tier and key_secret; model_id is made of the weights unless
                          given.

    Options of vLLM are taken with the value that is true here (``tensor_parallel_size=1``,
    ``enable_prefix_caching=True``, ``trust_remote_code=False``). With other values the error names a substitute
    (``runner.engine.options``). All facts in the config are checked before weights are read.

    Calls from several threads are served together. After any error, or an interrupt, the next call finds a working
    engine. Raises ``ModelLoadError``, ``UnsupportedModel``, ``AttentionUnavailable``, ``NotExact``, ``ConfigError``,
    ``MemoryUnavailable``.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Completes prompts; outputs are in the order of the prompts.

        ``use_tqdm``: False shows no bar; a function that makes a bar as ``tqdm`` does is taken too.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. The latter two may have
        "cache_salt", "priority" and "boundaries", as ``Request`` has them. Raises ``InvalidRequest`` and
        ``RequestTooLarge`` before any prompt runs, and the errors of a forward. A fault of one prompt alone (logits
        that are not finite, a grammar that fails) is the ``error`` of its output.
        """
        called_s = time.perf_counter()
        self.thread.check()
        rows = as_list(prompts)
        params = self._params_for(rows, sampling_params)
        given = [self.inputs.read(prompt) for prompt in rows]
        checked = [(g, *self._requests(g, p, self._grammar(p))) for g, p in zip(given, params, strict=True)]
        mail = ThreadMail(at_once=any(p.stop for p in params))  # a stop string ends an answer when it is seen
        calls: list[Answers] = []
        try:
            for row in checked:
                calls.append(self._submit(*row, mail, called_s))
            self._wait(calls, mail, use_tqdm)
        except BaseException:
            for call in calls:
                call.abort(self.thread)
            raise
        return [call.output(call.answers, delta=False) for call in calls]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of {"role", "content"}) or several, through the model's chat template.

        ``template``: the template's further arguments, such as tools, add_generation_prompt, continue_final_message and
        its own. Raises as ``generate`` does, and ``InvalidRequest`` for messages that the template refuses.
        """
        many = isinstance(messages, Sequence) and len(messages) > 0 and not isinstance(messages[0], (Mapping, str))
        chats = messages if many else [messages]
        return self.generate([self.inputs.chat(chat, **template) for chat in chats], sampling_params, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content in both tiers, between two steps; see ``KVCache.reset_prefix_cache``."""
        return self.thread.call(self.scheduler.reset_prefix_cache).result()

    def audit(self) -> list[Violation]:
        """Every invariant of the cache that is broken, between two steps; empty when sound. Raises ``EngineDead``."""
        return self.thread.call(self.cache.audit).result()

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        return None if params.structured_outputs is None else self.grammars.compile(params.structured_outputs)

    def _wait(self, calls: list[Answers], mail: ThreadMail, use_tqdm: bool | Callable[..., Any]) -> None:
        """Until all have ended. Raises the error of a forward, and ``EngineDead``."""
        waiting = {answer.stream: (call, answer) for call in calls for answer in call.answers}
        before = self.engine.computed_tokens
        make = use_tqdm if callable(use_tqdm) else tqdm
        shape: dict[str, Any] = {"disable": not use_tqdm, "dynamic_ncols": True, "miniters": 0}
        with make(total=len(calls), desc="Processed prompts", **shape) as bar:
            while waiting:
                stream = mail.get(BAR_S)
                bar.set_postfix_str(f"{self.engine.computed_tokens - before:,} tokens computed", refresh=False)
                bar.update(0)
                if stream is None or stream not in waiting:  # the latter: told once more, of an end that was seen
                    continue
                call, answer = waiting[stream]
                answer.advance(self.thread)
                if not answer.is_done:
                    continue
                del waiting[stream]
                error = answer.stream.end.error if answer.stream.end is not None else None
                if isinstance(error, ForwardFailed):
                    raise error.__cause__ or error
                if isinstance(error, (EngineDead, CacheClosed)):
                    raise error
                bar.update(call.is_done)

    def _params_for(self, rows: list[Prompt], params: Any) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * len(rows)
        if not isinstance(params, Iterable):
            raise InvalidRequest(f"give one SamplingParams, or one per prompt, not {shown(params)}")
        params = list(params)
        if odd := [p for p in params if not isinstance(p, SamplingParams)]:
            raise InvalidRequest(f"give one SamplingParams, or one per prompt, and not {shown(odd[0])} among them")
        if len(params) != len(rows):
            raise InvalidRequest(
                f"give one SamplingParams, or one per prompt: {len(rows)} prompts, {len(params)} params"
            )
        return params
