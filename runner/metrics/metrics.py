"""``Metrics``: the numbers of a served model, for Prometheus. docs/reference/metrics.md lists them.

Owns       the numbers that only the frontend sees: arrivals, refusals, endings, latencies.
Promises   every call may come from any thread, and costs a few microseconds. Nothing is done per token, and nothing on
           the engine's thread. Counters never fall. Once the engine has died, kvtier:engine_up is 0 and the cache has
           no other gauge. What it said last is true no more, and a 0 would draw a router's requests.
Does not   count the cache's numbers (``kvtier.machine.stats``): a scrape reads them there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvtier import CacheStats
from kvtier.coordinator.request import FinishReason
from runner.metrics.cache import add_cache
from runner.metrics.families import Distribution, Families

Refusal = Literal["invalid", "too_large", "overloaded", "engine_dead"]

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""vLLM's, and three below: small models are faster than its first bound."""
REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Likewise."""
TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token.", FIRST_TOKEN_S),
    "vllm:inter_token_latency_seconds": ("Between two tokens of an answer.", BETWEEN_TOKENS_S),
    "vllm:request_time_per_output_token_seconds": ("Its mean over an answer, by request.", BETWEEN_TOKENS_S),
    "vllm:e2e_request_latency_seconds": ("From a request's arrival to its end.", REQUEST_S),
    "vllm:request_queue_time_seconds": ("Until it ran.", REQUEST_S),
    "vllm:request_inference_time_seconds": ("From then to its end.", REQUEST_S),
    "vllm:request_prefill_time_seconds": ("From when it ran to its first token.", REQUEST_S),
    "vllm:request_decode_time_seconds": ("From its first token to its end.", REQUEST_S),
    "vllm:request_prompt_tokens": ("Tokens of its prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of an answer.", TOKENS),
    "vllm:request_max_num_generation_tokens": ("Tokens of its longest answer.", TOKENS),
    "vllm:request_params_max_tokens": ("max_tokens of a request.", TOKENS),
    "vllm:request_params_n": ("n of a request.", ANSWERS),
}


class _Cache(Protocol):
    def stats(self) -> CacheStats: ...


class HasCache(Protocol):
    """``LLM``, ``AsyncLLM``, or whatever else holds a cache. ``is_running``, if it has that, says whether it serves."""

    @property
    def cache(self) -> _Cache:
        """The cache that its requests are served with."""
        ...


class Metrics(Collector):
    """The numbers of ``llm``, with the label model_name = ``served_model_name``, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST
    """The type of what ``render`` returns."""

    def __init__(self, llm: HasCache, served_model_name: str) -> None:
        self._llm = llm
        self._name = served_model_name
        self._lock = threading.Lock()
        self._histograms = {name: Distribution(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._ended = dict.fromkeys(get_args(FinishReason), 0)
        self._refused = dict.fromkeys(get_args(Refusal), 0)
        self._arrived = self._arrived_tokens = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # --- what the frontend tells ------------------------------------------------------------------

    def on_arrival(self, prompt_tokens: int, max_tokens: int | None = None, n: int = 1) -> None:
        """A request is taken: its prompt tokens, and its parameters."""
        with self._lock:
            self._arrived += 1
            self._arrived_tokens += prompt_tokens
            self._histograms["vllm:request_params_n"].add(n)
            if max_tokens is not None:
                self._histograms["vllm:request_params_max_tokens"].add(max_tokens)

    @property
    def arrived(self) -> int:
        """Requests that were taken so far."""
        return self._arrived

    def refused(self, why: Refusal) -> int:
        """Requests that were not taken so far."""
        return self._refused[why]

    def on_refusal(self, why: Refusal) -> None:
        """A request is not taken."""
        with self._lock:
            self._refused[why] += 1

    def on_first_token(self, seconds: float) -> None:
        """The first token of an answer, this many seconds after its request's arrival."""
        with self._lock:
            self._histograms["vllm:time_to_first_token_seconds"].add(seconds)

    def on_tokens(self, tokens: int, seconds: float) -> None:
        """More tokens of an answer, its first one not counted: ``seconds`` after the last of the earlier tokens."""
        if tokens > 0:
            with self._lock:
                self._histograms["vllm:inter_token_latency_seconds"].add(seconds / tokens, tokens)

    def on_finish(
        self,
        prompt_tokens: int,
        answers: Sequence[tuple[FinishReason, int]],
        latency_s: float,
        ttft_s: float | None = None,
        queue_s: float | None = None,
    ) -> None:
        """A request has ended: (finish reason, generated tokens) of each of its answers.

        Seconds count from its arrival: ``latency_s`` until now, ``ttft_s`` until its first token, ``queue_s`` until it
        ran (``FinishedRequest.queue_s``). Each is None if it did not come to that.
        """
        longest = max((tokens for _, tokens in answers), default=0)
        took = {
            "vllm:e2e_request_latency_seconds": latency_s,
            "vllm:request_prompt_tokens": prompt_tokens,
            "vllm:request_max_num_generation_tokens": longest,
        }
        if ttft_s is not None:
            took["vllm:request_decode_time_seconds"] = max(0.0, latency_s - ttft_s)
            if longest > 1:
                took["vllm:request_time_per_output_token_seconds"] = max(0.0, latency_s - ttft_s) / (longest - 1)
        if queue_s is not None:
            took["vllm:request_queue_time_seconds"] = queue_s
            took["vllm:request_inference_time_seconds"] = max(0.0, latency_s - queue_s)
            if ttft_s is not None:
                took["vllm:request_prefill_time_seconds"] = max(0.0, ttft_s - queue_s)
        with self._lock:
            for reason, tokens in answers:
                self._ended[reason] += 1
                self._histograms["vllm:request_generation_tokens"].add(tokens)
            for name, value in took.items():
                self._histograms[name].add(value)

    # --- what Prometheus reads --------------------------------------------------------------------

    def render(self) -> bytes:
        """All of them as Prometheus' text."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Yields one family after the other, for the registry."""
        is_up = bool(getattr(self._llm, "is_running", True))
        families, cache = Families(self._name), Families(self._name)
        families.gauge("kvtier:engine_up", "1 while requests are served, 0 once the engine has died.", {(): is_up})
        add_cache(cache, self._llm.cache.stats())
        self._add_frontend(families)
        return iter(families.made + [one for one in cache.made if is_up or one.type != "gauge"])

    def _add_frontend(self, families: Families) -> None:
        with self._lock:
            histograms = {name: of.copy() for name, of in self._histograms.items()}
            ended, refused = dict(self._ended), dict(self._refused)
            arrived, tokens = self._arrived, self._arrived_tokens
        families.counter("kvtier:arrived_requests", "Requests that were taken.", {(): arrived})
        families.counter("kvtier:arrived_prompt_tokens", "Tokens of their prompts.", {(): tokens})
        families.counter(
            "kvtier:refused_requests", "Requests that were not taken.", {(why,): n for why, n in refused.items()}, "why"
        )
        families.counter(
            "vllm:request_success",
            "Answers that ended, by why.",
            {(reason,): n for reason, n in ended.items()},
            "finished_reason",
        )
        for name, of in histograms.items():
            families.histogram(name, _HISTOGRAMS[name][0], {(): of})
        between = histograms["vllm:inter_token_latency_seconds"]
        families.histogram("vllm:time_per_output_token_seconds", "The same, by an older name.", {(): between})
