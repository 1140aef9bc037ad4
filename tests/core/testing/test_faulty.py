"""A bad link around real copies: whatever goes wrong, texts are right; and it does go wrong."""

from __future__ import annotations

from textwrap import dedent

import pytest

from core.driving import prompt
from kvtier import ChunkedLocal, FullAttention, SlidingWindow, testing as public
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.testing import Faults, FaultyLink, expected_tokens

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)}


def rounds(serving, n: int = 12):
    """Four prompts, again and again, through pools that hold one; returns the transfers' counts."""
    for k in range(n):
        text = prompt(k % 4, 29)
        assert serving.serve(f"{k}", text, 4).token_ids == expected_tokens(serving.spec, text, 4)
    return serving.cache.stats().transfers


def served(make_serving, **chances):
    link = FaultyLink(ThreadsEngine, Faults(**chances), seed=3)
    return make_serving(GROUPS, 10, 96, copy_engine=link, verify="full")


@pytest.mark.parametrize("fault", ["fail", "tear", "corrupt"])
def test_texts_are_right_whatever_goes_wrong(make_serving, fault):
    counts = rounds(served(make_serving, **{fault: 0.3}))
    assert counts.loaded_blocks > 0
    assert counts.failed_loads > 0
    assert (counts.failed_stores > 0) == (fault != "corrupt")
    assert (counts.corrupt_blocks > 0) == (fault == "corrupt")


def test_without_faults_nothing_fails(make_serving):
    counts = rounds(served(make_serving))
    assert (counts.failed_loads, counts.failed_stores, counts.corrupt_blocks) == (0, 0, 0)
    assert counts.loaded_blocks > 0


def test_bytes_that_were_said_to_be_stored_are_damaged_in_the_host_tier(make_serving):
    """Unverified, they give another text: the fault is real."""
    link = FaultyLink(ThreadsEngine, Faults(corrupt=1.0))
    serving = make_serving(GROUPS, 10, 96, copy_engine=link)
    with pytest.raises(AssertionError):
        rounds(serving)


def test_a_transfer_that_failed_by_itself_is_reported_as_it_failed(make_serving, monkeypatch):
    serving = served(make_serving)
    monkeypatch.setattr(serving.cache.copy_engine.memory, "copy", lambda transfer: 1 / 0)
    serving.serve("A", prompt(0, 29), 1)
    assert serving.cache.stats().transfers.failed_stores > 0


def test_the_example_of_the_module_runs():
    example = dedent(public.__doc__.split("An example:\n")[1])
    exec(compile(example, "kvtier.testing", "exec"), {})
