"""Prints a report for a person: the workload first, then its figures, then what they cannot be trusted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runner.bench.figures import BUSY, LATE_MS, Schedule
from runner.bench.told import printable
from runner.display.tables import plain_table, print_table

_MORE_THAN_SHARED = 0.02
_WIDEST = 40
"""Most letters of a value in a line; the JSON has all of it."""
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
    "client_queue_time": "queued in the generator",
    "e2el_including_client_queue": "end to end, from when it was due",
}


def show(report: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float], console: Console) -> None:
    """All of it."""
    for line in (*_about(report), ""):
        console.print(printable(line, console.encoding), highlight=False)
    print_table(console, _latencies(report, metrics, percentiles))
    for line in (*_rates(report), "", *_errors(report), *_warnings(report)):
        console.print(printable(line, console.encoding), highlight=False)
    counts = report["counts"]
    said = f"{counts['completed']} of {counts['num_prompts']} requests answered ({report['ending']})."
    console.print(said, style="bold green" if report["ok"] else "bold red")


def _about(report: dict[str, Any]) -> Iterator[str]:
    server, plan, sent = report["server"], report["workload"], report["requests"]
    known = [server["owned_by"], server["version"] and f"version {server['version']}", server["software"]]
    told = ", ".join(str(one) for one in known if one) or "which tells nothing about itself"
    yield f"[bold]{escape(server['model'])}[/] at {escape(server['base_url'])} ({escape(told)}), {report['date']}"
    yield f"workload {escape(words(plan['name'], plan['parameters'], plan['seed']))}"
    prompt, output = plan["prompt_tokens"], plan["output_tokens"]
    yield (
        f"{plan['requests']:,} requests in {plan['sessions']:,} sessions; prompts of {prompt['min']:,} to "
        f"{prompt['max']:,} tokens (mean {prompt['mean']:,}), answers of {output['min']:,} to {output['max']:,} "
        f"(mean {output['mean']:,}); digest {plan['digest'][:16]}"
    )
    ids = sent["token_ids"]
    parts = [f"{sent['endpoint']} with {sent['prompt_form']}", f"{ids['count']:,} token ids from {ids['source']}"]
    parts += [f"{name}={sent[name]}" for name in ("temperature", "ignore_eos", "max_concurrency", "history")]
    if sent["extra_body"]:
        parts.append(f"extra_body={sent['extra_body']}")
    yield escape(", ".join(parts))


def words(name: str, parameters: Mapping[str, Any], seed: int) -> str:
    """A workload in a line: all that is set, and the seed."""
    given = (f"{key}={str(value)[:_WIDEST]}" for key, value in parameters.items() if value is not None)
    return f"{name}: {' '.join(given)} seed={seed}"


def _latencies(report: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> Table:
    stats = ["mean", *(f"p{p:g}" for p in percentiles), "max"]
    table = plain_table("Latencies in milliseconds, of whole answers", ("",), tuple(stats))
    for name in metrics:
        if f"mean_{name}_ms" in report:
            table.add_row(TITLES[name], *(_ms(report[f"{stat}_{name}_ms"]) for stat in stats))
    return table


def _ms(value: float) -> str:
    """Three digits or more."""
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _rates(report: dict[str, Any]) -> Iterator[str]:
    if report["request_throughput"] is not None:
        yield (
            f"{report['request_throughput']:,.2f} requests/s, {report['output_throughput']:,.1f} output tokens/s, "
            f"{report['total_token_throughput']:,.1f} tokens/s in all, over {report['duration']:,.2f} s"
        )
    if "request_goodput" in report and report["request_goodput"] is not None:
        limits = " ".join(f"{name}<={limit:g}ms" for name, limit in report["goodput_limits_ms"].items())
        sent = report["counts"]["sent"]
        yield f"goodput {report['request_goodput']:,.2f} requests/s: {report['good_requests']} of {sent} kept {limits}"
    cache = report["cache"]
    if cache["cached_tokens"] is None:
        yield "cached_tokens: the server does not tell (vLLM does with --enable-prompt-tokens-details)"
    else:
        yield (
            f"cached_tokens: {cache['cached_tokens']:,}, {cache['share']:.1%} of the prompts, as the server tells; the "
            f"workload shares {cache['shareable_share']:.1%}"
        )
    own = report["generator"]
    if late := own["lateness_ms"]:
        yield (
            f"generator: sent {late['median']:.2f} ms late (median; at most {late['max']:.2f}), "
            f"{own['cpu_share']:.0%} of a core, at most {own['peak_concurrency']} requests at once, "
            f"{own['clock_sent']} sent by the clock alone; schedule {own['schedule']}"
        )


def _errors(report: dict[str, Any]) -> Iterator[str]:
    for error in report["counts"]["errors"]:
        yield f"[red]{error['count']} x {escape(error['kind'])}[/]: {escape(error['first'])}"
    counts = report["counts"]
    if counts["interrupted"]:
        yield f"[red]{counts['interrupted']} requests were cut off by the end of the run"
    if counts["not_sent"]:
        yield f"[red]{counts['not_sent']} requests were not sent"


def _warnings(report: dict[str, Any]) -> Iterator[str]:
    """Warnings of what the figures do not show."""
    own, lengths, cache = report["generator"], report["lengths"], report["cache"]
    if own["schedule"] == Schedule.LATE.value:
        sent, most = report["counts"]["sent"], own["lateness_ms"]["max"]
        yield (
            f"[yellow]The generator did not keep its schedule: {own['sent_late']} of {sent} requests went out more "
            f"than {LATE_MS:g} ms late, at most {most:,.0f} ms. A generator that falls behind sends as a closed loop "
            "does, and its latencies leave out that wait (coordinated omission); e2el_including_client_queue has it. "
            "Use a lower rate, a faster machine or several generators."
        )
    elif own["schedule"] == Schedule.HELD_BACK.value:
        yield (
            "[yellow]--max-concurrency held requests back, so this was no open loop: latencies leave out that wait. "
            "e2el_including_client_queue has it."
        )
    elif own["schedule"] == Schedule.CLOSED.value:
        yield "A closed loop by its nature: each request waits for the answer to the one before."
    if own["is_saturated"]:
        yield f"[yellow]The generator used more than {BUSY:.0%} of a core: latencies contain its own delays."
    if lengths["prompts_of_other_length"]:
        least, most = lengths["min_extra_prompt_tokens"], lengths["max_extra_prompt_tokens"]
        yield (
            f"[yellow]{lengths['prompts_of_other_length']} prompts had another length than planned, says the server: "
            f"by {f'{least:+}' if least == most else f'{least:+} to {most:+}'} tokens (chat templates add some)."
        )
    if (cache["share"] or 0.0) > cache["shareable_share"] + _MORE_THAN_SHARED:
        yield (
            "[yellow]The server had more of the prompts than this workload shares, as if it had seen them before: the "
            "same seed sends the same prompts. Use another --seed, or reset the server's cache."
        )
    if lengths["answers_shorter_than_planned"]:
        yield (
            f"[yellow]{lengths['answers_shorter_than_planned']} answers were shorter than planned; --ignore-eos has "
            "them go on."
        )
    if (lengths["tokens_per_piece"] or 0) > 1.02:
        yield (
            f"[yellow]A piece of a stream had {lengths['tokens_per_piece']:.2f} tokens on average: inter-token latency "
            "is the time between pieces."
        )
