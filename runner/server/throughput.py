"""A line for the log every ten seconds while there is work: tokens a second, requests, room, and hits.

Promises   a line tells what has been since the last one. A server without work is silent but for one closing line, and
           so is one whose engine has died.
Does not   look at a clock: whoever asks tells the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvtier import CacheStats
from kvtier.machine.stats import PoolStats

EVERY_S = 10.0


class _Counted(NamedTuple):
    """Counters at a time."""

    time_s: float
    computed: int
    generated: int
    prefix: Mapping[str, int]


class Throughput:
    """The throughput of one cache, seen from ``now_s`` on."""

    def __init__(self, stats: Callable[[], CacheStats], now_s: float, every_s: float = EVERY_S) -> None:
        self._stats = stats
        self._every_s = every_s
        self._last = _counted(stats(), now_s)
        self._was_busy = False

    def line(self, now_s: float) -> str | None:
        """The line to log, if it is time for it and there is anything to tell. Cheap if it is not."""
        if now_s < self._last.time_s + self._every_s:
            return None
        stats, last = self._stats(), self._last
        now = self._last = _counted(stats, now_s)
        requests = stats.requests
        is_busy = bool(now[1:3] != last[1:3] or requests["running"] or requests["waiting"])
        is_told, self._was_busy = is_busy or self._was_busy, is_busy
        return _told(stats, last, now) if is_told else None


def _counted(stats: CacheStats, now_s: float) -> _Counted:
    return _Counted(now_s, stats.computed_tokens, stats.generated_tokens, stats.prefix_tokens)


def _told(stats: CacheStats, last: _Counted, now: _Counted) -> str:
    took_s, generated = now.time_s - last.time_s, now.generated - last.generated
    prompts = max(0, now.computed - last.computed - generated)
    grown = {source: n - last.prefix[source] for source, n in now.prefix.items()}
    queried = grown.pop("queried")
    hits = f"{_percent(sum(grown.values()), queried)} hits"
    if queried:
        hits += f" ({', '.join(f'{tier} {_percent(n, queried)}' for tier, n in grown.items())})"
    used = [f"{name} {_percent(pool.held + pool.quarantined, pool.usable)}" for name, pool in stats.device.items()]
    told = [
        f"prompts {prompts / took_s:,.1f} tokens/s computed, generation {generated / took_s:,.1f} tokens/s",
        f"running {stats.requests['running']:,}, waiting {stats.requests['waiting']:,}",
        f"device KV in use: {', '.join(used)}",
    ]
    if stats.host:
        told.append(f"host KV filled: {_filled(stats.host)}")
    return "; ".join([*told, f"prompt tokens: {hits}"])


def _filled(pools: Mapping[str, PoolStats]) -> str:
    """The share of a tier's bytes that have content."""
    full = sum((p.cached + p.fenced + p.held + p.quarantined) * p.block_bytes for p in pools.values())
    return _percent(full, full + sum(p.empty * p.block_bytes for p in pools.values()))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
