"""Prints the report of ``kvtier demo --shared`` for a person."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from runner.demo.shared import Report
from runner.display.tables import plain_table, print_table


def show(report: Report, console: Console) -> None:
    """A table, and the verdict."""
    title = f"the bundled model, prompts of {report.tokens:,} tokens, store: {escape(report.store)}"
    table = plain_table(title, ("request", "engine"), ("TTFT", "device", "host", "remote", "computed"))
    table.add_column("answer", no_wrap=True)
    for one in report.answers:
        tiers = [one.cached.get(tier, 0) for tier in ("device", "host", "remote")]
        numbers = [f"{n:,}" for n in (*tiers, one.tokens - sum(tiers))]
        table.add_row(one.what, one.engine, f"{one.ttft_s:.2f} s", *numbers, escape(one.text))
    print_table(console, table)
    cold, again = report.answers[:2]
    if report.ok:
        gain = f"{cold.ttft_s / again.ttft_s:.0f} times sooner" if again.ttft_s else ""
        console.print(f"All answers are right; after kill -9 the first token came {gain}.", style="bold green")
    else:
        console.print("An answer is wrong, or did not come from the remote.", style="bold red")
