"""Prints the report of the kit inside vLLM for a person."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runner.display.tables import plain_table, print_table
from runner.verify.report import Status
from runner.verify.vllm.report import Report, Result


def show(report: Report, console: Console) -> None:
    """A line per scenario, the faults of those that are not equal, and the verdict."""
    print_table(console, _table(report))
    lengths = ", ".join(f"{n:,}" for n in report.prompt_tokens)
    tokens = (
        "tokens must be the same" if report.dtype == "float32" else "two tokens that near may change places (swaps)"
    )
    console.print(
        f"vLLM {report.vllm}; blocks of {report.block_tokens} tokens, {report.blocks:,} of them in the pool of the "
        f"engine with the connector. Prompts of {lengths} tokens in chunks of {report.chunk_tokens:,}, "
        f"{report.new_tokens} new tokens each. Batch: {report.crowd} parts of them at once; preempted: the same with "
        f"{report.crowd_new_tokens} new tokens each.",
        highlight=False,
    )
    console.print(
        "Device and host: prompt tokens that vLLM found in its own cache, and that the connector brought; resumed: "
        "tokens that it brought back for preempted requests; computed: tokens that went through the model. Limit to "
        f"the difference of a logprob: {report.limit:g} ({report.dtype}); {tokens}. Bare: the engine without a "
        "connector, which other chunks and batches make round otherwise, too.",
        highlight=False,
    )
    for result in report.results:
        for line in problems(result):
            console.print(f"[red]{result.name}: {escape(line)}", highlight=False)
    console.print(verdict(report), style="bold green" if report.ok else "bold red", highlight=False)


def verdict(report: Report) -> str:
    """One line."""
    results, count = report.results, len(report.results)
    if report.ok:
        return f"All {count} scenarios happened, and none made a difference ({report.wall_s:.0f} s)."
    bad = [f"{sum(r.status is s for r in results)} {s.value}" for s in Status if s is not Status.EQUAL]
    hint = ""
    if any(r.missing for r in results) and not any(r.violations for r in results):
        hint = (
            "; with other lengths (--tokens, --new-tokens), another pool (--blocks) or more host memory it may happen"
        )
    return f"Of {count} scenarios: {', '.join(text for text in bad if not text.startswith('0 '))}{hint}."


def problems(result: Result) -> Iterator[str]:
    """What is wrong, in words."""
    if result.difference is not None:
        yield str(result.difference)
    yield from result.violations
    yield from (f"not exercised: {what}" for what in result.missing)


def _table(report: Report) -> Table:
    title = f"{escape(report.model)} in vLLM, {report.dtype}: {escape(report.connector)} against no connector"
    numbers = (" device", " host", " preempts", " resumed", " computed", " max diff", " tokens")
    table = plain_table(title, ("scenario",), numbers)
    table.add_column("", no_wrap=True)
    table.padding = 0  # nine columns in 80 characters
    for result in report.results:
        c = result.counts
        same = "" if not result.compared else "same" if result.difference is None else "other"
        table.add_row(
            result.name,
            f"{c.device:,}",
            f"{c.host:,}",
            f"{c.preemptions:,}",
            _number(c.resumed_host),
            _number(c.computed),
            f"{result.largest_difference:.2g}",
            f"{result.swapped} swaps" if result.swapped and result.difference is None else same,
            "[green]✓" if result.status is Status.EQUAL else "[red]✗",
        )
    return table


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"
