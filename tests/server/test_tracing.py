"""Spans of requests: as OpenTelemetry's own SDK has them, and as a collector gets them over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import inside
import pytest
from core.driving import prompt
from patience import PATIENCE_S

from kvtier import FullAttention, Journal
from kvtier.machine.journal import Admitted, Arrived, Copied, Ended, Prefilled, PushedOut, Runs, SentBack, Waits
from runner import AsyncLLM
from runner.cli import main
from runner.engine.explanations import Explanations
from runner.metrics.tracing import Tracing, sdk
from server.running import serving

pytest.importorskip("opentelemetry.sdk", reason="kvtier[otel] is not installed; `make test` installs it")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def tracing(journal: Journal, exporter: Any) -> tuple[Tracing, Explanations]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    explanations = Explanations(journal, lambda start, end: None)
    return Tracing(journal, explanations, "tiny", sdk(SimpleSpanProcessor(exporter), "kvtier")), explanations


def test_the_spans_of_a_request_with_a_wait_a_load_and_a_preemption(exporter) -> None:
    journal = Journal(100)
    traces, explanations = tracing(journal, exporter)
    explanations.name("cmpl-x", ["own"])
    traces.note_caller("own", {"traceparent": PARENT, "accept": "*/*"})
    admitted = Admitted(9, 8, 8, "full", 8, ((4, "device"), (8, "host")), {"full": 1}, {"full": 1}, 640, 7)
    for fact in (Arrived(9, 5, 0), Waits("blocks", "full: needs 2, has 1", {"full": (2, 1)}, ""), admitted):
        journal.add("own", fact)
    journal.add("", PushedOut("device", {"full": 3}, ("own",)))
    journal.add("", Copied(7, "load", {"full": 1}, 640, 0.25, "", 0))
    for fact in (Runs(), Prefilled(9), SentBack("blocks", "full", "other"), Ended("length", 5)):
        journal.add("own", fact)
    traces.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["llm_request"]
    assert set(spans) == {"llm_request", "wait for queue", "wait for blocks", "load", "prefill", "decode"}
    assert format(root.context.trace_id, "032x") == TRACE
    assert format(root.parent.span_id, "016x") == "b7ad6b7169203331"
    assert all(span.parent.span_id == root.context.span_id for span in spans.values() if span is not root)
    assert root.attributes["gen_ai.request.id"] == "cmpl-x"
    assert root.attributes["gen_ai.response.model"] == "tiny"
    assert (root.attributes["gen_ai.usage.prompt_tokens"], root.attributes["gen_ai.usage.completion_tokens"]) == (9, 5)
    assert (root.attributes["kvtier.hit.device_tokens"], root.attributes["kvtier.hit.host_tokens"]) == (4, 4)
    assert dict(spans["load"].attributes) == {"full": 1, "bytes": 640, "error": ""}
    assert spans["load"].end_time - spans["load"].start_time == pytest.approx(0.25e9, abs=1e3)
    [sent_back] = root.events
    assert dict(sent_back.attributes) == {"why": "blocks", "group": "full"}
    assert root.start_time <= sent_back.timestamp <= root.end_time


def test_what_the_cache_does_becomes_a_tree_for_each_request(make_serving, exporter) -> None:
    serving = make_serving({"full": (FullAttention(), 4)}, 40, journal_events=1000)
    traces, _ = tracing(serving.cache.journal, exporter)
    for k in range(3):
        serving.add(f"r{k}", prompt(k, 9), 2)
    serving.run()
    traces.close()
    roots = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    assert sorted(span.attributes["gen_ai.request.id"] for span in roots) == ["r0", "r1", "r2"]
    assert len({span.context.trace_id for span in roots}) == 3


def test_requests_whose_events_are_forgotten_are_left_out(exporter) -> None:
    """And it goes on with those that come."""
    journal = Journal(4)
    traces, _ = tracing(journal, exporter)
    for name in ("a", "b"):
        for fact in (Arrived(9, 1, 0), Admitted(9, 0, 0, "", -1, (), {}, {}, 0, 0), Runs(), Ended("stop", 1)):
            journal.add(name, fact)
    traces.close()
    names = [span.attributes["gen_ai.request.id"] for span in exporter.get_finished_spans() if span.parent is None]
    assert names in (["b"], ["a", "b"]), "the thread may have read the first before it was forgotten"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's HTTP side: (its address, what it was sent)."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_sends_its_spans_below_the_clients(llm: AsyncLLM, collector) -> None:
    endpoint, got = collector
    with serving(llm, traces_endpoint=endpoint) as running:
        body = {"prompt": "w1 w2", "max_tokens": 2}
        told = httpx.post(f"{running.url}/v1/completions", json=body, headers={"traceparent": PARENT}).json()
    spans = [span for one in got for r in one.resource_spans for s in r.scope_spans for span in s.spans]
    [root] = [span for span in spans if span.name == "llm_request"]
    assert root.trace_id.hex() == TRACE
    assert {a.key: a.value.string_value for a in root.attributes}["gen_ai.request.id"] == told["id"]
    assert {"prefill", "decode"} <= {span.name for span in spans}


def test_a_name_that_is_used_again_does_not_bring_its_old_trace(llm: AsyncLLM, collector) -> None:
    endpoint, got = collector
    with serving(llm, traces_endpoint=endpoint) as running:
        for headers in ({"traceparent": PARENT}, {}):
            body = {"prompt": "w1 w2", "max_tokens": 1}
            httpx.post(f"{running.url}/v1/completions", json=body, headers={"X-Request-Id": "conv-1", **headers})
    spans = [span for one in got for r in one.resource_spans for s in r.scope_spans for span in s.spans]
    roots = [span.trace_id.hex() for span in spans if span.name == "llm_request"]
    assert len(roots) == 2
    assert roots.count(TRACE) == 1


def test_a_collector_that_hangs_or_answers_without_end_is_left_behind(monkeypatch) -> None:
    """The end of the server is bounded: it does not wait for what hangs, which goes on hanging."""
    import socket

    from runner.metrics import tracing as module

    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        journal = Journal(100)
        traces = Tracing(journal, Explanations(journal, lambda start, end: None), "tiny", module.otlp(endpoint, "x"))
        for fact in (Arrived(9, 1, 0), Admitted(9, 0, 0, "", -1, (), {}, {}, 0, 0), Runs(), Ended("stop", 1)):
            journal.add("a", fact)
        traces.close()
        thread = inside.tracing_thread(traces)
        assert thread.is_alive()
        with silent.accept()[0] as asked:
            asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it would write to the log of another test"


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch) -> None:
    from runner.metrics import tracing as module

    class Endless:
        asked: ClassVar[list[int]] = []

        def read(self, most: int, decode_content: bool) -> bytes:
            self.asked.append(most)
            return bytes(most)

    import requests

    answer = SimpleNamespace(raw=Endless(), close=lambda: None)
    monkeypatch.setattr(requests.Session, "send", lambda self, request, **options: answer)
    assert len(module._brief_session().send(None)._content) == module.ANSWER_BYTES == Endless.asked[0]


def test_without_the_package_serve_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    assert main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:1"]) == 2
    assert "pip install 'kvtier[otel]'" in capsys.readouterr().err
