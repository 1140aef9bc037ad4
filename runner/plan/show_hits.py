"""What memories would find of a trace, for a person."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from runner.display.tables import plain_table
from runner.display.units import count, size
from runner.plan.report import MemoryHits, TracePlan


def hits_table(trace: TracePlan) -> Table:
    """A row for each memory, and what a cache without limits would find."""
    has_host = any(one.host_bytes for one in trace.memories)
    columns = ["device", "host", "hits", "on the\ndevice", "in the\nhost"] if has_host else ["device", "hits"]
    table = plain_table(
        f"Hits on {escape(trace.trace)}, {trace.requests:,} requests",
        (),
        (*columns, "of the\nbound", "tokens not\ncomputed"),
    )
    for one in trace.memories:
        sizes = (size(one.device_bytes), size(one.host_bytes) if one.host_bytes else "-")
        tiers = [_percent(one.tokens[tier] / trace.prompt_tokens) for tier in ("device", "host")]
        row = [*sizes, _percent(one.rate), *tiers] if has_host else [sizes[0], _percent(one.rate)]
        table.add_row(*row, _percent(one.of_bound), count(sum(one.tokens.values())))
    bound = trace.bound_tokens / trace.prompt_tokens
    rest = ["-"] * 2 if has_host else []
    first = ["no limit", "-"] if has_host else ["no limit"]
    table.add_row(*first, _percent(bound), *rest, _percent(1.0), count(trace.bound_tokens))
    return table


def hits_notes(trace: TracePlan) -> list[str]:
    """How it was found out, and what went wrong."""
    lines = [
        f"hits: prompt tokens that are not computed, by kvtier's own scheduler and pools, {trace.at_once:,} requests "
        "at a time (--at-once), in the order of the trace and without its pauses; of the bound: of what a cache "
        f"without limits finds. Prompts: {count(trace.prompt_tokens)} tokens, of {trace.sessions:,} sessions; "
        f"different content, answers included: {count(trace.distinct_tokens)}.",
    ]
    return lines + [line for one in trace.memories for line in _wrong(one)]


def _wrong(one: MemoryHits) -> list[str]:
    name = size(one.device_bytes) + (f" and {size(one.host_bytes)}" if one.host_bytes else "")
    told = [(one.too_large, "can never fit"), (one.failed, "ran out of room"), (one.preemptions, "preemptions")]
    found = ", ".join(f"{n:,} {what}" if what == "preemptions" else f"{n:,} requests {what}" for n, what in told if n)
    return [f"{name}: {found}."] if found else []


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
