"""``benchmarks.states``: what its texts share, and the figures that are the same on any machine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.states import measure
from benchmarks.states.agentic import read
from benchmarks.states.shapes import GLM_FLASH, QWEN3_5_27B, QWEN3_NEXT

SESSION = [
    [0.0, 0, 0, 200, 30, 0, [[0, 3]]],
    {"sub": "a", "t": 1, "reqs": [[1.0, 0, 0, 130, 5, 0, [[0, 2]]]]},
    [5.0, 0, 0, 300, 7, 3, [[3, 1]]],
    [9.0, 0, 0, 310, 2, 2, [[7, 2]]],
]
"""The second turn goes on from the first one and its answer; the third one parts from it after two blocks."""


def test_turns_share_what_the_trace_says(tmp_path: Path) -> None:
    folder = tmp_path / "agentic_coding"
    folder.mkdir()
    with gzip.open(folder / "x.jsonl.gz", "wt") as lines:
        lines.write("\n".join(json.dumps({"requests": SESSION}) for _ in range(2)))
    turns = [turn for turn in read(tmp_path) if turn.session == 0]
    first, second, third = turns
    assert [(len(turn.prompt), len(turn.answer)) for turn in turns] == [(200, 30), (300, 7), (310, 2)]
    assert np.array_equal(second.prompt[:230], np.concatenate([first.prompt, first.answer]))
    assert np.array_equal(third.prompt[:128], second.prompt[:128])
    assert not (third.prompt[128:300] == second.prompt[128:]).any()
    others = [turn for turn in read(tmp_path) if turn.session != 0]
    assert sorted(len(turn.prompt) for turn in others) == [130, 130, 200, 300, 310]
    assert not any((turn.prompt[:64] == first.prompt[:64]).any() for turn in others)
    assert len(read(tmp_path, every=2)) == 4


def test_sizes_are_those_of_the_models() -> None:
    sizes = [
        (s.spec().token_bytes, s.spec().group("state").block_bytes >> 20) for s in (QWEN3_NEXT, QWEN3_5_27B, GLM_FLASH)
    ]
    assert sizes == [(24_576, 74), (65_536, 147), (15_488, 71)]
    assert QWEN3_NEXT.spec(states=False).names == ("full",)


def test_snapshots_of_a_long_prompt_are_few_bytes() -> None:
    found = measure.copies()
    assert found["states_kept"] == 2
    assert found["share"] < 0.01


def test_prompts_that_were_pushed_out_of_the_device_are_found_in_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_AUDIT", "0")  # full size: an audit after each step would be all that it does
    assert [row["hits"] for row in measure.replay()] == [8, 8, 0]
