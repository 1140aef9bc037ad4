"""Prints a demo's report for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runner.demo.job import Report
from runner.display.tables import plain_table, print_table, print_text

ANSWER_WIDTH = 16


def show(report: Report, console: Console) -> None:
    """Three tables (requests, pools, traffic) and the verdict."""
    print_table(console, _requests(report))
    print_table(console, _pools(report.stats["cache"]))
    print_table(console, _traffic(report.stats["cache"]["transfers"]))
    attention = report.stats["attention"]
    print_text(console, f"attention by {attention['backend']}: {attention['reason']}")
    print_text(
        console,
        f"model loaded in {report.load_s:.1f} s (compiled loops ready in {report.warmup_s:.1f} s of that), "
        f"{len(report.requests)} requests served in {report.wall_s:.1f} s",
    )
    if all(served.expected is None for served in report.requests):
        print_text(
            console, "Prompts were random tokens, whose answers can only be compared: a question needs a tokenizer."
        )
    for line in report.violations:
        print_text(console, f"invariant broken: {line}", style="red")
    print_text(console, verdict(report), style="bold green" if report.ok else "bold red")


def verdict(report: Report) -> str:
    """One line: are repeated answers equal, and how much sooner did the first token come?"""
    if not report.repeats:
        return "No prompt was sent twice: nothing to compare (use --requests 3 or more)."
    first, again = report.repeats[0]
    same = "equals" if first.token_ids == again.token_ids else "DIFFERS FROM"
    right = "" if report.right_answers else "; an answer is WRONG"
    if not report.retrieves and first.expected is not None:
        right = " and is right" if first.right and again.right else " (not the number: this model does not find it)"
    times = f"first token after {again.ttft_s:.2f} s instead of {first.ttft_s:.2f} s"
    if again.device_tokens + again.host_tokens == 0:
        gain = "nothing of it was left in either tier, so it was recomputed."
    elif again.host_tokens == 0:
        gain = f"{report.speedup:.1f}x, but from the device alone: nothing had to come from the host."
    else:
        gain = f"{report.speedup:.0f}x sooner than recomputing."
    return f"{first.prompt}'s second answer {same} its first{right}; {times}: {gain}"


def _requests(report: Report) -> Table:
    title = f"{escape(report.model)} on {report.device}: prompt tokens by source"
    table = plain_table(title, ("prompt",), ("tokens", "TTFT", "device", "host", "computed", "preempts"))
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=ANSWER_WIDTH)
    table.add_column("", no_wrap=True)
    for served in report.requests:
        table.add_row(
            served.prompt,
            f"{served.tokens:,}",
            f"{served.ttft_s:.2f} s",
            f"{served.device_tokens:,}",
            f"{served.host_tokens:,}",
            f"{served.computed_tokens:,}",
            str(served.preemptions),
            escape(" ".join(served.answer.split())),
            "" if served.right is None else "[green]✓[/]" if served.right else f"[red]✗ {served.expected}[/]",
        )
    return table


def _pools(stats: dict[str, Any]) -> Table:
    table = plain_table(
        "Pools, in blocks", ("tier", "group"), ("usable", "most in use", "cached now", "evicted", "size")
    )
    for tier in ("device", "host"):
        for group, pool in stats[tier].items():
            size = pool["usable"] * pool["block_bytes"]
            row = (pool["usable"], pool["peak_held"], pool["cached"], pool["evicted"])
            table.add_row(tier, group, *(f"{n:,}" for n in row), f"{size / 2**20:,.1f} MiB")
    return table


def _traffic(transfers: dict[str, Any]) -> Table:
    table = plain_table("Between the tiers", ("",), ("blocks", "bytes", "failed"))
    for what, verb in (("stores", "stored"), ("loads", "loaded")):
        size = transfers[f"{verb}_bytes"] / 2**20
        table.add_row(what, f"{transfers[f'{verb}_blocks']:,}", f"{size:,.1f} MiB", str(transfers[f"failed_{what}"]))
    return table
