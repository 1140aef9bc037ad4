"""How much Python the engine's thread runs for a step: calls are counted, so that no busy machine decides."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from core.driving import prompt

import kvtier
import runner
from kvtier import FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.cache.kv_events.publisher import KVEventPublisher
from kvtier.testing import canary_spec
from runner import SamplingParams
from runner.engine.loop import Engine
from runner.engine.readers import Letters, Readers
from runner.engine.shares import Shares
from runner.engine.streams import Courier, LoopMail, ThreadMail, TokenStream
from runner.engine.thread import EngineThread
from runner.errors import EngineDead
from runner.sampling.state import SamplingState

GROUPS = {"full": (FullAttention(), 16), "win": (SlidingWindow(1024), 16)}
PACKAGES = tuple(str(Path(package.__file__ or "").parent) for package in (kvtier, runner))
ROWS = 256
STEPS = 12
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}


class Known:
    """A model whose logits are known already."""

    device, dtype, vocab_size, unsound = torch.device("cpu"), torch.float32, 8, ()

    def forward(self, step: Any, cache: KVCache) -> torch.Tensor:
        return torch.zeros(len(step.sample_rows), self.vocab_size)


def calls_of(work: Callable[[], Any]) -> Counter[str]:
    """Python functions of the two packages that ``work`` calls, by name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            found[f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def calls_of_steps(rows: int, mails: list[Any], come_and_go: bool = False, **sampling: Any) -> list[Counter[str]]:
    """The calls of each of some steps of ``rows`` decodes: with streams, a journal, a host tier, and a look for KV
    events in each. In one of them a block of every request is full. ``come_and_go``: before each step one is aborted,
    and the next one comes."""
    cache = KVCache(
        canary_spec(GROUPS),
        device="meta",
        device_blocks=dict.fromkeys(GROUPS, 2000),
        host_blocks=dict.fromkeys(GROUPS, 2000),
        journal_events=1 << 10,
    )
    scheduler = Scheduler(cache, max_batched_tokens=1 << 14, max_running=ROWS)
    kv_events = KVEventPublisher(cache, EVENTS, interval_s=0.0)
    engine = Engine(Known(), cache, scheduler, None, kv_events, Shares())  # type: ignore[arg-type]
    thread = EngineThread(engine, settles=False)
    params = SamplingParams(max_tokens=1000, ignore_eos=True, **sampling)
    streams: list[TokenStream] = []
    found: list[Counter[str]] = []

    def come() -> None:
        number = len(streams)
        request = Request(f"{number}", prompt(number, 17), 1000)
        streams.append(TokenStream(mails[number % len(mails)]))
        thread.submit([(request, SamplingState.of(params, request.tokens), streams[-1])])

    def work() -> None:
        for _ in range(rows):
            come()
        for _ in range(4):
            thread._turn()
        before = engine.generated_tokens
        for step in range(STEPS):
            if come_and_go:
                thread.abort(f"{step}")
                come()
            found.append(calls_of(thread._turn))
        assert engine.generated_tokens - before == STEPS * rows, "all of them decode"
        for name in scheduler.request_ids:
            thread.abort(name)

    try:
        thread.call(work).result()
    finally:
        thread.close()
        kv_events.close()
        cache.close()
    return found


def steps_with_posts(rows: int, posts: int, **options: Any) -> list[Counter[str]]:
    """``calls_of_steps`` with readers in so many event loops."""
    loops = [asyncio.new_event_loop() for _ in range(posts)]
    try:
        return calls_of_steps(rows, [LoopMail(Courier(loop)) for loop in loops], **options)
    finally:
        for loop in loops:
            loop.close()


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 1, "top_p": 0.9}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("posts", [1, 3])
def test_the_calls_of_a_step_do_not_grow_with_its_rows(
    sampling: dict[str, Any], posts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is called for a token on the engine's thread, whoever waits for it, and nothing for a full block."""
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    few, many = (steps_with_posts(rows, posts, **sampling) for rows in (16, ROWS))
    for one, other in zip(few, many, strict=True):
        assert one and other.total() <= one.total() + 2, (other - one).most_common(20)


def test_who_comes_and_who_goes_costs_no_call_for_each_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place in the service order is found by halves: some calls more for sixteen times as many."""
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    few, many = (steps_with_posts(rows, 1, come_and_go=True, temperature=0) for rows in (16, ROWS))
    for one, other in zip(few, many, strict=True):
        assert one and other.total() <= one.total() + 20, (other - one).most_common(20)


def test_a_thread_that_waits_for_the_end_is_not_woken_by_tokens() -> None:
    for at_once in (True, False):
        mail = ThreadMail(at_once)
        stream, readers = TokenStream(mail), Readers(1)
        readers.enter(0, stream)
        for token in (3, 4):
            readers.letters(np.zeros(1, np.int32), np.array([token]), None).send()
        assert mail._wakes.qsize() == (2 if at_once else 0)
        assert mail.get(0.0) is stream and stream.tokens == [3, 4], "they are found all the same"
        letters = Letters()
        letters.to(mail).lost.append((weakref.ref(stream), "r", EngineDead("it has ended")))
        letters.send()
        assert mail._wakes.qsize() == 1 and mail.get(0.0) is stream and stream.end is not None


def test_a_letter_brings_each_stream_its_own_tokens_in_order() -> None:
    """Opened late and together, by one of two that wait."""
    mine, other = ThreadMail(), ThreadMail()
    streams = [TokenStream(mine if k % 2 else other) for k in range(6)]
    readers = Readers(8)
    for row, stream in enumerate(streams):
        readers.enter(row, stream)
    readers.enter(6, None)
    for first in (10, 20):
        rows = np.array([5, 1, 6, 2, 3], np.int32)
        readers.letters(rows, first + rows.astype(np.int64), None).send()
    del streams[3], stream  # nobody holds it any more
    assert mine.get(0.0) is streams[-1] and mine.get(0.0) is streams[1] and mine.get(0.0) is None
    assert [stream.tokens for stream in streams] == [[], [11, 21], [], [], [15, 25]]
    assert other.get(0.0) is streams[2] and streams[2].tokens == [12, 22]
    readers.enter(1, streams[0])
    readers.letters(np.array([1], np.int32), np.array([7]), None).send()
    assert other.get(0.0) is streams[0] and streams[0].tokens == [7], "the row is another request's"
