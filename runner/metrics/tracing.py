"""Requests as OpenTelemetry spans, one tree for each request of the cache that has ended.

Owns       a thread that reads the journal, and the events of requests that have not ended yet.
Promises   the engine's thread does nothing for it. A collector that is slow or away costs bounded memory: the SDK drops
           spans. Spans have vLLM's attributes if they mean the same.
Does not   start traces of its own if the client has sent one (``traceparent``): spans hang below the client's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvtier import Event, Explanation, Journal, explain
from kvtier.cache.explanation import Hit
from kvtier.machine.journal import Admitted, Copied, Ended, PushedOut
from runner.engine.explanations import Explanations
from runner.errors import MissingPackage

POLL_S = 0.2
CLOSE_S = 5.0
ANSWER_BYTES = 65536
"""Most bytes of a collector's answer that are read."""
MOST_EVENTS = 1024
"""Most events of one request: a request that is sent back again and again has more."""
MOST_CALLERS = 16384


class _Sdk(NamedTuple):
    """The parts of OpenTelemetry that are used."""

    provider: Any
    tracer: Any
    extract: Any
    kind: Any


def check_installed() -> None:
    """Raises ``MissingPackage`` without OpenTelemetry's SDK and its exporter."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as problem:
        raise MissingPackage(f"traces need {problem.name}; pip install 'kvtier[otel]'") from problem


def otlp(endpoint: str, service: str) -> _Sdk:
    """Sends spans to ``endpoint``, as protobuf over HTTP. Raises ``MissingPackage``."""
    check_installed()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return sdk(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, session=_brief_session())), service)


def _brief_session() -> Any:
    """A ``requests.Session`` that reads some KiB of an answer at most."""
    import requests

    class Brief(requests.Session):
        def send(self, request: Any, **options: Any) -> Any:
            answer = super().send(request, **options | {"stream": True})
            answer._content = answer.raw.read(ANSWER_BYTES, decode_content=False)
            answer.close()
            return answer

    return Brief()


def sdk(processor: Any, service: str) -> _Sdk:
    """Gives spans to an SDK's ``SpanProcessor``."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return _Sdk(provider, provider.get_tracer("kvtier"), TraceContextTextMapPropagator().extract, SpanKind.SERVER)


class Tracing:
    """Reads ``journal`` until it is closed. ``explanations`` knows the callers' names, ``model`` is a span's model."""

    def __init__(self, journal: Journal, explanations: Explanations, model: str, to: _Sdk) -> None:
        self._journal = journal
        self._explanations = explanations
        self._model = model
        self._sdk = to
        self._next = journal.count
        self._open: defaultdict[str, list[Event]] = defaultdict(list)
        self._by_ticket: dict[int, str] = {}
        self._callers: OrderedDict[str, Mapping[str, str]] = OrderedDict()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-traces", daemon=True)
        self._thread.start()

    def note_caller(self, name: str, headers: Mapping[str, str]) -> None:
        """The client's trace, from the headers of the request that the engine knows as ``name``; from any thread."""
        if "traceparent" in headers:
            self._callers[name] = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
            if len(self._callers) > MOST_CALLERS:
                self._callers.popitem(last=False)

    def close(self) -> None:
        """Sends what has ended, for some seconds at most."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self._read()
        self._read()
        self._sdk.provider.shutdown()  # sends what is left; a collector that hangs is left behind with this thread

    def _read(self) -> None:
        events = self._journal.since(self._next)
        if events and events[0].number > self._next:
            self._open.clear()  # some are forgotten: what is left of these requests tells half of it
            self._by_ticket.clear()
        for event in events:
            self._next = event.number + 1
            self._take(event)

    def _take(self, event: Event) -> None:
        match event.fact:
            case PushedOut():
                for name in event.fact.by:
                    self._keep(name, event)
            case Copied():
                self._keep(self._by_ticket.pop(event.fact.ticket, ""), event)
            case Ended():
                mine = [*self._open.pop(event.request_id, []), event]
                told = explain(mine, event.request_id, self._explanations.compute_s, self._journal.unix_s)
                if told is not None and told.is_whole:
                    self._send(told)
            case _:
                self._open[event.request_id].append(event)
                if isinstance(event.fact, Admitted) and event.fact.ticket:
                    self._by_ticket[event.fact.ticket] = event.request_id

    def _keep(self, name: str, event: Event) -> None:
        if name in self._open and len(self._open[name]) < MOST_EVENTS:
            self._open[name].append(event)

    # --- spans ------------------------------------------------------------------------------------

    def _send(self, told: Explanation) -> None:
        own, (caller, _) = told.request_id, self._explanations.caller_of(told.request_id)
        context = self._sdk.extract(self._callers.get(own.partition("#")[0], {}))
        root = self._sdk.tracer.start_span(
            "llm_request",
            context=context,
            kind=self._sdk.kind,
            start_time=_ns(told, 0.0),
            attributes=self._attributes(told, caller),
        )
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(root, context)

        def part(name: str, start_s: float, seconds: float, **attributes: Any) -> None:
            span = self._sdk.tracer.start_span(name, inside, start_time=_ns(told, start_s), attributes=attributes)
            span.end(_ns(told, start_s + seconds))

        for wait in told.waits:
            if wait.seconds is not None:
                part(f"wait for {wait.reason}", wait.at_s, wait.seconds, why=wait.why)
        for hit in told.hits:
            if hit.load is not None and hit.load.seconds is not None:
                more = {"bytes": hit.load.num_bytes, "error": hit.load.error}
                part("load", hit.at_s, hit.load.seconds, **hit.load.blocks, **more)
            if hit.prefill_s is not None:
                part("prefill", hit.runs_s, hit.prefill_s, tokens=hit.computed_tokens)
        for back in told.preemptions:
            root.add_event("sent back", {"why": back.why, "group": back.group}, _ns(told, back.at_s))
        if told.first_token_s is not None:
            part("decode", told.first_token_s, told.seconds - told.first_token_s, tokens=told.generated_tokens or 0)
        root.end(_ns(told, told.seconds))

    def _attributes(self, told: Explanation, caller: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.request.id": caller,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.prompt_tokens": told.prompt_tokens,
            "gen_ai.usage.completion_tokens": told.generated_tokens,
            "gen_ai.latency.e2e": told.seconds,
            "gen_ai.latency.time_in_queue": told.queue_s,
            "gen_ai.latency.time_to_first_token": told.first_token_s,
            "kvtier.finish_reason": told.finish_reason,
            "kvtier.preemptions": len(told.preemptions),
        }
        if told.hits:
            found |= _of_hit(told.hits[0])
        return {name: value for name, value in found.items() if value is not None}


def _of_hit(hit: Hit) -> dict[str, Any]:
    return {
        "kvtier.hit.device_tokens": hit.device_tokens,
        "kvtier.hit.host_tokens": hit.host_tokens,
        "kvtier.hit.limited_by": hit.limited_by,
    }


def _ns(told: Explanation, at_s: float) -> int:
    return int(1e9 * (told.arrived_unix_s + at_s))
