"""One benchmark from its options to its report's data."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvtier.machine.errors import ConfigError
from runner.bench.client import Client, Target
from runner.bench.drive import Driver, Ending, Run
from runner.bench.forms import ChatDialogue, DialogueMaker, IdsDialogue, Said, TextDialogue, say
from runner.bench.goals import Goals
from runner.bench.names import History, PromptForm
from runner.bench.plan import Plan, Session, Turn
from runner.bench.server import ServerFacts, look, probe
from runner.bench.texts import LocalTexts, ServerTexts, Texts, ids_of_words
from runner.bench.tokens import Alphabet, key_of, prompt_of
from runner.bench.told import LONGEST_PROMPT

PROBE_TOKENS, PROBE_ANSWER = 16, 2
SPOKEN_AT_ONCE = 8
"""Sessions whose texts are asked for at a time."""


@dataclass(frozen=True)
class Options:
    """How a plan is sent and counted."""

    target: Target
    model: str | None = None
    max_concurrency: int | None = None
    ready_s: float = 0.0
    warmups: int = 0
    prompt_form: PromptForm = PromptForm.IDS
    history: History = History.ANSWERS
    token_ids: tuple[int, int] | None = None
    tokenizer: str | None = None
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    goals: Goals = field(default_factory=Goals)
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)


@dataclass(frozen=True)
class Finished:
    """A run with all that its figures depend on."""

    plan: Plan
    options: Options
    server: ServerFacts
    alphabet: Alphabet
    run: Run
    date: datetime


Progress = Callable[[int, int, int], None]


def execute(plan: Plan, options: Options, on_stage: Callable[[str], None], on_news: Progress) -> Finished:
    """Runs it. Ctrl-C ends it early, and what was measured is returned all the same.

    Raises ``ConfigError`` if the server cannot be used, before anything is measured.
    """
    return asyncio.run(_execute(plan, options, on_stage, on_news))


async def _execute(plan: Plan, options: Options, on_stage: Callable[[str], None], on_news: Progress) -> Finished:
    if plan.longest > LONGEST_PROMPT:
        raise ConfigError(
            f"the longest prompt with its answer has {plan.longest:,} tokens; more than {LONGEST_PROMPT:,} are not made"
        )
    _raise_file_limit()
    async with Client(options.target, time.perf_counter) as client:
        on_stage("asking the server")
        server = await look(client, options.model, options.ready_s)
        if server.max_model_len is not None and plan.longest > server.max_model_len:
            raise ConfigError(
                f"the longest prompt with its answer has {plan.longest:,} tokens, and {server.model!r} takes "
                f"{server.max_model_len:,}; make the workload's prompts shorter"
            )
        texts = LocalTexts(options.tokenizer) if options.tokenizer else ServerTexts(client, server.model)
        alphabet = await _alphabet(texts, options)
        on_stage("making prompts")
        warmups = _warmups(max(1, options.warmups))
        sessions = dict(enumerate(plan.sessions)) | {-1 - i: one for i, one in enumerate(warmups)}
        dialogues = await _dialogues(plan, options, server, alphabet, texts, sessions)
        on_stage("trying a request")
        for number in sorted(sessions)[: len(warmups)]:
            answer = await probe(client, dialogues(number, sessions[number]).body(0)[0])
            if _needs_ids(plan, options) and answer.token_ids is None:
                raise ConfigError("this server does not tell the token ids of its answers: use --history scripted")
        on_stage("")
        date = datetime.now(UTC)
        driver = Driver(plan, client, dialogues, options.max_concurrency, on_news)
        with _stopped_by_ctrl_c(driver):
            run = await driver.run()
        return Finished(plan, options, server, alphabet, run, date)


async def _dialogues(
    plan: Plan, options: Options, server: ServerFacts, alphabet: Alphabet, texts: Texts, sessions: dict[int, Session]
) -> DialogueMaker:
    """Makes dialogues of the form that was asked for; what is text is made ahead."""
    common, form = _common(plan, options, server), options.prompt_form
    is_chat = "chat" in options.target.endpoint
    if is_chat and form is PromptForm.IDS:
        raise ConfigError("chats take no token ids: use --prompt-form text, or --endpoint /v1/completions")
    if form is PromptForm.IDS:
        return lambda number, session: IdsDialogue(number, session, common, alphabet, plan.seed, options.history)
    kind, slots = ChatDialogue if is_chat else TextDialogue, asyncio.Semaphore(SPOKEN_AT_ONCE)

    async def one(number: int, session: Session) -> tuple[int, list[Said]]:
        async with slots:
            return number, await say(texts, number, session, alphabet, plan.seed, options.history)

    said = dict(await asyncio.gather(*(one(number, session) for number, session in sessions.items())))
    return lambda number, session: kind(session, common, said[number], options.history)


def _common(plan: Plan, options: Options, server: ServerFacts) -> dict[str, Any]:
    """The options that all bodies share."""
    found: dict[str, Any] = {
        "model": server.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.temperature is not None:
        found["temperature"] = options.temperature
    if options.ignore_eos:
        found["ignore_eos"] = True
    if _needs_ids(plan, options):
        found["return_token_ids"] = True
    return found | dict(options.extra_body)


def _needs_ids(plan: Plan, options: Options) -> bool:
    """Whether later prompts hold what was answered, as token ids."""
    if options.history is not History.ANSWERS or options.prompt_form is not PromptForm.IDS:
        return False
    return any(turn.continues for session in plan.sessions for turn in session.turns)


async def _alphabet(texts: Texts, options: Options) -> Alphabet:
    if options.token_ids is not None:
        first, last = options.token_ids
        return Alphabet(range(first, last + 1), f"--token-ids {first}:{last}")
    return Alphabet(await ids_of_words(texts), texts.source)


def _warmups(count: int) -> list[Session]:
    """Requests that are not counted; the first shows whether the server takes them."""
    return [
        Session(0.0, (Turn(prompt_of([(key_of("warm-up", i), PROBE_TOKENS)]), PROBE_ANSWER),)) for i in range(count)
    ]


@contextlib.contextmanager
def _stopped_by_ctrl_c(driver: Driver) -> Iterator[None]:
    """The first Ctrl-C stops the run, a second one ends the process. Threads other than the main one get none."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        driver.stop(Ending.INTERRUPTED)

    with contextlib.suppress(RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


def _raise_file_limit() -> None:
    """Allows as many connections as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
