"""What a connector costs the engine's scheduler, beside vLLM's own connectors in one run, in turns.

vLLM's real scheduler runs; workers are simulated (``simulated``). The model has the groups of Gemma-3-27B. Every figure
is CPU time in calls to the connector, with a host tier that is full, so that stores push content out:

* ``decode``: a step of 256 requests that generate, while none of them fills a block: the median of such steps.
* ``decode_mean``: the mean of all their steps over 512 tokens each, with blocks that get full. Only in the large pool.
* ``miss``: a request of 90,112 tokens without a hit, from its arrival until it has its first blocks.
* ``store``: the rest of that request, in chunks of 8,192 tokens, until the last store was reported.
* ``hit``: the same prompt with 17 more tokens, after the device has forgotten it, until its last copy was reported.
"""

from __future__ import annotations

import gc
import random
import statistics
from typing import Any

from benchmarks.vllm.shapes import BLOCK_TOKENS, SHAPES
from benchmarks.vllm.simulated import KVTIER, OFFLOADING, SIMPLE, Simulated

FIGURES = ("decode", "decode_mean", "miss", "hit", "store")
PROMPT_TOKENS = 90_112
NUM_DECODING = 256
TEXT_TOKENS = 512
POOLS = ((10_000, 10 << 30), (500_000, 300 << 30))
"""(device blocks, host bytes)."""
ARRIVAL = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "get_external_cache_hit_sources")
PROMPT_BYTES = PROMPT_TOKENS * 10 * 16 * 128 * 2 * 2
"""Of the ten full layers: what a prompt takes of a host tier at least."""


def measure(num_blocks: int, host_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each connector, with these pools."""
    simulated = {
        name: Simulated(name, SHAPES["Gemma-3-27B"], num_blocks, host_bytes, most_requests=NUM_DECODING)
        for name in (KVTIER, SIMPLE, OFFLOADING)
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in simulated}
    hits = dict.fromkeys(simulated, 0)
    fill, rng = host_bytes // PROMPT_BYTES + 1, random.Random(0)
    for repeat in range(fill + repeats):
        tokens = rng.choices(range(512), k=PROMPT_TOKENS)
        if repeat == fill:
            gc.collect()
            gc.freeze()  # as vLLM's engine core does
        for name, engine in simulated.items():
            figures = _prompt(engine, f"p{repeat}", tokens)
            hits[name] = engine.hit_tokens
            if repeat >= fill:
                _note(found[name], figures)
    for repeat in range(2):
        for name, engine in simulated.items():
            figures = _decode(engine, f"d{repeat}", rng, num_blocks)
            if repeat:
                _note(found[name], figures)
    gc.unfreeze()
    return [
        {"connector": name, "device_blocks": num_blocks, "host_gib": host_bytes >> 30, "hit_tokens": hits[name]}
        | {what: _summary(values) for what, values in found[name].items()}
        for name in simulated
    ]


def _note(found: dict[str, list[float]], figures: dict[str, list[float]]) -> None:
    for what, values in figures.items():
        found.setdefault(what, []).extend(values)


def _summary(values: list[float]) -> dict[str, float]:
    """Microseconds."""
    return {"median": round(statistics.median(values), 1), "least": round(min(values), 1), "times": len(values)}


def _prompt(engine: Simulated, name: str, tokens: list[int]) -> dict[str, list[float]]:
    """One prompt cold, and again from the host; leaves an empty device."""
    engine.take_times()
    engine.add(name, tokens, 1)
    engine.finish()
    cold = engine.take_times()
    engine.forget_device()
    engine.add(f"{name}-again", [*tokens, *tokens[:17]], 1)
    engine.finish()
    hit = sum(engine.take_times().values())
    engine.forget_device()
    miss = sum(cold.get(call, 0.0) for call in ARRIVAL)
    return {"miss": [miss], "store": [sum(cold.values()) - miss], "hit": [hit]}


def _decode(engine: Simulated, name: str, rng: random.Random, num_blocks: int) -> dict[str, list[float]]:
    """Steps of requests that all generate: of equal length, so that most steps fill no block; then of any length."""
    found = {"decode": _quiet_steps(engine, name, rng)}
    if num_blocks >= NUM_DECODING * 7 * (2 * TEXT_TOKENS // BLOCK_TOKENS):
        lengths = [BLOCK_TOKENS + 1 + rng.randrange(TEXT_TOKENS // 2) for _ in range(NUM_DECODING)]
        _start(engine, f"{name}-any", lengths, TEXT_TOKENS + 8, rng)
        engine.take_times()
        for _ in range(TEXT_TOKENS):
            engine.step()
        found["decode_mean"] = [sum(engine.take_times().values()) / TEXT_TOKENS]
        engine.finish()
        engine.forget_device()
    return found


def _quiet_steps(engine: Simulated, name: str, rng: random.Random) -> list[float]:
    _start(engine, name, [BLOCK_TOKENS + 1] * NUM_DECODING, 4 * BLOCK_TOKENS, rng)
    running, quiet = engine.scheduler.running, []
    while running[0].num_output_tokens < 3 * BLOCK_TOKENS:
        engine.take_times()
        engine.step()
        spent = sum(engine.take_times().values())
        if running[0].num_computed_tokens % BLOCK_TOKENS > 2:  # before that, a block's store is planned or reported
            quiet.append(spent)
    engine.finish()
    engine.forget_device()
    return quiet


def _start(engine: Simulated, name: str, lengths: list[int], text_tokens: int, rng: random.Random) -> None:
    """Steps until requests with prompts of these lengths all generate."""
    for i, length in enumerate(lengths):
        engine.add(f"{name}-{i}", rng.choices(range(512), k=length), text_tokens)
    running = engine.scheduler.running
    while len(running) < len(lengths) or any(request.num_output_tokens == 0 for request in running):
        engine.step()


def run(quick: bool) -> list[dict[str, Any]]:
    """All pools."""
    rows = []
    for num_blocks, host_bytes in POOLS[: 1 if quick else None]:
        rows += measure(num_blocks, host_bytes, 3 if quick else 9)
    return rows
