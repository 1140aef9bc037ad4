"""The main job: long requests back to back, on a device pool that holds about one and a half of them.

Two distinct prompts take turns: S0, S1, S0, ... Each is sent the moment the previous one has answered. So S1 arrives
while S0's stores are in flight, and must push S0 out of the device pool. When S0 comes again, its prefix comes back
from the host tier. In this situation a second 90k-token request has crashed a serving engine's allocator.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from kvtier import CacheSpec, ConfigError
from kvtier.coordinator.running import check_limits
from kvtier.geometry.kinds import Kind
from runner import needle
from runner.api.llm import LLM
from runner.demo.questions import ask
from runner.engine.memory import Memory
from runner.engine.outputs import RequestOutput
from runner.model import checkpoint
from runner.model.hybrid import HybridModel, max_tokens
from runner.model.prompts import ordinary_tokens
from runner.sampling.params import SamplingParams

TOKENS = 90_112
REQUESTS = 3
MAX_BATCHED_TOKENS = 3072
LEAST_STEPS = 20
"""Steps for a prompt on a model of full size, so that its bar moves."""
LEAST_STEP_TOKENS = 128
"""Fewest tokens of such a step, whatever their number."""
DEVICE_REQUESTS = 1.61
"""Full-attention tokens of the default device pool, in requests: 145k tokens for 90k-token prompts."""
HOST_REQUESTS = 2.5
ORDER_WITH_A_DEVICE_HIT = (0, 1, 0, 0)
"""Cold, cold, from the host, from the device."""
MAX_NEW_TOKENS = 16

Progress = Callable[[int, int, int], None]
"""Called with (request, tokens computed or restored, tokens of its prompt), with 0 tokens when a request begins."""
Prompt = tuple[str, list[int], str | None]
"""Name, token ids, the right answer if there is one."""


@dataclass(frozen=True)
class Served:
    """One request of the demo. Tokens are prompt tokens by source."""

    prompt: str
    tokens: int
    ttft_s: float
    latency_s: float
    device_tokens: int
    host_tokens: int
    computed_tokens: int
    preemptions: int
    finish_reason: str
    answer: str
    token_ids: list[int]
    expected: str | None
    """The right answer, if the prompt has one."""

    @property
    def right(self) -> bool | None:
        """Whether the answer begins with the right one; None if there is none."""
        if self.expected is None:
            return None
        return re.match(rf"{re.escape(self.expected)}(?!\d)", self.answer) is not None


@dataclass(frozen=True)
class Report:
    """The results of the demo."""

    model: str
    dtype: str
    """The dtype of the weights."""
    device: str
    load_s: float
    warmup_s: float
    wall_s: float
    requests: list[Served]
    stats: dict[str, Any] = field(repr=False)
    violations: list[str]
    retrieves: bool
    """The model is known to find the answers: a wrong one is a fault. Other models may just not be able to."""

    @property
    def repeats(self) -> list[tuple[Served, Served]]:
        """(first, again) for every prompt that was sent more than once."""
        first: dict[str, Served] = {}
        pairs = []
        for served in self.requests:
            if served.prompt in first:
                pairs.append((first[served.prompt], served))
            first.setdefault(served.prompt, served)
        return pairs

    @property
    def same_answers(self) -> bool:
        """Whether every repeated prompt got the same tokens as the first time."""
        return all(a.token_ids == b.token_ids for a, b in self.repeats)

    @property
    def right_answers(self) -> bool:
        """Whether every answer that can be checked is right."""
        return all(s.right is not False for s in self.requests)

    @property
    def ok(self) -> bool:
        """All requests were answered, equally, rightly if the model can, and the cache is sound."""
        ended = all(s.finish_reason in ("stop", "length") for s in self.requests)
        right = self.right_answers or not self.retrieves
        return ended and self.same_answers and right and not self.violations

    @property
    def speedup(self) -> float | None:
        """First-token time of a cold prompt over that of the same prompt served again."""
        pairs = self.repeats
        return pairs[0][0].ttft_s / pairs[0][1].ttft_s if pairs and pairs[0][1].ttft_s else None

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        summary = {"same_answers": self.same_answers, "right_answers": self.right_answers, "speedup": self.speedup}
        return asdict(self) | summary | {"ok": self.ok}


def run(
    model: str | None = None,
    device: str = "cpu",
    tokens: int = TOKENS,
    requests: int | Sequence[int] = REQUESTS,
    device_memory: Memory | None = None,
    host_memory: Memory | None = None,
    progress: Progress | None = None,
    on_loaded: Callable[[LLM], None] | None = None,
    attention: str = "auto",
    dtype: Any = None,
    **options: Any,
) -> Report:
    """Serves prompts of ``tokens`` tokens with ``model`` (a folder or hub id; None: the bundled model).

    With a tokenizer, a prompt hides a number and asks for it; without one it is random tokens. ``requests``: their
    number, taking turns between S0 and S1, or the prompt of each (0 or 1). ``dtype``: of the weights, and of K and V
    unless ``kv_cache_dtype`` says otherwise; None: the checkpoint's.
    """
    order = [i % 2 for i in range(requests)] if isinstance(requests, int) else list(requests)
    begun = time.perf_counter()
    bundled, path = model is None, needle.weights_path() if model is None else model
    config = checkpoint.read_config(checkpoint.find_folder(path, ["config.json"]))
    check_length(config, tokens, "the bundled model" if bundled else str(model))
    prompts = _bundled_prompts(tokens) if bundled else []
    step_tokens = MAX_BATCHED_TOKENS if bundled else max(LEAST_STEP_TOKENS, -(-tokens // LEAST_STEPS))
    options.setdefault("max_batched_tokens", min(step_tokens, MAX_BATCHED_TOKENS))
    step_tokens, _ = check_limits(options["max_batched_tokens"], 1)
    spec = CacheSpec.from_config(config)
    if device_memory is None:
        device_memory = pool_blocks(spec, tokens, DEVICE_REQUESTS, step_tokens)
    if host_memory is None:
        host_memory = pool_blocks(spec, tokens, HOST_REQUESTS, step_tokens)
    with LLM(path, device, device_memory, host_memory, attention=attention, dtype=dtype, **options) as llm:
        prompts = prompts or _prompts(llm.model, tokens)
        load_s = time.perf_counter() - begun
        if on_loaded is not None:
            on_loaded(llm)
        begun = time.perf_counter()
        served = [_serve(llm, i, *prompts[which], progress) for i, which in enumerate(order)]
        llm.settle()
        return Report(
            model="bundled needle model" if bundled else llm.model.name,
            dtype=str(llm.model.dtype).removeprefix("torch."),
            device=str(llm.model.device),
            load_s=load_s,
            warmup_s=llm.cache.warmup_s,
            wall_s=time.perf_counter() - begun,
            requests=served,
            stats=llm.stats(),
            violations=[f"{v.invariant}: {v.detail}" for v in llm.audit()],
            retrieves=bundled,
        )


def pool_blocks(spec: CacheSpec, tokens: int, requests: float, step_tokens: int = MAX_BATCHED_TOKENS) -> dict[str, int]:
    """Blocks per group for about ``requests`` requests of ``tokens`` tokens, and the running chunk."""
    blocks = {}
    for group in spec.groups:
        if group.attention.kind is Kind.FULL:
            need = int(requests * tokens)
        else:
            need = int(4 * requests * group.attention.span_tokens) + step_tokens
        blocks[group.name] = -(-min(need, max(tokens, int(requests * tokens))) // group.block_tokens)
    return blocks


def check_length(config: Any, tokens: int, name: str) -> None:
    """Raises ``ConfigError`` for prompts of more tokens than the model was made for."""
    limit = max_tokens(config)
    if limit is not None and tokens + MAX_NEW_TOKENS > limit:
        most = limit - MAX_NEW_TOKENS
        raise ConfigError(f"{name} was made for {limit:,} tokens; use --tokens {most} or fewer")


def bundled_length(tokens: int) -> int:
    """The largest length up to ``tokens`` of the bundled model's prompts. Raises ``ConfigError`` if there is none."""
    try:
        return needle.usable_length(tokens)
    except ValueError as problem:
        raise ConfigError(f"--tokens {tokens} is too short for the bundled model's prompts: {problem}") from None


def _bundled_prompts(tokens: int) -> list[Prompt]:
    """The two prompts for the bundled model. Raises ``ConfigError`` if they cannot be that short."""
    length = bundled_length(tokens)
    made = [needle.make_prompt(length, seed=seed) for seed in (0, 1)]
    return [(f"S{i}", p.token_ids, p.answer) for i, p in enumerate(made)]


def _prompts(model: HybridModel, tokens: int) -> list[Prompt]:
    """The two prompts for another model: questions, if it has a tokenizer that can ask them, else random tokens."""
    asked = [None if model.tokenizer is None else ask(model.tokenizer, tokens, seed) for seed in (0, 1)]
    return [
        (f"S{i}", *pair)
        if pair is not None and max(pair[0]) < model.vocab_size
        else (f"S{i}", ordinary_tokens(model.vocab_size, tokens, seed=i), None)
        for i, pair in enumerate(asked)
    ]


def _serve(llm: LLM, number: int, name: str, ids: list[int], expected: str | None, progress: Progress | None) -> Served:
    params = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0)
    bar: Any = False if progress is None else partial(_Bar, llm, partial(progress, number), len(ids))
    return _served(llm, name, llm.generate(ids, params, use_tqdm=bar)[0], expected)


class _Bar:
    """Shows the progress of one prompt; ``LLM.generate`` would show how many prompts have ended."""

    def __init__(self, llm: LLM, show: Callable[[int, int], None], tokens: int, **_: Any) -> None:
        self._scheduler, self._show, self._tokens = llm.scheduler, show, tokens

    def __enter__(self) -> _Bar:
        self._show(0, self._tokens)
        return self

    def __exit__(self, *problem: object) -> None:
        if problem[0] is None:
            self._show(self._tokens, self._tokens)

    def set_postfix_str(self, *_: Any, **__: Any) -> None:
        pass

    def update(self, _: int) -> None:
        for request_id in self._scheduler.request_ids:
            at = self._scheduler.progress(request_id)
            if at is not None:
                self._show(min(at[0], self._tokens), self._tokens)


def _served(llm: LLM, name: str, output: RequestOutput, expected: str | None) -> Served:
    device, host = output.cached_tokens["device"], output.cached_tokens["host"]
    tokens = len(output.prompt_token_ids)
    text = output.text if llm.tokenizer is None else llm.tokenizer.decode(output.token_ids)
    return Served(
        prompt=name,
        tokens=tokens,
        ttft_s=output.ttft_s or 0.0,
        latency_s=output.latency_s,
        device_tokens=device,
        host_tokens=host,
        computed_tokens=tokens - device - host,
        preemptions=output.preemptions,
        finish_reason=str(output.finish_reason),
        answer=text.strip() or " ".join(map(str, output.token_ids)),
        token_ids=output.token_ids,
        expected=expected,
    )
