"""Clients that mean no good, or do not know better: a 4xx in bounded memory, and the server goes on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from patience import PATIENCE_S, wait_until

from runner import AsyncLLM
from runner.server.served import LONG_BYTES
from server.running import Running, serving

JSON = {"content-type": "application/json"}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


@pytest.fixture(autouse=True)
def still_serves(web: httpx.Client) -> Iterator[None]:
    yield
    assert web.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "w1"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
        b"[]",
        b"null",
        b"",
        b'{"prompt": "w1", "seed": 99999999999999999999999}',
        b'{"prompt": "w1", "temperature": 1e999}',
        b'{"prompt": "w1", "' + b"x" * 10_000 + b'": 1}',
    ],
)
def test_bodies_that_are_no_request(web: httpx.Client, body: bytes) -> None:
    told = web.post("/v1/completions", content=body, headers=JSON)
    assert told.status_code == 400
    assert len(told.text) < 2000


def test_a_body_that_is_not_called_json_is_refused(web: httpx.Client) -> None:
    """Web pages may send text/plain anywhere without asking."""
    told = web.post("/v1/completions", content=b'{"prompt": "w1"}', headers={"content-type": "text/plain"})
    assert told.status_code == 400


def test_a_huge_body_is_413_announced_or_not(web: httpx.Client, running: Running) -> None:
    pieces = (b'{"prompt": "' + b"w1 " * 1000 for _ in range(400))  # chunked: nobody knows how long
    told = [web.post("/v1/completions", content=b" " * (2**20 + 1), headers=JSON)]
    told.append(web.post("/v1/completions", content=pieces, headers=JSON))
    assert [t.status_code for t in told] == [413, 413]
    assert running.server.config.app.state.buffers.held == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_large_body_is_read_by_the_threads_for_large_ones_announced_or_not(
    web: httpx.Client, running: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads, encode = [], running.llm.inputs.encode

    def spied(prompt: object) -> object:
        threads.append(threading.current_thread().name)
        return encode(prompt)

    monkeypatch.setattr(running.llm.inputs, "encode", spied)
    body = b'{"prompt": "w1"' + (b', "max_tokens": 1' if "completions" in path else b"") + b"}"
    for size in (0, LONG_BYTES):
        padded = body + b" " * size
        for content in (padded, (padded[at : at + 1000] for at in range(0, len(padded), 1000))):
            threads.clear()
            assert web.post(path, content=content, headers=JSON).status_code == 200
            assert threads[0].startswith(f"kvtier-read-{'long' if size else 'short'}")


def test_a_million_tokens_are_refused(web: httpx.Client) -> None:
    told = [
        web.post("/v1/completions", json={"prompt": "w1 " * 300_000}),
        web.post("/v1/completions", content=b'{"prompt":[' + b"5," * 500_000 + b"5]}", headers=JSON),
        web.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "w1 " * 300_000}]}),
    ]
    assert [t.status_code for t in told] == [400] * 3
    assert {t.json()["error"]["code"] for t in told} == {"context_length_exceeded"}


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ["w1"] * 100_000},
        {"logit_bias": {str(i): 1 for i in range(50_000)}},
        {"guided_grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
        {"guided_regex": "(" * 60_000 + "a" + ")" * 60_000},
        {"guided_json": "[" * 60_000},
        {"guided_json": {"$ref": "#"}},
    ],
)
def test_what_would_cost_much_is_refused(
    web: httpx.Client, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, more: dict
) -> None:
    """And before it has cost anything: what comes later has another name for it, or none."""
    monkeypatch.setattr(llm, "max_waiting_requests", None)
    told = web.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1, **more})
    assert told.status_code == 400
    assert told.json()["error"]["param"] == next(iter(more))


def test_grammars_whose_clients_have_left_hold_nobody_up(web: httpx.Client, running: Running) -> None:
    """Each of them would compile for minutes."""
    deep = '{"type":"array","items":' * 900 + '{"type":"string"}' + "}" * 900
    counted = "|".join(f"[78 ]{{{i},1000}}" for i in range(300))
    hasty = httpx.Timeout(PATIENCE_S, read=0.5)
    for form in ({"guided_regex": f"({counted})*"}, {"guided_json": deep}):
        with pytest.raises(httpx.ReadTimeout):
            web.post("/v1/completions", json={"prompt": [7, 8, 9], "max_tokens": 2, **form}, timeout=hasty)
    told = web.post("/v1/completions", json={"prompt": [7], "max_tokens": 2, "guided_choice": ["7", "9"]})
    assert told.status_code == 200


def _told(running: Running, sent: list[bytes]) -> bytes:
    """Sends pieces with pauses, as far as the server takes them; what comes back until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=PATIENCE_S) as sock:
        for piece in sent:
            with contextlib.suppress(ConnectionError):  # it may be closed before the last piece
                sock.sendall(piece)
            time.sleep(0.05)
        got = b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65536):
                got += piece
        return got


@pytest.fixture
def hurried(llm: AsyncLLM) -> Iterator[Running]:
    """A server that does not wait for long for what its clients send."""
    with serving(llm, read_timeout_s=0.3) as running:
        yield running


def test_a_head_that_never_ends_is_cut_off(running: Running, hurried: Running) -> None:
    assert _told(hurried, [b"GET /health HTTP/1.1\r\n", b"x: y\r\n"]) == b""
    assert b" 400 " in _told(running, [b"GET /health HTTP/1.1\r\nx: " + b"y" * 70_000] * 2)


def test_a_body_that_never_comes_is_408(hurried: Running) -> None:
    assert b" 408 " in _told(hurried, [HEAD % 99 + b'{"pro'])


def test_a_stream_that_nobody_reads_is_given_up(llm: AsyncLLM) -> None:
    body = (
        b'{"prompt": "w1", "max_tokens": 20000, "ignore_eos": true, "stream": true, "return_token_ids": true, "n": 8}'
    )
    with serving(llm, send_buffer=4096, read_timeout_s=0.3) as running, socket.socket() as sock:
        entered, enter = threading.Event(), running.admission.enter
        running.admission.enter = lambda: (enter(), entered.set())[0]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
        sock.sendall(HEAD % len(body) + body)
        assert entered.wait(PATIENCE_S)
        wait_until(lambda: not running.admission.tickets, "the stream is given up")
