"""Prints the kit's report for a person."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runner.display.tables import plain_table, print_table, print_text
from runner.verify.compare import Difference
from runner.verify.report import Report, Result, Status


def show(report: Report, console: Console) -> None:
    """The served prompts, a line per scenario, the faults of unequal scenarios, and the verdict."""
    print_table(console, _scenarios(report))
    lengths = ", ".join(f"{n:,}" for n in report.prompt_tokens)
    bits = "no bit" if report.repeats else "(no bit is not demanded: this forward does not repeat itself)"
    limit = (
        f"{bits} where every step computes what one of the cold run's did; elsewhere {report.tolerance:g} "
        f"({report.dtype}) of the largest logit, since other chunks and batches round otherwise."
    )
    print_text(
        console,
        f"Prompts of {lengths} tokens in chunks of {report.chunk_tokens:,}, {report.new_tokens} new tokens each. "
        "Device and host: prompt tokens found there; loads: blocks; failed: copies. Limit to the difference of logits: "
        + ("no bit, whatever happened." if report.tolerance == 0 else limit),
    )
    print_text(console, f"Attention by {report.attention['backend']}: {report.attention['reason']}.")
    print_text(console, graphs(report))
    for result in report.results:
        for line in problems(result):
            print_text(console, f"{result.name}: {line}", style="red")
    print_text(console, verdict(report), style="bold green" if report.ok else "bold red")


def verdict(report: Report) -> str:
    """One line."""
    count, results = len(report.results), report.results
    if report.ok:
        return f"All {count} scenarios happened, and none made a difference ({report.wall_s:.0f} s)."
    bad = [f"{sum(r.status is s for r in results)} {s.value}" for s in Status if s is not Status.EQUAL]
    lengths = "; with other lengths (--tokens, --new-tokens) it may happen" if any(r.missing for r in results) else ""
    return f"Of {count} scenarios: {', '.join(text for text in bad if not text.startswith('0 '))}{lengths}."


def graphs(report: Report) -> str:
    """How decode steps were run, as an engine runs them."""
    used, reasons = report.graphs, "; ".join(report.graphs["reasons"])
    if not used["replayed"]:
        return f"Decode steps ran eagerly: {reasons or 'none came'}."
    return f"{used['replayed']:,} decode steps were replayed from CUDA graphs, {used['eager']:,} steps ran eagerly" + (
        f", some of them because {reasons}." if reasons else "."
    )


def problems(result: Result) -> Iterator[str]:
    """What is wrong, in words."""
    if result.difference is not None:
        yield _difference(result.difference)
    yield from result.violations
    yield from (f"not exercised: {what}" for what in result.missing)


def _difference(d: Difference) -> str:
    head = (
        f"prompt {d.prompt}, generated token {d.token} (after position {d.position:,}): logits differ by {d.logits:.3g}"
    )
    if d.kv is None:
        return f"{head}; all K and V that this step saw are equal, so its forward pass went another way"
    kv = d.kv
    origin = "computed in this very step" if kv.computed_now else "there before this step"
    return (
        f"{head}; the first KV that differs is {kv.what} of position {kv.position:,} in group {kv.group}, "
        f"layer {kv.layer} (model layer {kv.model_layer}), logical block {kv.block}, block id {kv.block_id}, "
        f"by {kv.difference:.3g}: {origin}"
    )


def _scenarios(report: Report) -> Table:
    title = f"{escape(report.model)} on {report.device}, {report.dtype}: every scenario against the cold run"
    numbers = ("device", "host", "loads", "failed", "preempts", "max diff", "limit", "tokens")
    table = plain_table(title, ("scenario",), numbers)
    table.add_column("", no_wrap=True)
    table.padding = 0  # ten columns in 80 characters
    for result in report.results:
        t, cold = result.transfers, result is report.results[0]
        table.add_row(
            result.name,
            f"{sum(o.device for o in result.outcomes):,}",
            f"{sum(o.host for o in result.outcomes):,}",
            f"{t.loaded_blocks if t else 0:,}",
            f"{t.failed_loads + t.failed_stores if t else 0:,}",
            f"{sum(o.preemptions for o in result.outcomes):,}",
            "" if cold else f"{result.largest_difference:.2g}",
            "" if cold else "no bit" if result.exact else f"{report.tolerance:.0e}",
            f"{result.other_tokens} other" if result.other_tokens else "same",
            "[green]✓" if result.status is Status.EQUAL else "[red]✗",
        )
    return table
