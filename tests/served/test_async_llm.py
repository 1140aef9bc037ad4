"""``AsyncLLM``: many coroutines, one engine; what each is given, and what becomes of those that leave."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from core.driving import HeldEngine
from core.forking import in_child
from patience import FOREVER_S, PATIENCE_S, wait_until

from kvtier import CacheClosed, DuplicateRequest, InvalidRequest, RequestTooLarge
from kvtier.machine.wakeup import Wakeup
from runner import AsyncLLM, EngineDead, Overloaded, RequestOutput, RequestOutputKind, SamplingParams
from runner.api.async_llm import LONG
from runner.engine import service
from runner.metrics.metrics import Metrics
from runner.model.hybrid import HybridModel
from runner.needle import make_prompt, weights_path

PROMPT = make_prompt(600, seed=0)
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return HybridModel.load(weights_path())


@pytest.fixture(scope="module")
def engine_of_all(model: HybridModel) -> Iterator[AsyncLLM]:
    with AsyncLLM(model, "cpu", "4MiB", "4MiB", max_batched_tokens=256, max_running=4) as served:
        yield served
        assert asyncio.run(served.audit()) == []


@pytest.fixture
def llm(engine_of_all: AsyncLLM) -> AsyncLLM:
    """Idle: requests of the test before may be ending, as those whose last output has just been read."""
    wait_until(lambda: not engine_of_all.engine.has_requests(), "the engine is idle")
    return engine_of_all


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **options})


async def collect(llm: AsyncLLM, prompt: Any = PROMPT.text, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params(**options))]


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(llm: AsyncLLM) -> None:
    """It waited for the engine's thread, and for those that read prompts, which run in its parent only."""
    before = asyncio.run(collect(llm))[-1]
    refused = "CacheClosed: this engine is of the process that this one was forked from"
    calls: list[Callable[[], Any]] = [
        lambda: asyncio.run(collect(llm)),
        lambda: asyncio.run(collect(llm, [1] * 3000)),
        lambda: asyncio.run(llm.check_health()),
        lambda: asyncio.run(llm.reset_prefix_cache()),
        lambda: asyncio.run(llm.audit()),
    ]
    for call in calls:
        assert in_child(call).startswith(refused)
    assert in_child(lambda: (llm.is_running, llm.close(), asyncio.run(llm.abort("r")))) == "(False, None, False)"
    assert asyncio.run(collect(llm))[-1].token_ids == before.token_ids


def test_pieces_add_up_to_what_comes_at_the_end(llm: AsyncLLM) -> None:
    async def all_kinds() -> list[list[RequestOutput]]:
        return [await collect(llm, output_kind=kind) for kind in RequestOutputKind]

    cumulative, deltas, (final,) = asyncio.run(all_kinds())
    assert final.finished and final.finish_reason == "length" and len(final.token_ids) == 12
    assert "".join(output.text for output in deltas) == cumulative[-1].text == final.text
    assert [token for output in deltas for token in output.token_ids] == cumulative[-1].token_ids == final.token_ids
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len(deltas) > 3, "tokens come as they are made"
    texts = [output.text for output in cumulative]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert 0 < (final.ttft_s or 0) < final.latency_s


def test_callers_of_one_engine_are_served_together_and_each_gets_its_own(llm: AsyncLLM) -> None:
    prompts = [make_prompt(200 + 50 * i, seed=i) for i in range(6)]

    async def everybody() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(llm, p.text, ignore_eos=False, output_kind=FINAL) for p in prompts))

    assert [outputs[-1].text for outputs in asyncio.run(everybody())] == [p.answer.removesuffix(" .") for p in prompts]


@pytest.mark.parametrize("stop", ["0 0", ["8 0 0 6 unknown", "0 0 6"], " 0 0"])
def test_a_stop_string_over_several_tokens_is_never_given_out(llm: AsyncLLM, stop: Any) -> None:
    whole = asyncio.run(collect(llm, output_kind=FINAL))[0].text
    outputs = asyncio.run(collect(llm, stop=stop, output_kind=DELTA))
    text = "".join(output.text for output in outputs)
    stops = [stop] if isinstance(stop, str) else stop
    _, first = min((whole.find(s) + len(s), s) for s in stops)  # what is complete first ends the text
    assert text == whole[: whole.find(first)] and outputs[-1].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason in stops
    with_it = asyncio.run(collect(llm, stop=stop, include_stop_str_in_output=True))[-1]
    assert with_it.text.startswith(text) and with_it.text.endswith(str(with_it.outputs[0].stop_reason))


def test_the_prompt_of_several_answers_is_computed_once(llm: AsyncLLM) -> None:
    prompt = make_prompt(800, seed=77).token_ids
    before = llm.engine.computed_tokens
    found = asyncio.run(collect(llm, prompt, n=4, max_tokens=3, temperature=1, seed=5, output_kind=FINAL))[0]
    assert [answer.index for answer in found.outputs] == [0, 1, 2, 3] and found.finished
    assert llm.engine.computed_tokens - before < len(prompt) + 4 * (16 + 3)
    again = asyncio.run(collect(llm, prompt, n=4, max_tokens=3, temperature=1, seed=5, output_kind=FINAL))[0]
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in found.outputs]


def leave(how: str) -> Callable[[AsyncLLM], Awaitable[None]]:
    async def leaving(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPT.text, params(max_tokens=100_000), "leaver")
        await anext(stream)
        if how == "closed":
            await stream.aclose()
        elif how == "cancelled":
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "dropped":
            del stream
        else:
            assert await llm.abort("leaver") and not await llm.abort("nobody")
            last = [output async for output in stream][-1]
            assert last.finish_reason == "abort" and last.finished

    return leaving


@pytest.mark.parametrize("how", ["closed", "cancelled", "dropped", "aborted"])
def test_who_leaves_takes_the_request_along(llm: AsyncLLM, how: str) -> None:
    async def main() -> None:
        before = llm.engine.generated_tokens
        await leave(how)(llm)
        while llm.engine.has_requests():
            await asyncio.sleep(0.01)
        assert llm.engine.generated_tokens - before < 90_000, "the request went on"

    asyncio.run(main())
    assert llm.load() == {"waiting": 0, "running": 0, "waiting_tokens": 0}


def test_who_reads_slowly_keeps_nobody_waiting_and_finds_all_at_once(llm: AsyncLLM) -> None:
    async def main() -> None:
        slow = llm.generate(PROMPT.text, params(max_tokens=200, output_kind=DELTA))
        first = await anext(slow)
        await collect(llm)
        while llm.engine.has_requests():
            await asyncio.sleep(0.005)
        await asyncio.wrap_future(llm.thread.call(lambda: None))  # what the last step has made is told
        rest = await anext(slow)
        assert rest.finished and len(first.token_ids) + len(rest.token_ids) == 200

    asyncio.run(main())


def test_nothing_blocks_the_loop_while_a_prompt_is_computed(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop itself lets the forward go on."""
    forward, computes, go_on = llm.model.forward, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        computes.set()
        assert go_on.wait(PATIENCE_S), "the loop stands still"
        return forward(*args)

    async def main() -> None:
        task = asyncio.ensure_future(collect(llm, max_tokens=1))
        while not computes.is_set():
            await asyncio.sleep(0.001)
        go_on.set()
        assert (await task)[-1].finished

    monkeypatch.setattr(llm.model, "forward", held)
    asyncio.run(main())


def test_long_lists_of_bad_words_are_not_read_on_the_loop(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[threading.Thread] = []

    def read(*_: object) -> list[tuple[int, ...]]:
        readers.append(threading.current_thread())
        return [(7,)]

    monkeypatch.setattr(service, "tokens_of", read)
    for words in (["w1"], ["w1"] * LONG):
        asyncio.run(collect(llm, [7, 8], bad_words=words, max_tokens=1))
    assert [reader is threading.current_thread() for reader in readers] == [True, False]


def test_several_event_loops_share_an_engine(llm: AsyncLLM) -> None:
    expected, found = asyncio.run(collect(llm))[-1].text, []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(collect(llm))[-1].text)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("", {}, InvalidRequest),
        ([-1], {}, InvalidRequest),
        ({"prompt": "x", "colour": 1}, {}, InvalidRequest),
        ([5] * 9000, {}, RequestTooLarge),
        ([5] * 4, {"logit_bias": {10**6: 1.0}}, InvalidRequest),
        ([5] * 600_000, {"prompt_logprobs": 1}, InvalidRequest),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_queued(
    llm: AsyncLLM, prompt: Any, options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        asyncio.run(collect(llm, prompt, **options))
    assert llm.load()["waiting_tokens"] == 0 and not llm.engine.has_requests()


def test_a_name_that_is_taken_is_refused_and_the_first_goes_on(llm: AsyncLLM) -> None:
    async def main() -> None:
        first = llm.generate(PROMPT.text, params(), "mine")
        await anext(first)
        with pytest.raises(DuplicateRequest, match="mine"):
            await anext(llm.generate(PROMPT.text, params(), "mine"))
        assert [output async for output in first][-1].finish_reason == "length"

    asyncio.run(main())


def test_beyond_its_bound_the_queue_says_when_to_come_back(model: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with AsyncLLM(model, "cpu", "1MiB", 0, max_running=1, max_waiting_tokens=700) as llm:
            schedule, go = llm.scheduler.schedule, threading.Event()
            monkeypatch.setattr(llm.scheduler, "schedule", lambda: (go.wait(), schedule())[1])  # the first one waits
            first = asyncio.ensure_future(collect(llm))
            while not llm.load()["waiting_tokens"]:
                await asyncio.sleep(0.001)
            with pytest.raises(Overloaded, match="tokens wait already, of at most 700") as problem:
                await collect(llm)
            assert problem.value.retry_after_s >= 1
            go.set()
            await first
            assert (await collect(llm))[-1].finished, "an empty queue takes a prompt of any length"

    asyncio.run(main())


def test_prompts_tell_their_logprobs_whole_also_if_they_are_cached(llm: AsyncLLM) -> None:
    plain = asyncio.run(collect(llm, max_tokens=2, output_kind=FINAL))[0]
    asked = asyncio.run(collect(llm, max_tokens=2, prompt_logprobs=1, logprobs=0, output_kind=FINAL))[0]
    assert asked.token_ids == plain.token_ids
    assert asked.prompt_logprobs is not None and asked.prompt_logprobs[0] is None
    names = [next(iter(one)) for one in asked.prompt_logprobs[1:] if one is not None]
    assert names == PROMPT.token_ids[1:]
    assert [next(iter(one)) for one in asked.outputs[0].logprobs or ()] == asked.token_ids


def test_the_cache_is_forgotten_on_request(llm: AsyncLLM) -> None:
    async def main() -> list[int]:
        found = []
        for _ in range(2):
            found.append(sum((await collect(llm, max_tokens=1))[-1].cached_tokens.values()))
        assert await llm.reset_prefix_cache()
        found.append(sum((await collect(llm, max_tokens=1))[-1].cached_tokens.values()))
        return found

    _, warm, cold = asyncio.run(main())
    assert warm > 0 and cold == 0


def test_a_dead_engine_is_told_to_all_who_wait_and_to_all_who_come(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncLLM(model, "cpu", "1MiB", 0, max_running=2) as llm:
            streams = [llm.generate(PROMPT.text, params(max_tokens=10_000)) for _ in range(3)]
            tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            monkeypatch.setattr(llm.scheduler, "commit", lambda *_: 1 / 0)
            for stream, task in zip(streams, tasks, strict=True):
                with pytest.raises(EngineDead, match="ZeroDivisionError"):
                    await task
                    async for _ in stream:
                        pass
            assert not llm.is_running
            with pytest.raises(EngineDead):
                await llm.check_health()
            with pytest.raises(EngineDead):
                await collect(llm)
        with pytest.raises(EngineDead):
            await collect(llm)

    asyncio.run(main())


def test_close_ends_all_who_wait(model: HybridModel) -> None:
    async def main() -> None:
        llm = AsyncLLM(model, "cpu", "1MiB", 0)
        task = asyncio.ensure_future(collect(llm, max_tokens=100_000))
        while not llm.engine.has_requests():
            await asyncio.sleep(0.001)
        await llm.shutdown()
        with pytest.raises(CacheClosed):
            await task
        with pytest.raises(CacheClosed):
            await collect(llm)

    asyncio.run(main())


def test_every_request_is_counted_once_however_it_ends(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(llm, "needle")
    monkeypatch.setattr(llm, "metrics", metrics)

    async def main() -> None:
        await asyncio.gather(*(collect(llm, max_tokens=5, n=2, temperature=1) for _ in range(3)))
        await collect(llm, stop="0 0")
        await leave("closed")(llm)
        for bad in ("", [5] * 9000):
            with pytest.raises((InvalidRequest, RequestTooLarge)):
                await collect(llm, bad)

    asyncio.run(main())
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found[sample.name, sample.labels.get("finished_reason") or sample.labels.get("why", "")] = sample.value
    ended = {reason: n for (name, reason), n in found.items() if name == "vllm:request_success_total" and n}
    assert ended == {"length": 6, "stop": 1, "abort": 1}
    assert found["kvtier:arrived_requests_total", ""] == found["vllm:e2e_request_latency_seconds_count", ""] == 5
    assert found["kvtier:refused_requests_total", "invalid"] == found["kvtier:refused_requests_total", "too_large"] == 1
    assert found["vllm:time_to_first_token_seconds_count", ""] == 8
    tokens = found["vllm:request_generation_tokens_sum", ""]
    assert found["vllm:inter_token_latency_seconds_count", ""] == tokens - 8


class Held(HeldEngine):
    """Copies do not end before they are told to; whoever waits for them sleeps."""

    def __init__(self, memory: Any) -> None:
        super().__init__(memory)
        self.woken, self.is_slept_for = Wakeup(), threading.Event()

    def wait(self, timeout_s: float) -> bool:
        self.is_slept_for.set()
        self.woken.wait(timeout_s)
        self.woken.clear()
        return super().wait(timeout_s)

    def wake(self) -> None:
        self.woken.set()


def test_who_comes_while_only_copies_are_under_way_is_not_kept_waiting(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread sleeps until a copy ends; it slept on beside a new request."""
    monkeypatch.setattr("runner.engine.loop.IDLE_WAIT_S", FOREVER_S)

    async def main() -> None:
        async with AsyncLLM(model, "cpu", "1MiB", "1MiB", copy_engine=Held, deadline_s=FOREVER_S) as llm:
            await collect(llm, max_tokens=1)
            while llm.engine.has_requests():
                await asyncio.sleep(0.001)
            copier = llm.cache.copy_engine
            copier.is_slept_for.clear()
            llm.scheduler.wake()
            while not copier.is_slept_for.is_set():
                await asyncio.sleep(0.001)
            assert llm.engine.has_work(), "a store is under way"
            await asyncio.wait_for(collect(llm, [5, 6, 7], max_tokens=1), PATIENCE_S)
            copier.release()
            llm.scheduler.wake()

    asyncio.run(main())


def test_a_name_may_be_used_again_as_soon_as_its_stream_is_closed(llm: AsyncLLM) -> None:
    async def main() -> None:
        for _ in range(4):
            stream = llm.generate(PROMPT.text, params(max_tokens=50), "again")
            await anext(stream)
            await stream.aclose()

    asyncio.run(main())


def test_a_cancelled_call_does_not_keep_others_from_their_end(model: HybridModel) -> None:
    async def main() -> None:
        llm = AsyncLLM(model, "cpu", "1MiB", 0)
        task = asyncio.ensure_future(collect(llm, max_tokens=100_000))
        while not llm.engine.has_requests():
            await asyncio.sleep(0.001)
        llm.thread.call((go_on := threading.Event()).wait)
        assert llm.thread.call(lambda: 1).cancel()
        go_on.set()
        await llm.shutdown()
        with pytest.raises(CacheClosed):
            await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(main())


def test_event_loops_that_are_over_are_let_go(llm: AsyncLLM) -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        await collect(llm, max_tokens=1)
        return weakref.ref(asyncio.get_running_loop())

    gone = asyncio.run(main())
    llm.thread.call(lambda: None).result(PATIENCE_S)  # the engine's thread holds the loop while it wakes its readers
    gc.collect()
    assert gone() is None
