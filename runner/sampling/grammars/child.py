"""The process that compiles grammars, and forks a child for each of them.

Owns       nothing of the process that started it, which sends jobs over a socket (``grammar_jobs.py``).
Promises   a job ends once its CPU time or memory is used up, or once nobody waits for it; a fault in xgrammar ends its
           own job alone. All end with the process that started this one, however it ends.
Does not   import torch or transformers: it is there in half a second, and small.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import numpy as np

BEGUN, COMPILED, REFUSED, TOO_LONG, TOO_LARGE = b"b", b"c", b"r", b"t", b"m"
"""What a child says: ``BEGUN`` first, and then one of the others. Texts follow ``COMPILED`` and ``REFUSED``."""

HEAD = struct.Struct("<Q")
"""Bytes of the message that follows."""


def main() -> None:
    """Serves the socket that the first argument numbers, until its other end is closed."""
    jobs = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave nothing behind
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    start = json.loads(_received(jobs)[0])
    xgrammar = _xgrammar()
    vocabulary = xgrammar.TokenizerInfo.deserialize_json(start["vocabulary"])
    while True:
        message, files = _received(jobs)
        client = socket.socket(fileno=files[0])
        if os.fork() == 0:
            jobs.close()
            _serve(client, json.loads(message), xgrammar, vocabulary, start["is_spaced"])
        client.close()


def _received(jobs: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, and the files that came with it. Ends the process if there is none."""
    head, files, _, _ = socket.recv_fds(jobs, HEAD.size, 1)
    data, have = bytearray(HEAD.unpack(head)[0] if len(head) == HEAD.size else 0), 0
    while have < len(data):
        came = jobs.recv_into(memoryview(data)[have:])
        if not came:
            break
        have += came
    if not data or have < len(data):
        os._exit(0)
    return bytes(data), files


def _xgrammar() -> Any:
    """xgrammar, with stand-ins for two large packages that it imports and compiling has no use for."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tvm_ffi  # noqa: F401  (it does without torch, but not with a stand-in)

    for name in ("torch", "transformers"):
        sys.modules[name] = MagicMock()
    import xgrammar

    return xgrammar


# --- in the child of one job ----------------------------------------------------------------------


def _serve(client: socket.socket, job: dict[str, Any], xgrammar: Any, vocabulary: Any, is_spaced: bool) -> NoReturn:
    """Compiles one grammar and says so."""
    telling = threading.Lock()
    try:
        client.sendall(BEGUN)
        threading.Thread(target=_watch, args=(client, job["seconds"], telling), daemon=True).start()
        os.nice(job["nice"])
        limit = _mapped() + job["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        answer = _answer(job, xgrammar, vocabulary, is_spaced)
    except MemoryError:
        answer = TOO_LARGE
    except BaseException as problem:
        answer = TOO_LARGE if "bad_alloc" in str(problem) else REFUSED + said(problem).encode("utf-8", "replace")
    telling.acquire()
    try:
        client.sendall(answer)
    finally:
        os._exit(0)


def _watch(client: socket.socket, seconds: float, telling: threading.Lock) -> None:
    """Ends the process once it has taken too long, or nobody waits."""
    waiting = select.poll()
    waiting.register(client, select.POLLIN)  # it never sends anything, so this is its end
    while (left := seconds - time.process_time()) > 0:
        if waiting.poll(1 + 1000 * left):
            os._exit(0)
    with telling:
        client.sendall(TOO_LONG)
        os._exit(0)


def _mapped() -> int:
    """Bytes of address space so far."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _answer(job: dict[str, Any], xgrammar: Any, vocabulary: Any, is_spaced: bool) -> bytes:
    grammar = _grammar(xgrammar.Grammar, job["kind"], job["value"])
    if is_spaced:
        grammar = xgrammar.Grammar.concat(xgrammar.Grammar.from_ebnf('root ::= " "'), grammar)
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    compiled = compiler.compile_grammar(grammar)
    allowed = np.zeros((1, job["words"]), np.int32)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(allowed)
    if not allowed.any():
        return REFUSED + b"no token of this model begins such a text"
    text: bytes = compiled.serialize_json().encode()
    return COMPILED + text if len(text) <= job["most"] else TOO_LARGE


def _grammar(grammars: Any, kind: str, value: Any) -> Any:
    if kind == "json":
        return _strict(grammars, grammars.from_json_schema(value))
    if kind == "regex":
        return grammars.from_regex(value)
    if kind == "choice":
        quoted = (json.dumps(one, ensure_ascii=False) for one in value)
        return grammars.from_ebnf(f"root ::= {' | '.join(quoted)}")
    if kind == "grammar":
        return grammars.from_ebnf(value)
    return grammars.from_json_schema('{"type": "object", "additionalProperties": true}')


def _strict(grammars: Any, grammar: Any) -> Any:
    """The grammar of a JSON schema, without the control characters that xgrammar lets into strings of limited
    length."""
    text = str(grammar)
    loose, strict = r"""[^\"\\\r\n]""", r"""[^\0-\x1f\"\\]"""
    return grammars.from_ebnf(text.replace(loose, strict)) if loose in text else grammar


def said(problem: BaseException) -> str:
    """xgrammar's message, without the time and the place in its sources."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", str(problem))
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    return " ".join(text.split())[:500]


if __name__ == "__main__":
    main()
