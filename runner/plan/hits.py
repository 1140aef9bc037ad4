"""What memories would find of a trace.

Owns       which memories are tried: the planned ones, twice and four times as much of both, and the device alone.
Does not   replay: ``runner.bench.replay`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown
from runner.bench.replay.bound import Whole, measure
from runner.bench.replay.serve import Found, serve
from runner.bench.replay.trace import read
from runner.display.units import size
from runner.plan.report import MemoryHits, TracePlan

FACTORS = 1, 2, 4
MOST_AT_ONCE = 4096


@dataclass(frozen=True)
class TraceOptions:
    """The trace to replay. ``block_tokens``, ``requests`` and ``whole_blocks`` as in ``runner.bench.replay.trace``.
    ``at_once``: how many of its requests run at a time."""

    path: str | Path
    block_tokens: int | None = None
    requests: int | None = None
    whole_blocks: bool = False
    at_once: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.at_once <= MOST_AT_ONCE:
            raise ConfigError(f"--at-once must be in 1..{MOST_AT_ONCE:,}, got {shown(self.at_once)}")


def plan_hits(
    spec: CacheSpec,
    device_bytes: int,
    host_bytes: int,
    step_tokens: int,
    options: TraceOptions,
    tell: Callable[[str], object] = lambda news: None,
) -> TracePlan:
    """Replays the trace for each memory. ``tell`` gets a line of news now and then. Raises ``ConfigError``."""
    tell(f"Reading {options.path}")
    asked = read(Path(options.path), options.block_tokens, options.requests, options.whole_blocks)
    whole = measure(asked, spec.hit_tokens)
    memories = []
    for device, host in _memories(device_bytes, host_bytes):
        done, name = iter(range(1, len(asked) + 1)), size(device) + (f" + {size(host)}" if host else "")

        def progress(done: Iterator[int] = done, name: str = name) -> None:
            tell(f"{name}: {next(done):,} of {len(asked):,} requests")

        found = serve(asked, spec, device, host, options.at_once, step_tokens, progress=progress)
        memories.append(_hits(device, host, found, whole))
    return TracePlan(
        trace=Path(options.path).name,
        requests=whole.requests,
        sessions=whole.sessions,
        prompt_tokens=whole.prompt_tokens,
        bound_tokens=whole.found_tokens,
        distinct_tokens=whole.distinct_tokens,
        at_once=options.at_once,
        memories=tuple(memories),
    )


def _memories(device: int, host: int) -> Iterator[tuple[int, int]]:
    if host:
        yield device, 0
    yield from ((factor * device, factor * host) for factor in FACTORS)


def _hits(device: int, host: int, found: Found, whole: Whole) -> MemoryHits:
    tokens = sum(found.tiers.values())
    return MemoryHits(
        device_bytes=device,
        host_bytes=host,
        tokens=found.tiers,
        rate=found.rate,
        of_bound=tokens / whole.found_tokens if whole.found_tokens else None,
        preemptions=found.preemptions,
        too_large=found.too_large,
        failed=found.failed,
    )
