"""Prints a demo's report for a person."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runner.demo import Report

ANSWER_WIDTH = 18


def show(report: Report, console: Console) -> None:
    """Three tables (requests, pools, traffic) and the verdict."""
    console.print(_requests(report))
    console.print(_pools(report.stats["cache"]))
    console.print(_traffic(report.stats["cache"]["transfers"]))
    attention = report.stats["attention"]
    console.print(f"attention by {attention['backend']}: {attention['reason']}", highlight=False)
    console.print(
        f"model loaded in {report.load_s:.1f} s (bookkeeping loops ready in {report.warmup_s:.1f} s of that), "
        f"{len(report.requests)} requests served in {report.wall_s:.1f} s"
    )
    for line in report.violations:
        console.print(f"[red]invariant broken: {line}")
    console.print(verdict(report), style="bold green" if report.ok else "bold red")


def verdict(report: Report) -> str:
    """One line: are repeated answers equal, and how much sooner did the first token come?"""
    if not report.repeats:
        return "No prompt was sent twice: nothing to compare (use --requests 3 or more)."
    first, again = report.repeats[0]
    same = "equals" if first.token_ids == again.token_ids else "DIFFERS FROM"
    right = "" if report.right_answers else "; an answer is WRONG"
    times = f"first token after {again.ttft_s:.2f} s instead of {first.ttft_s:.2f} s"
    if again.device_tokens + again.host_tokens == 0:
        gain = "nothing of it was left in either tier, so it was recomputed."
    elif again.host_tokens == 0:
        gain = f"{report.speedup:.1f}x, but from the device alone: nothing had to come from the host."
    else:
        gain = f"{report.speedup:.0f}x sooner than recomputing."
    return f"{first.prompt}'s second answer {same} its first{right}; {times}: {gain}"


def plain_table(title: str, text: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """A plain table that fits 80 columns: text columns to the left, numbers right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in text:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _requests(report: Report) -> Table:
    title = f"{report.model} on {report.device}: prompt tokens by source"
    table = plain_table(title, ("prompt",), ("tokens", "TTFT", "device", "host", "computed", "preempts"))
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=ANSWER_WIDTH)
    for served in report.requests:
        right = served.answer == served.expected
        mark = "" if served.expected is None else " [green]✓[/]" if right else f" [red]✗ {served.expected}[/]"
        table.add_row(
            served.prompt,
            f"{served.tokens:,}",
            f"{served.ttft_s:.2f} s",
            f"{served.device_tokens:,}",
            f"{served.host_tokens:,}",
            f"{served.computed_tokens:,}",
            str(served.preemptions),
            escape(served.answer[: ANSWER_WIDTH - 2]) + mark,
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
