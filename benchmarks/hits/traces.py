"""Published traces as workloads: equal block ids become equal tokens, and an answer is one token.

A trace's folder has ``mooncake/conversation_trace.jsonl`` of Mooncake's FAST'25 release, and
``agentic_coding/*.jsonl.gz`` of kv-cache-tester's sessions in their compact form.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.hits.workloads import VOCABULARY, Ask, Tokens, Writer

BLOCK_TOKENS = 64
MOST_TOKENS = 131_000
"""Longer prompts are left out."""
ANSWER = np.array([5], np.int32)
_MOONCAKE_BLOCK = 512


def text_of(space: int, ids: npt.NDArray[np.int64], block_tokens: int) -> Tokens:
    """The text of these blocks; ids of different spaces are different blocks."""
    x: npt.NDArray[Any] = np.uint64(space << 40) + ids.astype(np.uint64)[:, None] * np.uint64(block_tokens)
    x = (x + np.arange(block_tokens, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(VOCABULARY) + np.uint64(1)).astype(np.int32).ravel()


def mooncake(folder: Path, whole: bool, requests: int = 2000) -> list[Ask]:
    """``whole``: prompts are cut to whole blocks, of which the last, partial one has an id of its own."""
    asked = []
    with (folder / "mooncake" / "conversation_trace.jsonl").open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, requests)):
            of = json.loads(line)
            length = of["input_length"]
            if length > MOST_TOKENS:
                continue
            prompt = text_of(0, np.array(of["hash_ids"]), _MOONCAKE_BLOCK)[:length]
            if whole and length >= _MOONCAKE_BLOCK:  # and a token, so that all of them can be found
                prompt = np.append(prompt[: length // _MOONCAKE_BLOCK * _MOONCAKE_BLOCK], ANSWER)
            asked.append(Ask(number, prompt, ANSWER))
    return asked


def agentic(folder: Path, sessions: int = 50, most: int = 24, least: int = 6, longest: int = 110_000) -> list[Ask]:
    """The beginnings of coding agents' sessions, without their sub-agents; ``most`` and ``least`` requests of each."""
    made: list[list[Ask]] = []
    for path in sorted((folder / "agentic_coding").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                session, ids = list[Ask](), np.empty(0, np.int64)
                for request in json.loads(line)["requests"]:
                    if isinstance(request, dict):  # a sub-agent
                        continue
                    _, _, _, length, _, kept, runs = request
                    ids = np.concatenate([ids[:kept], *(np.arange(first, first + n) for first, n in runs)])
                    if 0 < length <= longest and len(ids) and len(session) < most:
                        text = text_of(1 + number, ids, BLOCK_TOKENS)[:length]
                        session.append(Ask(number, text, ANSWER))
                if len(session) >= least:
                    made.append(session)
                if len(made) == sessions:
                    return Writer(9).interleaved(made)
    return Writer(9).interleaved(made)


TRACES: dict[str, Callable[[Path], list[Ask]]] = {
    "mooncake": lambda folder: mooncake(folder, whole=False),
    "mooncake_whole": lambda folder: mooncake(folder, whole=True),
    "agentic": agentic,
}
