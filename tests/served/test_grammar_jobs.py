"""Grammars that compile for ever, callers that leave, and processes that die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from core.forking import in_child
from transformers import AutoTokenizer

from kvtier import CacheClosed, ConfigError, InvalidRequest
from runner import LLM, AsyncLLM, SamplingParams, needle
from runner.errors import GrammarFailed
from runner.sampling.grammars import jobs as grammar_jobs
from runner.sampling.grammars.structured import GrammarCompiler
from runner.sampling.grammars.structured_outputs import StructuredOutputs

WAIT_S = 60.0
SMALL = StructuredOutputs(choice=["4", "7"])


def bomb(number: int) -> StructuredOutputs:
    """Short, and compiles for minutes."""
    counted = "|".join(f"[78 ]{{{i},{1000 + number}}}" for i in range(300))
    return StructuredOutputs(regex=f"({counted})*")


def make(limit_s: float) -> GrammarCompiler:
    tokenizer = AutoTokenizer.from_pretrained(needle.weights_path())
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id], limit_s)


@pytest.fixture(autouse=True)
def others() -> Iterator[set[int]]:
    """Processes of other tests' engines. A test leaves none of its own behind."""
    others = set(processes(os.getpid()))
    yield others
    until(lambda: others.issuperset(processes(os.getpid())), "processes end with their compiler")


@pytest.fixture
def compiler(others: set[int]) -> Iterator[GrammarCompiler]:
    """Without an end: what ends, ends for another reason."""
    compiler = make(limit_s=10_000.0)
    yield compiler
    compiler.close()


def processes(parent: int) -> list[int]:
    """The processes that compile grammars, straight below another one."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            state, its_parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_ours = b"runner.sampling.grammars.child" in (folder / "cmdline").read_bytes()
            if is_ours and state != "Z" and int(its_parent) == parent:
                found.append(int(folder.name))
    return found


def children() -> list[int]:
    """Those that compile a grammar now."""
    return [child for process in processes(os.getpid()) for child in processes(process)]


def until(happens: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_a_grammar_that_takes_too_long_is_refused_and_leaves_nothing_behind() -> None:
    compiler = make(limit_s=0.2)
    waiting = [compiler.begin(bomb(i)) for i in range(3)]
    for future in waiting:
        with pytest.raises(InvalidRequest, match=r"regex cannot be used: .* more than 0.2 s of CPU time; make it simp"):
            future.result(WAIT_S)
    assert compiler.begin(SMALL).result(WAIT_S).nbytes
    until(lambda: not children(), "each ends once it has said so")
    compiler.close()


def test_quick_grammars_do_not_wait_for_slow_ones(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "SHORT_S", 0.1)
    waiting = [compiler.begin(bomb(i)) for i in range(5)]
    until(lambda: len(children()) >= grammar_jobs.AT_ONCE, "slow ones have turns of their own")
    assert compiler.begin(SMALL).result(WAIT_S).nbytes
    assert not any(future.done() for future in waiting)
    for future in waiting:
        future.cancel()
    until(lambda: not children(), "a grammar ends with its caller")


def test_a_grammar_ends_with_its_last_caller(compiler: GrammarCompiler) -> None:
    first, second = compiler.begin(bomb(0)), compiler.begin(bomb(0))
    until(children, "it is being compiled")
    first.cancel()
    assert compiler.begin(SMALL).result(WAIT_S).nbytes
    until(children, "the second still waits for it, if only after a turn for quick ones")
    assert not second.done()
    second.cancel()
    until(lambda: not children(), "nobody waits for it")


def test_a_forked_child_waits_for_nothing_and_ends_nothing(compiler: GrammarCompiler) -> None:
    waiting = compiler.begin(bomb(0))
    until(children, "it is being compiled")
    assert in_child(lambda: compiler.compile(SMALL)).startswith("CacheClosed")
    assert in_child(compiler.close) == "None"
    assert compiler.begin(SMALL).result(WAIT_S).nbytes
    until(children, "it is still being compiled, if only after a turn for quick ones")
    assert not waiting.done()
    waiting.cancel()


def test_memory_has_a_bound(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "MOST_MEMORY", 2**25)
    with pytest.raises(InvalidRequest, match="compiling it takes too much memory"):
        compiler.begin(bomb(0)).result(WAIT_S)
    assert compiler.begin(SMALL).result(WAIT_S).nbytes
    monkeypatch.setattr(grammar_jobs, "MOST_BYTES", 100)
    with pytest.raises(InvalidRequest, match="too much memory"):
        compiler.begin(StructuredOutputs(regex="[478 ]{1,50}")).result(WAIT_S)


def test_a_process_that_dies_is_made_anew(compiler: GrammarCompiler, others: set[int]) -> None:
    compiler.compile(SMALL)
    (process,) = set(processes(os.getpid())) - others
    maps = Path(f"/proc/{process}/maps").read_text()
    assert "xgrammar" in maps and "libtorch" not in maps
    until(lambda: not children(), "the first has said its grammar, and ends")
    waiting = compiler.begin(bomb(0))
    until(children, "it is being compiled")
    os.kill(children()[0], signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="the process that compiled it has ended"):
        waiting.result(WAIT_S)
    os.kill(process, signal.SIGKILL)
    assert compiler.begin(StructuredOutputs(choice=["4", "8"])).result(WAIT_S).nbytes
    assert process not in processes(os.getpid())


def test_a_process_that_never_starts_is_an_error_for_each_caller(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(GrammarFailed, match="has ended, or cannot be started"):
            compiler.begin(SMALL).result(WAIT_S)
    monkeypatch.undo()
    assert compiler.begin(SMALL).result(WAIT_S).nbytes


def test_close_ends_what_is_being_compiled() -> None:
    compiler = make(limit_s=10_000.0)
    waiting = [compiler.begin(bomb(i)) for i in range(3)]
    until(children, "they are being compiled")
    compiler.close()
    for future in waiting:
        with pytest.raises(CacheClosed):
            future.result(WAIT_S)
    with pytest.raises(CacheClosed):
        compiler.compile(SMALL)


def test_a_cancelled_request_takes_its_grammar_along() -> None:
    async def leaves(llm: AsyncLLM) -> None:
        task = asyncio.ensure_future(anext(llm.generate([7], SamplingParams(structured_outputs=bomb(0)))))
        async with asyncio.timeout(WAIT_S):
            while not children():
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while children():
                await asyncio.sleep(0.01)

    options = {"device": "cpu", "device_memory": "8MiB", "host_memory": 0}
    with pytest.raises(ConfigError, match="grammar_limit_s must be a number of seconds"):
        LLM(needle.weights_path(), grammar_limit_s=0, **options)
    with AsyncLLM(needle.weights_path(), **options) as llm:
        asyncio.run(leaves(llm))
