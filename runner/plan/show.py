"""Prints a plan for a person; its tables fit 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtier.geometry.dtypes import DTYPE_BYTES
from runner.display.tables import plain_table, print_table, print_text
from runner.display.units import count, flop, numerous, seconds, size, tokens_of
from runner.plan.report import Plan, StatePlan
from runner.plan.show_hits import hits_notes, hits_table
from runner.plan.show_remote import break_even, holds_table, remote_notes, remote_table


def show(plan: Plan, console: Console) -> None:
    """Groups, what fits, what reloading costs, the limits, and what was assumed."""
    print_table(console, _groups(plan))
    print_table(console, _fits(plan))
    if plan.host is not None:
        print_table(console, _reload(plan))
    if plan.remote is not None:
        print_table(console, remote_table(plan, plan.remote))
        print_table(console, holds_table(plan, plan.remote))
    if plan.trace is not None:
        print_table(console, hits_table(plan.trace))
    for line in [*_limits(plan), "", *_notes(plan)]:
        print_text(console, line)


def _groups(plan: Plan) -> Table:
    title = f"{escape(plan.model)} ({plan.model_type}), KV in {plan.dtype}, blocks of {plan.block_tokens} tokens"
    table = plain_table(
        title, ("group", "attention"), ("layers", "KV\nheads", "head\ndim", "bytes per\ntoken", "bytes per\nblock")
    )
    for group in plan.groups:
        dims = str(group.head_dim) if group.head_dim == group.head_dim_v else f"{group.head_dim}+{group.head_dim_v}"
        dims = dims if group.head_dim_v else f"{group.head_dim}, K"
        table.add_row(
            group.name,
            group.attention,
            str(group.num_layers),
            str(group.num_kv_heads or "-"),
            dims if group.head_dim else "-",
            f"{group.token_bytes:,} B",
            size(group.block_bytes),
        )
    return table


def _fits(plan: Plan) -> Table:
    host = plan.host
    tiers = f"{size(plan.device.num_bytes)} on the device" + (
        f" and {size(host.num_bytes)} on the host" if host else ""
    )
    columns = ["tokens", "one\nrequest", "if all\nfull", "factor", "device\nrequests", "at\nworst", "device\ntokens"]
    columns += ["host\nrequests", "host\ntokens"] if host else []
    table = plain_table(f"KV that fits into {tiers}", (), tuple(columns))
    table.padding = 0  # nine columns in 80 characters
    for length in plan.lengths:
        row = [
            tokens_of(length.tokens, length.beyond_model),
            size(sum(length.held_bytes.values())),
            size(length.full_bytes),
            "-" if length.factor is None else f"{length.factor:.2f}x",
            f"{length.device.requests:,}",
            f"{length.device.at_worst:,}",
            count(length.device.tokens),
        ]
        if length.host is not None:
            row += [f"{length.host.requests:,}", count(length.host.tokens)]
        table.add_row(*row)
    return table


def _reload(plan: Plan) -> Table:
    known = plan.assumptions.weights is not None
    columns = ("tokens", "bytes\nto load", "time\nto load") + (
        ("compute", "of it\nattention", "time to\nrecompute", "load is\nsooner by") if known else ()
    )
    table = plain_table("Loading a request from the host, against computing it again", (), columns)
    table.padding = 0
    for length in plan.lengths:
        row = [tokens_of(length.tokens, length.beyond_model), size(length.load_bytes), seconds(length.load_s)]
        if length.recompute_flops is not None and length.recompute_s is not None:
            share = length.recompute_attention_flops / length.recompute_flops
            row += [
                flop(length.recompute_flops),
                f"{share:.0%}",
                seconds(length.recompute_s),
                f"{length.recompute_s / length.load_s:,.0f}x" if length.load_s else "-",
            ]
        table.add_row(*row)
    return table


def _limits(plan: Plan) -> list[str]:
    """The largest context, and what prompts need while they run."""
    longest = "any length" if plan.device.longest_tokens is None else f"{plan.device.longest_tokens:,} tokens"
    lines = [f"Largest context of one request: {longest} by memory"]
    if plan.model_tokens is not None:
        lines[0] += f", {plan.model_tokens:,} tokens by the model's positions"
    lines[0] += "."
    if sum(group.attention.startswith("full") for group in plan.groups) > 1:
        lines[0] += f" Each further token of a long text takes {plan.growth_bytes:,.0f} B."
    step = plan.transient
    if step.peak_bytes:
        groups = ", ".join(f"{name} {size(n)}" for name, n in step.peak_bytes.items())
        lines.append(
            f"While up to {step.step_tokens:,} tokens of a prompt run in one step: {groups}, {size(step.extra_bytes)} "
            "more than while generating; where that does not fit, steps are made shorter."
        )
    if plan.states is not None:
        lines.append(_states(plan.states, plan.host is not None))
    if plan.remote is not None:
        lines.append(break_even(plan, plan.remote))
    return lines


def _states(of: StatePlan, has_host: bool) -> str:
    """What a state takes, running and kept, and what restoring it costs."""
    text = f"States: a request holds {size(of.running_bytes)} while it decodes. A snapshot takes "
    text += size(of.snapshot_bytes)
    if of.as_tokens is not None:
        text += f", as much as K and V of {of.as_tokens:,} tokens"
    if has_host:
        text += f". Restoring it from the host takes {seconds(of.restore_s)}"
        if of.break_even_tokens is not None:
            text += f"; a hit is sooner loaded than computed from {of.break_even_tokens:,} tokens on"
    return text + "."


def _notes(plan: Plan) -> list[str]:
    """What the columns mean, and what was assumed."""
    a = plan.assumptions
    lines = [
        "one request: what it holds between two steps; if all full: the same if windows and chunks kept all tokens, as "
        "a cache does that does not tell them apart; factor: what that would waste.",
        "device requests: each has room for its next token, the last one for its prompt too; at worst: all hold at "
        "once the most that they ever do, so that none is ever preempted. Nothing is counted as shared.",
    ]
    if plan.host is not None:
        lines.append("host requests: with the blocks that a later hit needs.")
    if plan.remote is not None:
        lines += remote_notes(plan.remote)
    if plan.trace is not None:
        lines += hits_notes(plan.trace)
    if any(length.beyond_model for length in plan.lengths):
        lines.append(f"* more than the model's {plan.model_tokens:,} positions.")
    if a.weights is not None and a.active_weights is not None:
        weight_bytes = a.weights * DTYPE_BYTES["bfloat16"]
        lines.append(
            f"The memory is for KV alone: the decoder's {numerous(a.weights)} weights "
            f"({size(weight_bytes)} in bfloat16) come on top."
        )
    if plan.host is not None:
        lines.append(_assumed(plan))
    return lines


def _assumed(plan: Plan) -> str:
    a = plan.assumptions
    link = f"Assumed, not measured: a link of {a.link_gb_per_s:g} GB/s (--link-gbps)"
    if a.active_weights is None:
        return f"{link}. Recomputing is not estimated: {a.weights_unknown}."
    return (
        f"{link}; {a.peak_tflops:g} TFLOP/s dense peak (--tflops), of which {a.utilisation:.0%} is reached "
        f"(--utilisation). Compute: two FLOP for each of the {numerous(a.active_weights)} weights that a "
        "token is multiplied with, counted on transformers' own model of this config; attention by the tokens that "
        "each layer's mask shows."
    )
