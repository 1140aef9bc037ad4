"""What is sent, when, and what is recorded of it, against a server whose every delay is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from patience import FOREVER_S, PATIENCE_S

from bench.fake_server import FakeServer, Request, Script, fake_server
from kvtier.machine.errors import ConfigError
from runner.bench import drive, figures, sse
from runner.bench.client import Client, Target
from runner.bench.drive import Driver, Ending, Run
from runner.bench.forms import IdsDialogue
from runner.bench.names import History, Shape, WorkloadName
from runner.bench.plan import Plan, Session, Turn
from runner.bench.record import Outcome, Record
from runner.bench.tokens import Alphabet, prompt_of
from runner.bench.workloads import make

IDS = Alphabet(range(10, 99), "the test")
SLACK_S = 0.002
"""The two clocks need not agree to the last digit."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run waits before its first request."""
    monkeypatch.setattr(drive, "LEAD_S", 0.01)


def plan_of(*starts: float, turns: int = 1, think_s: float = 0.0, continues: bool = False) -> Plan:
    def turn(i: int, t: int) -> Turn:
        return Turn(prompt_of([(100 * i + t, 8)]), 4, think_s if t else 0.0, continues and t > 0)

    sessions = (Session(start, tuple(turn(i, t) for t in range(turns))) for i, start in enumerate(starts))
    return Plan("test", {}, 0, tuple(sessions))


def drive_plan(
    plan: Plan,
    script: Script,
    history: History = History.ANSWERS,
    max_concurrency: int | None = None,
    while_running: Callable[[Driver, FakeServer], Any] | None = None,
    **target: Any,
) -> tuple[Run, FakeServer]:
    """Sends ``plan`` to a server with this script."""

    async def go() -> tuple[Run, FakeServer]:
        async with fake_server(script) as fake, Client(Target(fake.url, **target), time.perf_counter) as client:
            common = {"model": "m", "stream": True}
            driver = Driver(
                plan, client, lambda n, s: IdsDialogue(n, s, common, IDS, plan.seed, history), max_concurrency
            )
            beside = asyncio.ensure_future(while_running(driver, fake)) if while_running else None
            run = await asyncio.wait_for(driver.run(), PATIENCE_S)
            if beside:
                await beside
            return run, fake

    return asyncio.run(go())


def test_known_delays_are_measured() -> None:
    async def script(request: Request) -> None:
        await asyncio.sleep(0.05)
        await request.whole(3, 0.02, prompt_tokens_details={"cached_tokens": 5})

    run, _ = drive_plan(plan_of(0.0, 0.1), script)
    for record, due_s in zip(run.records, (0.0, 0.1), strict=True):
        assert record.is_ok and record.due_s == due_s and due_s <= record.ready_s <= record.free_s <= record.sent_s
        assert record.ttft_s >= 0.07 - SLACK_S
        gaps = [b - a for a, b in zip(record.times, record.times[1:], strict=False)]
        assert len(gaps) == 2 and sum(gaps) >= 0.04 - SLACK_S
        assert record.end_s >= record.times[-1]
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (8, 3, 5)
        assert record.finish_reason == "length"
    assert run.ending is Ending.COMPLETE and run.duration_s == max(record.end_s for record in run.records)


def test_the_loop_is_open() -> None:
    """Nobody is answered before all have asked: a loop that waits for answers would wait for ever."""
    all_there = asyncio.Event()

    async def script(request: Request) -> None:
        there.append(request)
        if len(there) == 12:
            all_there.set()
        await all_there.wait()
        await request.whole(1)

    there: list[Request] = []
    run, _ = drive_plan(plan_of(*(0.01 * i for i in range(12))), script)
    assert [record.outcome for record in run.records] == [Outcome.OK] * 12


def test_many_that_are_due_at_once_do_not_wait_for_each_other_s_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load a round of the event loop takes long, so that one request a round would make a generator late."""
    rounds = 0

    async def script(request: Request) -> None:
        await request.whole(1)

    async def count(driver: Driver, fake: FakeServer) -> None:
        nonlocal rounds
        while len(driver.recorded.records) < 300:
            rounds += bool(driver.recorded.records)
            await asyncio.sleep(0)

    monkeypatch.setattr(drive, "AT_A_TIME_S", FOREVER_S)  # a round is as many as lie ready
    drive_plan(plan_of(*[0.0] * 300), script, while_running=count)
    assert rounds < 100


def test_max_concurrency_holds_back_and_says_how_long() -> None:
    under_way = [0, 0]

    async def script(request: Request) -> None:
        under_way[0] += 1
        under_way[1] = max(under_way)
        if under_way[0] == 2:
            both.set()
        await both.wait()
        await asyncio.sleep(0.05)
        under_way[0] -= 1
        await request.whole(1)

    both = asyncio.Event()
    run, _ = drive_plan(plan_of(0.0, 0.0, 0.0, 0.0), script, max_concurrency=2)
    waits = sorted(record.free_s - record.ready_s for record in run.records)
    assert under_way[1] == 2 and min(waits[2:]) >= 0.05 - SLACK_S
    assert all(record.late_s < record.queued_s for record in run.records if record.free_s - record.ready_s > 0.04)


def test_the_peak_is_counted_when_requests_are_sent_however_short_the_run() -> None:
    async def script(request: Request) -> None:
        await request.whole(1)

    plan = plan_of(0.0, 0.0, 0.0, 0.0)
    assert figures.schedule(plan, drive_plan(plan, script)[0], [50])["peak_concurrency"] == 4
    run = drive_plan(plan, script, max_concurrency=1)[0]
    assert figures.schedule(plan, run, [50])["peak_concurrency"] == 1


def test_a_redirect_is_told_and_not_followed() -> None:
    async def far(request: Request) -> None:
        await request.whole(1)

    async def go() -> None:
        async with fake_server(far) as other:

            async def script(request: Request) -> None:
                head = f"location: {other.url}/v1/completions\r\n"
                await request.answer(b"", "307 Temporary Redirect", head)

            (record,) = (await asyncio.to_thread(drive_plan, plan_of(0.0), script))[0].records
            assert record.outcome is Outcome.STATUS and other.requests == []
            assert record.error == f"307: a redirect to {other.url}/v1/completions, which is not followed"

    asyncio.run(go())


def test_an_error_without_end_is_read_in_part() -> None:
    async def script(request: Request) -> None:
        request.writer.write(b"HTTP/1.1 500 Oops\r\n\r\n" + b"long story " * 200_000)
        await asyncio.sleep(FOREVER_S)

    (record,) = drive_plan(plan_of(0.0), script, timeout_s=PATIENCE_S)[0].records
    assert record.outcome is Outcome.STATUS and record.error.startswith("500: long story long")


def test_a_turn_waits_for_the_answer_and_for_its_think_time() -> None:
    async def script(request: Request) -> None:
        await request.whole(2, 0.02)

    run, _ = drive_plan(plan_of(0.0, turns=3, think_s=0.05), script)
    first, second, third = run.records
    assert [record.is_open for record in run.records] == [True, False, False]
    for former, later in ((first, second), (second, third)):
        assert later.due_s == former.end_s + 0.05 and later.sent_s >= later.due_s


@pytest.mark.parametrize("history", History)
def test_a_conversation_grows_by_its_answers(history: History) -> None:
    async def script(request: Request) -> None:
        request.begin()
        for token in (7, 8, 9):
            request.piece(" x", token_ids=[token])
        request.piece("", token_ids=[1], finish_reason="length")
        request.send("[DONE]")

    plan = plan_of(0.0, turns=3, continues=True)
    run, fake = drive_plan(plan, script, history)
    sent = [request.body["prompt"] for request in fake.requests]
    own = [IDS.draw(turn.prompt, 0).tolist() for turn in plan.sessions[0].turns]
    if history is History.ANSWERS:
        assert sent == [own[0], own[0] + [7, 8, 9, 1] + own[1], own[0] + [7, 8, 9, 1] + own[1] + [7, 8, 9, 1] + own[2]]
    else:
        answers = sent[2][8:12], sent[2][20:24]
        assert sent[1] == own[0] + answers[0] + own[1] and sent[2] == sent[1] + answers[1] + own[2]
        assert sent == [request.body["prompt"] for request in drive_plan(plan, script, history)[1].requests]
    assert [record.planned_prompt for record in run.records] == [8, 20, 32]
    assert {request.body["max_tokens"] for request in fake.requests} == {4}


def test_a_server_that_does_not_tell_ids_gets_no_conversation_of_its_answers() -> None:
    async def script(request: Request) -> None:
        await request.whole(1)

    with pytest.raises(ConfigError, match="--history scripted"):
        drive_plan(plan_of(0.0, turns=2, continues=True), script)


async def _no_token(request: Request) -> None:
    request.begin()
    request.send("[DONE]")


async def _early_end(request: Request) -> None:
    request.begin()
    request.piece()


async def _error_event(request: Request) -> None:
    request.begin()
    request.piece()
    request.send({"error": {"message": "out of memory"}})
    request.send("[DONE]")


async def _not_json(request: Request) -> None:
    request.begin()
    request.send("{nothing")


async def _no_object(request: Request) -> None:
    request.begin()
    request.send([1, 2])


def _event(event: Any) -> Script:
    """One event, and an end as if all were well."""

    async def script(request: Request) -> None:
        request.begin()
        request.send(event)
        request.piece(finish_reason="stop")
        request.send("[DONE]")

    return script


def _choice(**choice: Any) -> Script:
    return _event({"choices": [choice]})


async def _endless_line(request: Request) -> None:
    request.begin()
    request.writer.write(b"data: " + b"x" * 5000)
    await asyncio.sleep(FOREVER_S)


async def _cut(request: Request) -> None:
    request.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n")
    request.piece()


async def _gone(request: Request) -> None:
    request.writer.close()


async def _silent(request: Request) -> None:
    await asyncio.sleep(FOREVER_S)


async def _busy(request: Request) -> None:
    await request.answer({"error": {"message": "the queue is full"}}, "429 Too Many Requests")


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        (_no_token, Outcome.BROKEN, "without a token"),
        (_early_end, Outcome.BROKEN, "ended before the answer did"),
        (_error_event, Outcome.ERROR_EVENT, "out of memory"),
        (_not_json, Outcome.MALFORMED, "not JSON"),
        (_no_object, Outcome.MALFORMED, "unknown form"),
        (_event("[" * 100_000), Outcome.MALFORMED, "nested too deeply"),
        (_event({"choices": ["text"]}), Outcome.MALFORMED, "unknown form"),
        (_event({"choices": {"a": 1}}), Outcome.MALFORMED, "unknown form"),
        (_event({"usage": [1]}), Outcome.MALFORMED, "unknown form"),
        (_choice(text=5), Outcome.MALFORMED, "unknown form"),
        (_choice(delta=5), Outcome.MALFORMED, "unknown form"),
        (_choice(text="a", finish_reason={"a": 1}), Outcome.MALFORMED, "unknown form"),
        (_choice(text="a", token_ids="xyz"), Outcome.MALFORMED, "unknown form"),
        (_choice(text="a", token_ids=[2**70]), Outcome.MALFORMED, "unknown form"),
        (_choice(text="a", token_ids=[1.5]), Outcome.MALFORMED, "unknown form"),
        (_endless_line, Outcome.MALFORMED, "longer than 4,096 bytes"),
        (_cut, Outcome.BROKEN, ""),
        (_gone, Outcome.BROKEN, "before an answer"),
        (_silent, Outcome.TIMEOUT, ""),
        (_busy, Outcome.STATUS, "429: the queue is full"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_trouble_is_told_by_kind(script: Script, outcome: Outcome, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if script is _endless_line:
        monkeypatch.setattr(sse, "LONGEST_EVENT", 4096)
    run, _ = drive_plan(plan_of(0.0), script, timeout_s=0.2 if script is _silent else PATIENCE_S)
    (record,) = run.records
    assert (record.outcome, record.is_ok) == (outcome, False) and error in record.error
    assert record.end_s >= record.sent_s and run.ending is Ending.COMPLETE


def test_a_failed_turn_ends_its_conversation_and_no_other() -> None:
    async def script(request: Request) -> None:
        first = IDS.draw(plan.sessions[0].turns[0].prompt, 0).tolist()
        await (_busy(request) if request.body["prompt"] == first else request.whole(1))

    plan = plan_of(0.0, 0.0, turns=2, continues=True)
    run, _ = drive_plan(plan, script, History.SCRIPTED)
    assert sorted((record.session, record.is_ok) for record in run.records) == [(0, False), (1, True), (1, True)]


def test_pieces_without_text_count_if_there_are_no_others() -> None:
    """A server without a tokenizer."""

    async def script(request: Request) -> None:
        request.begin()
        for _ in range(3):
            request.piece("")
        request.send("[DONE]")

    run, _ = drive_plan(plan_of(0.0), script)
    assert run.records[0].is_ok and len(run.records[0].times) == 3


def test_tokens_without_text_count_between_others() -> None:
    async def script(request: Request) -> None:
        request.begin()
        request.send({"choices": [{"index": 0, "text": "", "token_ids": []}]})  # an opening, no token yet
        for text in ("", " a", "", " b"):
            request.piece(text)
        request.piece("", finish_reason="stop")
        request.send("[DONE]")

    (record,) = drive_plan(plan_of(0.0), script)[0].records
    assert record.is_ok and len(record.times) == 3


@pytest.mark.parametrize(
    ("prompt", "answer", "details"),
    [("8", -1, None), (True, 8.0, 5), (10**400, 10**400, {"cached_tokens": 10**400})],
    ids=["text", "types", "huge"],
)
def test_usage_that_is_no_number_of_tokens_counts_as_not_told(prompt: Any, answer: Any, details: Any) -> None:
    async def script(request: Request) -> None:
        await request.whole(2, prompt_tokens=prompt, completion_tokens=answer, prompt_tokens_details=details)

    (record,) = drive_plan(plan_of(0.0), script)[0].records
    assert record.is_ok and (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (None, None, None)
    assert record.produced == 2


def test_a_stop_keeps_what_was_measured() -> None:
    async def script(request: Request) -> None:
        if request.body["prompt"] != fourth:
            await request.whole(1)
            return
        hanging.set()
        await asyncio.sleep(FOREVER_S)

    async def stop(driver: Driver, fake: FakeServer) -> None:
        await hanging.wait()
        while sum(record.is_ok for record in driver.recorded.records) < 3:
            await asyncio.sleep(0.001)
        driver.stop(Ending.INTERRUPTED)
        driver.stop(Ending.SERVER_DEAD)

    plan, hanging = plan_of(0.0, 0.0, 0.0, 0.02, FOREVER_S), asyncio.Event()
    fourth = IDS.draw(plan.sessions[3].turns[0].prompt, 0).tolist()
    run, _ = drive_plan(plan, script, while_running=stop)
    assert run.ending is Ending.INTERRUPTED and run.duration_s < FOREVER_S
    outcomes = [record.outcome for record in run.records]
    assert outcomes == [Outcome.OK] * 3 + [Outcome.INTERRUPTED] and run.records[3].end_s > 0


def test_a_server_that_dies_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "DEAD_AFTER_S", 0.05)

    async def script(request: Request) -> None:
        await request.whole(1)

    async def die(driver: Driver, fake: FakeServer) -> None:
        while len(fake.requests) < 3:
            await asyncio.sleep(0.005)
        fake.server.close()

    run, _ = drive_plan(plan_of(*(0.02 * i for i in range(3000))), script, while_running=die)
    assert run.ending is Ending.SERVER_DEAD and len(run.records) < 3000
    assert {record.outcome for record in run.records} <= {Outcome.OK, Outcome.CONNECT, Outcome.BROKEN}
    assert sum(record.outcome is Outcome.CONNECT for record in run.records) >= drive.DEAD_TRIES


def test_a_server_that_refuses_now_and_then_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(request: Request) -> None:
        await request.whole(1)

    monkeypatch.setattr(drive, "DEAD_AFTER_S", 0.0)
    tried: list[Outcome] = []

    async def go() -> None:
        async with fake_server(script) as fake, Client(Target(fake.url), time.perf_counter) as client:
            driver = Driver(plan_of(0.0), client, lambda n, s: None)
            for outcome in (Outcome.CONNECT, Outcome.CONNECT, Outcome.OK, Outcome.CONNECT, Outcome.CONNECT):
                tried.append(outcome)
                driver._look_for_death(Record(0, 0, 1, 1, 0.0, True, outcome=outcome))
                assert driver.recorded.ending is Ending.COMPLETE
            driver._look_for_death(Record(0, 0, 1, 1, 0.0, True, outcome=Outcome.CONNECT))
            assert driver.recorded.ending is Ending.SERVER_DEAD

    asyncio.run(go())


def test_the_same_seed_sends_the_same_bodies() -> None:
    async def script(request: Request) -> None:
        await request.whole(2)

    def bodies(seed: int) -> list[Any]:
        shape = Shape(num_prompts=6, random_input_len=20, random_output_len=3, random_range_ratio=0.5)
        plan = make(WorkloadName.RANDOM, shape, 100.0, 1.0, seed)
        run, fake = drive_plan(plan, script)
        assert [record.due_s for record in run.records] == [session.start_s for session in plan.sessions]
        return sorted(request.body["prompt"] for request in fake.requests)

    assert bodies(1) == bodies(1) != bodies(2)
