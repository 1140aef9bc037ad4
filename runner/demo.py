"""The main job: long requests back to back, on a device pool that holds about one and a half of them.

Two distinct prompts take turns: S0, S1, S0, ... Each is sent the moment the one before it has answered, so S1 arrives
while S0's stores are in flight and must push S0 out of the device pool; when S0 comes again, its prefix comes back
from the host tier. That is the shape in which a second 90k-token request has crashed a serving engine's allocator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier import CacheSpec, ConfigError, Request
from kvtier.spec import Kind
from runner import needle
from runner.llm import LLM
from runner.memory import Memory
from runner.model import HybridModel
from runner.options import check_host_link, has_tier
from runner.outputs import RequestOutput
from runner.prompts import ordinary_tokens
from runner.sampling import SamplingParams

TOKENS = 90_112
REQUESTS = 3
MAX_BATCHED_TOKENS = 3072
DEVICE_REQUESTS = 1.61
"""Full-attention tokens of the default device pool, in requests: 145k tokens for 90k-token prompts."""
HOST_REQUESTS = 2.5
ORDER_WITH_A_DEVICE_HIT = (0, 1, 0, 0)
"""Cold, cold, from the host, from the device."""
MAX_NEW_TOKENS = 16

Progress = Callable[[int, int, int], None]
"""Called with (request, tokens computed or restored, tokens of its prompt)."""


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
    """The right answer, where the prompt has one."""


@dataclass(frozen=True)
class Report:
    """What the demo saw."""

    model: str
    dtype: str
    """Of the weights."""
    device: str
    load_s: float
    warmup_s: float
    wall_s: float
    requests: list[Served]
    stats: dict[str, Any] = field(repr=False)
    violations: list[str]

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
        return all(s.expected is None or s.answer == s.expected for s in self.requests)

    @property
    def ok(self) -> bool:
        """Everything was answered, equally, rightly, and the cache is sound."""
        ended = all(s.finish_reason in ("stop", "length") for s in self.requests)
        return ended and self.same_answers and self.right_answers and not self.violations

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
    """Serves prompts of ``tokens`` tokens with ``model`` (a folder or hub id; None: the bundled one).

    ``requests``: how many, taking turns between S0 and S1, or which prompt each of them sends (0 or 1).
    ``dtype``: of the weights, and of K and V unless ``kv_cache_dtype`` says otherwise; None: the checkpoint's.
    """
    order = [i % 2 for i in range(requests)] if isinstance(requests, int) else list(requests)
    if host_memory is None or has_tier(host_memory):
        check_host_link(device, options)
    begun = time.perf_counter()
    hybrid = HybridModel.load(needle.weights_path() if model is None else model, device, dtype, attention=attention)
    spec = hybrid.spec()
    if hybrid.max_tokens is not None and tokens + MAX_NEW_TOKENS > hybrid.max_tokens:
        most = hybrid.max_tokens - MAX_NEW_TOKENS
        raise ConfigError(f"{hybrid.name} was made for {hybrid.max_tokens:,} tokens; use --tokens {most} or fewer")
    if device_memory is None:
        device_memory = pool_blocks(spec, tokens, DEVICE_REQUESTS)
    if host_memory is None:
        host_memory = pool_blocks(spec, tokens, HOST_REQUESTS)
    options.setdefault("max_batched_tokens", MAX_BATCHED_TOKENS)
    with LLM(hybrid, device, device_memory, host_memory, **options) as llm:
        load_s = time.perf_counter() - begun
        prompts = _prompts(hybrid, tokens, bundled=model is None)
        if on_loaded is not None:
            on_loaded(llm)
        begun = time.perf_counter()
        served = [_serve(llm, i, *prompts[which], progress) for i, which in enumerate(order)]
        while llm.engine.has_work():
            llm.engine.step()
        return Report(
            model="bundled needle model" if model is None else hybrid.name,
            dtype=str(hybrid.dtype).removeprefix("torch."),
            device=str(hybrid.device),
            load_s=load_s,
            warmup_s=llm.cache.warmup_s,
            wall_s=time.perf_counter() - begun,
            requests=served,
            stats=llm.stats(),
            violations=[f"{v.invariant}: {v.detail}" for v in llm.cache.audit()],
        )


def pool_blocks(spec: CacheSpec, tokens: int, requests: float) -> dict[str, int]:
    """Blocks per group for about ``requests`` requests of ``tokens`` tokens, and the chunk that is running."""
    blocks = {}
    for group in spec.groups:
        if group.attention.kind is Kind.FULL:
            need = int(requests * tokens)
        else:
            need = int(4 * requests * group.attention.span_tokens) + MAX_BATCHED_TOKENS
        blocks[group.name] = -(-min(need, max(tokens, int(requests * tokens))) // group.block_tokens)
    return blocks


def _prompts(model: HybridModel, tokens: int, bundled: bool) -> list[tuple[str, list[int], str | None]]:
    """(name, token ids, the right answer if there is one) of the two prompts."""
    if bundled:
        try:
            length = needle.usable_length(tokens)
        except ValueError as problem:
            raise ConfigError(f"--tokens {tokens} is too short for the bundled model's prompts: {problem}") from None
        made = [needle.make_prompt(length, seed=seed) for seed in (0, 1)]
        return [(f"S{i}", p.token_ids, p.answer) for i, p in enumerate(made)]
    return [(f"S{i}", ordinary_tokens(model.vocab_size, tokens, seed=i), None) for i in (0, 1)]


def _serve(llm: LLM, number: int, name: str, ids: list[int], expected: str | None, progress: Progress | None) -> Served:
    params = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0)
    request_id = f"demo-{number}"
    llm.engine.add(Request(request_id, ids, params.max_tokens, llm.model.eos_token_ids), params)
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = llm.engine.step()
        at = llm.scheduler.progress(request_id)
        if progress is not None:
            progress(number, min(at[0], len(ids)) if at else len(ids), len(ids))
    return _served(llm, name, outputs[0], expected)


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
        finish_reason=output.finish_reason,
        answer=text.strip() or " ".join(map(str, output.token_ids)),
        token_ids=output.token_ids,
        expected=expected,
    )
