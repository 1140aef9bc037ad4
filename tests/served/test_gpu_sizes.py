"""The figures of ``make gpu`` at their real sizes, without memory: pools on torch's meta device, and no model.

What is looked at is that pools, prompts and steps fit each other: that a prompt comes back whole from where it should,
that chunks are as large as they may be, and that all requests decode together to the end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import decode, layouts, link, serving, ttft
from benchmarks.gpu.clock import HostClock
from benchmarks.gpu.rig import TOKENS
from benchmarks.gpu.serving import Stage, first_token, forget, random_tokens
from kvtier import CacheSpec, KVCache, Scheduler
from runner.engine.loop import Engine

VOCABULARY = 1000


@pytest.fixture
def stage() -> Stage:
    """As on a GPU, but for the device."""
    setup = link.Setup(None, "meta", lambda: pytest.fail("no sums"))
    return Stage(setup, HostClock(), lambda: pytest.fail("no graphs"), "NVIDIA H200", lambda: 1 << 50)


class Silent:
    """A model that says token 0."""

    device, tokenizer, vocab_size, unsound = torch.device("cpu"), None, VOCABULARY, ()

    def __init__(self) -> None:
        self.computed: list[int] = []
        """Tokens of each step."""

    def forward(self, step: Any, cache: Any) -> torch.Tensor:
        self.computed.append(step.num_tokens)
        return torch.zeros(len(step.sample_rows), 1)


def start(spec: CacheSpec, blocks: tuple[dict[str, int], dict[str, int]], chunk: int, running: int) -> Any:
    """What the figures use of an ``LLM``."""
    cache = KVCache(spec, device="meta", device_blocks=blocks[0], host_blocks=blocks[1], key_secret=b"sizes")
    scheduler = Scheduler(cache, chunk, running)
    model = Silent()
    engine = Engine(model, cache, scheduler)  # type: ignore[arg-type]
    return SimpleNamespace(model=model, cache=cache, scheduler=scheduler, engine=engine)


@pytest.mark.parametrize("name", ttft.MODELS)
def test_long_prompts_come_back_whole(name: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    spec = serving.spec_of(stage, name)
    llm = start(spec, ttft._blocks(stage, spec), stage.chunk, 2)
    with llm.cache:
        warm = random_tokens(llm.model, stage.chunk + stage.chunk // 2, seed=1)
        prompt = random_tokens(llm.model, TOKENS + 1, seed=2)
        found = []
        for text in (warm, prompt):
            for again in range(3):
                found.append(dict(first_token(llm, f"{len(found)}", text).cached_tokens))
                if again == 1:
                    forget(llm)
        assert llm.cache.audit() == []
    none = {"device": 0, "host": 0}
    n = (len(warm) - 1) // 16 * 16
    assert found[:3] == [none, {"device": n, "host": 0}, {"device": 0, "host": n}]
    assert found[3:] == [none, {"device": TOKENS, "host": 0}, {"device": 0, "host": TOKENS}]
    whole, rest = [stage.chunk], len(warm) - stage.chunk
    assert llm.model.computed == [*whole, rest, len(warm) - n, len(warm) - n, *whole * 11, 1, 1, 1]


def test_the_steps_over_other_pages(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    size, group = decode.Size(), serving.spec_of(stage, decode.MODEL).group("full")
    rows, context = size.running, 2 * size.context
    new_tokens, pages = layouts.room(group, rows, context, stage.chunk)
    with KVCache(CacheSpec([group]), device="meta", device_blocks={"full": pages}) as cache:
        scheduler = Scheduler(cache, stage.chunk, rows)
        steps = layouts.steps(scheduler, rows, context, layouts.CHUNKS * stage.chunk, new_tokens)
        chunk, decoded = ((what, step.num_tokens, int(step.seq_lens.min())) for what, step in steps)
        assert chunk == ("chunk of 8,192 up to 32,768 tokens", 8192, 32768)
        assert decoded[:2] == ("decode of 64 x 4,096 tokens", 64)
        assert context < decoded[2] <= context + new_tokens
        assert cache.stats().requests["preemptions"] == 0


def test_all_requests_decode_together_to_the_last_measured_step(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    size = decode.Size()
    spec = serving.spec_of(stage, decode.MODEL)
    llm = start(spec, decode._blocks(spec, stage.chunk, size), stage.chunk, size.running)
    with llm.cache:
        decode.start(llm, size, stage.chunk)
        prompts = [n for n in llm.model.computed if n > size.running]
        assert set(prompts[:-1]) == {stage.chunk}
        for _ in range(size.measured):
            before = llm.engine.generated_tokens
            assert llm.engine.step().finished == []
            assert llm.engine.generated_tokens - before == size.running
        assert llm.cache.stats().requests["preemptions"] == 0
        llm.engine.drop_all()
        assert llm.cache.audit() == []
