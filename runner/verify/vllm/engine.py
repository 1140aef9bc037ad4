"""vLLM as the scenarios see it. The only module that knows vLLM; it uses its public names alone.

Owns       the translation of vLLM's outputs, Prometheus counters and step statistics into ``Served``.
Promises   counts are vLLM's own and the same for every connector:
           * ``vllm:prompt_tokens_by_source``: at a request's first token, how much of its prompt came from where. A
             failed load has been taken out of it;
           * ``vllm:external_prefix_cache_hits`` and ``vllm:num_preemptions``;
           * from each step's statistics (``StatLoggerBase``): tokens that went through the model, the used part of the
             pool, and what preempted requests found again. What a version does not tell is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.verify.vllm.served import Answer, Counts, Facts, Prompts, Served

TOP = 5
"""Likeliest tokens whose logprobs are compared."""


class _Watch:
    """What the steps have told so far."""

    def __init__(self) -> None:
        self.computed: int | None = None
        self.resumed_device: int | None = None
        self.resumed_host: int | None = None
        self.together = 0
        self.peak = 0.0

    def see(self, stats: Any) -> None:
        """A step's ``SchedulerStats``."""
        self.together = max(self.together, stats.num_running_reqs)
        self.peak = max(self.peak, stats.kv_cache_usage)
        details = getattr(stats, "iteration_details", None)
        if details is not None:
            self.computed = (self.computed or 0) + details.num_ctx_tokens + details.num_generation_tokens
        self.resumed_device = _add(self.resumed_device, getattr(stats, "prefix_cache_stats", None))
        self.resumed_host = _add(self.resumed_host, getattr(stats, "connector_prefix_cache_stats", None))

    def logger(self) -> type:
        """A statistics logger, for vLLM to make and to call."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        see = self.see

        class Watching(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    see(scheduler_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Watching


def _add(so_far: int | None, stats: Any) -> int | None:
    hits = getattr(stats, "preempted_hits", None)
    return so_far if hits is None else (so_far or 0) + int(hits)


class VLLMEngine:
    """``arguments``: of vLLM's ``EngineArgs``, ``kv_transfer_config`` as a dict. Raises what vLLM raises."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import vllm
        from vllm.config import KVTransferConfig

        given = dict(arguments)
        if given.get("kv_transfer_config") is not None:
            given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
        self._watch = _Watch()
        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**given), stat_loggers=[self._watch.logger()])
        self._number = 0
        config = self._engine.vllm_config
        self.facts = Facts(
            version=vllm.__version__,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            block_tokens=int(config.cache_config.block_size),
            blocks=int(config.cache_config.num_gpu_blocks),
            has_states=bool(config.model_config.is_hybrid or config.model_config.is_attention_free),
        )

    def serve(self, prompts: Prompts, new_tokens: int) -> Served:
        """All at once, greedily."""
        params = self._sampling(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=TOP)
        before, self._watch.together, self._watch.peak = self._counts(), 0, 0.0
        names = dict[str, str]()
        for name, tokens in prompts.items():
            self._number += 1
            names[f"{self._number}"] = name
            self._engine.add_request(f"{self._number}", {"prompt_token_ids": tokens}, params)
        ended = dict[str, Any]()
        while self._engine.has_unfinished_requests():
            ended |= {names[output.request_id]: output for output in self._engine.step() if output.finished}
        return Served(
            answers=[_answer(name, ended[name]) for name in prompts],
            counts=self._counts() - before,
            together=self._watch.together,
            peak=self._watch.peak,
        )

    def reset(self) -> bool:
        """Forgets the content of vLLM's prefix cache and of the connector."""
        return bool(self._engine.reset_prefix_cache(reset_connector=True))

    def _counts(self) -> Counts:
        totals = dict[tuple[str, str | None], int]()
        for metric in self._engine.get_metrics():
            if hasattr(metric, "value"):
                key = metric.name, metric.labels.get("source")
                totals[key] = totals.get(key, 0) + int(metric.value)
        watch = self._watch
        return Counts(
            device=totals["vllm:prompt_tokens_by_source", "local_cache_hit"],
            host=totals["vllm:prompt_tokens_by_source", "external_kv_transfer"],
            offered=totals["vllm:external_prefix_cache_hits", None],
            preemptions=totals["vllm:num_preemptions", None],
            computed=watch.computed,
            resumed_device=watch.resumed_device,
            resumed_host=watch.resumed_host,
        )


def _answer(name: str, output: Any) -> Answer:
    completion = output.outputs[0]
    return Answer(
        name=name,
        prompt_tokens=len(output.prompt_token_ids),
        token_ids=list(completion.token_ids),
        logprobs=[[(int(t), float(p.logprob)) for t, p in row.items()] for row in completion.logprobs or ()],
        finish_reason=str(completion.finish_reason),
    )


def model_facts(model: str, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Facts of a model that is not loaded: ``vocab_size``, ``max_model_len``, and ``token_bytes``, the most that a
    token's KV takes. Raises what vLLM raises."""
    from vllm import EngineArgs

    config = EngineArgs(model=model, skip_tokenizer_init=True, **arguments).create_model_config()
    heads, layers = config.get_total_num_kv_heads(), int(config.hf_text_config.num_hidden_layers)
    return {
        "vocab_size": int(config.get_vocab_size()),
        "max_model_len": int(config.max_model_len),
        "token_bytes": 2 * layers * heads * int(config.get_head_size()) * config.dtype.itemsize,
    }
