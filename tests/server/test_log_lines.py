"""What the log has while all is well: a line of throughput, and lines that name their request."""

from __future__ import annotations

import logging
import logging.config
import re
import time
from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S

from kvtier import CacheStats
from runner import AsyncLLM
from runner.server import lifecycle, logs
from runner.server.throughput import EVERY_S, Throughput
from server.running import Running, serving

ASK = {"prompt": "w1 w2", "max_tokens": 2, "ignore_eos": True}
KV = r"device KV in use: full 0\.0 %, sliding 0\.0 %, chunked 0\.0 %; host KV filled: \d+\.\d %"


class Played:
    """A cache whose numbers a test sets."""

    def __init__(self, stats: CacheStats) -> None:
        self._stats = stats
        self.asked = self.computed = self.generated = 0
        self.prefix = {"queried": 100, "device": 0, "host": 0}
        self.set(computed=1000, generated=300)

    def set(self, computed: int = 0, generated: int = 0, running: int = 0, waiting: int = 0, **prefix: int) -> None:
        """Counters grow by these; requests are so many now."""
        self.computed += computed
        self.generated += generated
        self.prefix = {source: n + prefix.get(source, 0) for source, n in self.prefix.items()}
        self.requests: Mapping[str, int] = {"running": running, "waiting": waiting}

    def stats(self) -> CacheStats:
        self.asked += 1
        return replace(
            self._stats,
            computed_tokens=self.computed,
            generated_tokens=self.generated,
            requests=self.requests,
            prefix_tokens=self.prefix,
        )


@pytest.fixture
def played(running: Running) -> Played:
    return Played(running.llm.cache.stats())


def test_a_line_tells_what_has_been_since_the_last_one(played: Played) -> None:
    lines = Throughput(played.stats, 50.0)
    played.set(computed=300, generated=50, running=3, waiting=2, queried=400, device=100, host=60)
    line = lines.line(50.0 + EVERY_S)
    assert line is not None
    assert re.fullmatch(
        r"prompts 25\.0 tokens/s computed, generation 5\.0 tokens/s; running 3, waiting 2; "
        rf"{KV}; prompt tokens: 40\.0 % hits \(device 25\.0 %, host 15\.0 %\)",
        line,
    ), line
    line = lines.line(50.0 + 3 * EVERY_S)  # it was late: 20 s have gone by
    assert line is not None and line.startswith("prompts 0.0 tokens/s computed, generation 0.0 tokens/s; running 3")
    assert line.endswith("prompt tokens: - hits")
    played.set(computed=20_000, generated=20_000, running=1)
    assert "generation 2,000.0 tokens/s" in (lines.line(50.0 + 4 * EVERY_S) or "")


def test_without_work_there_is_one_closing_line_and_then_silence(played: Played) -> None:
    now, lines = 0.0, Throughput(played.stats, 0.0)

    def next_line() -> str | None:
        nonlocal now
        now += EVERY_S
        return lines.line(now)

    assert next_line() is None
    played.set(computed=10, generated=4)  # came and went between two lines
    assert "generation 0.4" in (next_line() or "")
    assert "generation 0.0" in (next_line() or "")
    assert [next_line() for _ in range(3)] == [None] * 3
    played.set(waiting=1)
    assert "waiting 1" in (next_line() or "") and "waiting 1" in (next_line() or "")


def test_nothing_is_counted_until_it_is_time(played: Played) -> None:
    lines = Throughput(played.stats, 7.0)
    played.set(computed=10, running=1)
    before = played.asked
    assert [lines.line(7.0 + EVERY_S * k / 100) for k in range(100)] == [None] * 100
    assert played.asked == before
    assert lines.line(7.0 + EVERY_S)


def test_a_server_logs_its_throughput(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifecycle, "Throughput", partial(Throughput, every_s=0.001))
    with serving(llm, log_stats=True) as running, httpx.Client(base_url=running.url) as web:
        assert web.post("/v1/completions", json=ASK).status_code == 200
        ends = time.monotonic() + 60
        while not any("tokens/s computed" in one.getMessage() for one in caplog.records) and time.monotonic() < ends:
            web.get("/health")
    [first, *_] = [one for one in caplog.records if "tokens/s computed" in one.getMessage()]
    assert (first.name, first.levelno) == ("kvtier.server", logging.INFO)


def test_a_server_that_is_told_not_to_counts_nothing(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lifecycle, "Throughput")
    with serving(llm, log_stats=False) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200


class Lines(logging.Handler):
    """What a handler of the server would write."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        config = logs.options()
        kind = logging.config.DictConfigurator({"version": 1, **options})
        self.setFormatter(kind.configure_formatter(config["formatters"]["default"]))
        for name in config["handlers"]["default"]["filters"]:
            self.addFilter(kind.configure_filter(config["filters"][name]))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def test_lines_have_a_time_and_the_name_of_their_request(
    running: Running, web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.llm.model, "forward", lambda *_: 1 / 0)
    handler, log = Lines(), logging.getLogger("kvtier.server")
    log.addHandler(handler)
    try:
        for name in ("one", "two"):
            told = web.post("/v1/completions", json=ASK, headers={"X-Request-Id": name})
            assert told.status_code == 500
        log.warning("of no request")
    finally:
        log.removeHandler(handler)
    shapes = [r"\[cmpl-one\] a request failed: .*", r"\[cmpl-two\] a request failed: .*", "of no request"]
    assert len(handler.lines) == 3
    for line, shape in zip(handler.lines, shapes, strict=True):
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} (ERROR|WARNING): +{shape}", line), line


def test_a_line_about_the_server_names_no_request(llm: AsyncLLM, capfd: pytest.CaptureFixture[str]) -> None:
    """A signal comes in the middle of some request's work."""

    def signalled() -> None:
        logs.serve("cmpl-somebody")
        running.server.stop()

    with serving(llm) as running:
        copy_context().run(signalled)
        running.thread.join(PATIENCE_S)
    logged = capfd.readouterr().err
    assert "draining" in logged and "cmpl-somebody" not in logged
