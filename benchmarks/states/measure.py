"""The figures, each as plain values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hits.traces import agentic
from benchmarks.micro.rows import decoding
from benchmarks.micro.shapes import SHAPES, books, prompt
from benchmarks.states.agentic import read
from benchmarks.states.shapes import BLOCK_TOKENS, GLM_FLASH, QWEN3_5_27B, QWEN3_NEXT
from kvtier import CacheSpec, FullAttention, GroupSpec, Part, RecurrentState, Request, Scheduler
from runner.bench.replay.asked import Asked, Tokens
from runner.bench.replay.bound import measure as bound_of
from runner.bench.replay.serve import Found, serve

RUNNING = 256
REPEATS = 320
LONG = 8_192
WEIGHT_BYTES = 80 * 10**9 * 2
"""Of Qwen3-Next-80B in bfloat16: a prompt of 8,192 tokens goes to all of its experts."""
GIB = 2**30


# --- a decode step ----------------------------------------------------------------------------------


def decode_steps() -> dict[str, float]:
    """Microseconds of a decode step of 256 rows: schedule, commit and what engines take, medians; in turn."""
    part = Part("recurrent0", (4,), "float32")
    full = GroupSpec("full", FullAttention(), 1, 1, 8, block_tokens=16)
    specs = {
        "full": SHAPES["L"],
        "full + window": SHAPES["G"],
        "full + state": CacheSpec([full, GroupSpec("state", RecurrentState((part,)), 1)]),
    }
    schedulers = {name: decoding(spec, RUNNING) for name, spec in specs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    for _ in range(REPEATS):
        for name, scheduler in schedulers.items():
            seconds[name].append(_step(scheduler, specs[name]))
    return {name: 1e6 * statistics.median(each[REPEATS // 5 :]) for name, each in seconds.items()}


def _step(scheduler: Scheduler, spec: CacheSpec) -> float:
    ids = np.ones(RUNNING, np.int64)
    begun = time.perf_counter()
    step = scheduler.schedule()
    for group in spec.groups:
        view = step.group(group.name)
        if isinstance(group.attention, RecurrentState):
            view.states()
        else:
            _ = view.slot_mapping, view.block_table, view.paged()
    scheduler.commit(step, ids)
    return time.perf_counter() - begun


# --- copies of states -------------------------------------------------------------------------------


def copies() -> dict[str, Any]:
    """States that a prompt of 8,192 tokens leaves beside the one that it decodes from, and their bytes."""
    spec = QWEN3_NEXT.spec()
    written = []
    with books(spec, 1_000) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=LONG, max_running=1)
        for seed in range(2):  # the first chunk of all keeps one more
            scheduler.add(Request(f"{seed}", prompt(seed, LONG + 1), 2))
            count = 0
            while scheduler.has_work():
                step = scheduler.schedule()
                count += len(step.group("state").states().target) if step.num_tokens > 1 else 0
                scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
            written.append(count)
    kept = max(written) - 1
    moved = 2 * kept * spec.group("state").block_bytes  # read and written
    return {
        "tokens": LONG,
        "states_kept": kept,
        "bytes_moved": moved,
        "weight_bytes": WEIGHT_BYTES,
        "share": moved / WEIGHT_BYTES,
    }


# --- the agentic trace ------------------------------------------------------------------------------


def agents(folder: Path, gib: Sequence[int], every: int, at_once: int, tell: Callable[[str], object]) -> Iterator[Any]:
    """The whole trace in so many GiB, with full attention alone and with states beside it.

    ``every``: each so-manieth session alone, in as much less memory.
    """
    turns = read(folder, every)
    for size in gib:
        row: dict[str, Any] = {"gib": size, "every": every, "at_once": at_once, "requests": len(turns)}
        for name, states in (("full", False), ("states", True)):
            tell(f"{len(turns):,} requests in {size:,} GiB / {every}, {name}")
            spec, num_bytes = QWEN3_NEXT.spec(states), size * GIB // every
            row[name] = _found(serve(turns, spec, num_bytes, at_once=at_once, step_tokens=LONG))
        row["ratio"] = row["states"]["computed"] / row["full"]["computed"]
        yield row


def _found(found: Found) -> dict[str, Any]:
    """``computed``: prompt tokens that were not found; ``stepped``: tokens of all steps, answers too."""
    return {
        "prompt_tokens": found.prompt_tokens,
        "computed": found.prompt_tokens - sum(found.tiers.values()),
        "stepped": found.computed_tokens,
        "preemptions": found.preemptions,
        "failed": found.failed + found.too_large,
    }


# --- SGLang's curve, issue 40865 --------------------------------------------------------------------

SLOTS = 16, 24, 32, 48
AGENTS, TURNS = 10, 15
AT_ONCE = 4


def curve(folder: Path) -> dict[str, Any]:
    """150 requests of agents in room for their K and V and so many states; how many find less than they could.

    ``could``: what full attention alone finds without limits.
    """
    asked = agentic(folder, AGENTS, TURNS, TURNS)
    spec, full = QWEN3_5_27B.spec(), QWEN3_5_27B.spec(states=False)
    kv = bound_of(asked, BLOCK_TOKENS).distinct_tokens * full.token_bytes
    state = spec.group("state").block_bytes
    could = serve(asked, full, 4 * kv, at_once=AT_ONCE, step_tokens=LONG).hits
    rows = []
    for slots in (*SLOTS, len(asked) * 4):
        for share in (1.0, 0.5):
            size = int(share * kv) + slots * state
            found = serve(asked, spec, size, at_once=AT_ONCE, step_tokens=LONG)
            alone = serve(asked, full, size, at_once=AT_ONCE, step_tokens=LONG)
            gaps = [could[k] - found.hits.get(k, 0) for k in could]
            behind = [gap for gap in gaps if gap >= BLOCK_TOKENS]
            rows.append(
                {
                    "states": slots,
                    "kv_share": share,
                    "device_bytes": size,
                    "fall_back": len(behind) / len(could),
                    "gap_p50": statistics.median(behind) if behind else 0,
                    **_found(found),
                    "computed_full_alone": _found(alone)["computed"],
                }
            )
    return {"requests": len(asked), "kv_bytes": kv, "state_bytes": state, "rows": rows}


# --- SGLang's replay, issue 39436 -------------------------------------------------------------------

PROMPTS, PROMPT_TOKENS, AGAIN = 200, 8_448, 8
HOST_TOKENS, HOST_STATES = 2_680_000, 565
"""Of the issue's host memory."""


@dataclass(frozen=True)
class _Prompt:
    session: int
    seed: int
    answer: Tokens

    @property
    def prompt(self) -> Tokens:
        """int32 [8,448]."""
        return prompt(self.seed, PROMPT_TOKENS)


def replay() -> list[dict[str, Any]]:
    """200 prompts of 8,448 tokens fill a host tier of the issue's bytes, and of fewer; the first 8 are asked again."""
    spec = GLM_FLASH.spec()
    state = spec.group("state").block_bytes
    whole = HOST_TOKENS * spec.token_bytes + HOST_STATES * state
    said = np.full(16, 5, np.int32)
    asked: list[Asked] = [_Prompt(k, k % PROMPTS, said) for k in range(PROMPTS + AGAIN)]
    device = 4 * (PROMPT_TOKENS * spec.token_bytes + 4 * state)
    rows = []
    for share in (1.0, 0.75, 0.5):
        found = serve(asked, spec, device, int(share * whole), at_once=1, step_tokens=LONG)
        hits = [found.hits[PROMPTS + k] for k in range(AGAIN)]
        least = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        rows.append(
            {
                "host_bytes": int(share * whole),
                "device_bytes": device,
                "prompt_bytes": PROMPT_TOKENS * spec.token_bytes + state,
                "hits": sum(hit >= least for hit in hits),
                "of": AGAIN,
                "found_tokens": hits,
            }
        )
    return rows
