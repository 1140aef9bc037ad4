"""The remote tier in a plan, for a person."""

from __future__ import annotations

from rich.table import Table

from runner.display.tables import plain_table
from runner.display.units import count, digits, seconds, size, tokens_of
from runner.plan.report import Plan, RemotePlan


def remote_table(plan: Plan, remote: RemotePlan) -> Table:
    """What a fetch costs, against computing."""
    known = plan.assumptions.weights is not None
    columns = ("tokens", "bytes\nto fetch", "objects", "read\nampl.", "time\nto fetch") + (
        ("time to\nrecompute", "fetch is\nsooner by") if known else ()
    )
    title = f"Fetching a request at {remote.gb_per_s:g} GB/s, against computing it again"
    table = plain_table(title, (), columns)
    for length, of in zip(plan.lengths, remote.lengths, strict=True):
        ampl = "-" if of.read_amplification is None else f"{of.read_amplification:.4f}x"
        row = [tokens_of(length.tokens, length.beyond_model), size(of.fetch_bytes), f"{of.fetch_objects:,}", ampl]
        row.append("-" if of.fetch_s is None else seconds(of.fetch_s))
        if length.recompute_s is not None:
            sooner = "-" if of.fetch_s is None else f"{digits(length.recompute_s / of.fetch_s)}x"
            row += [seconds(length.recompute_s), sooner]
        table.add_row(*row)
    return table


def holds_table(plan: Plan, remote: RemotePlan) -> Table:
    """What a text takes, and how many the remote tier holds."""
    columns = ("tokens", "a text\ntakes", "objects", "one more\nend", "texts\nheld", "tokens\nheld")
    table = plain_table(f"What {size(remote.num_bytes)} of a remote tier hold", (), columns)
    for length, of in zip(plan.lengths, remote.lengths, strict=True):
        row = [tokens_of(length.tokens, length.beyond_model), size(of.text_bytes), f"{of.text_objects:,}"]
        table.add_row(*row, size(of.further_end_bytes), f"{of.texts:,}", count(of.tokens_held))
    return table


def break_even(plan: Plan, remote: RemotePlan) -> str:
    """The length from which on a fetch is sooner."""
    if plan.assumptions.weights is None:
        return "From which length on a fetch is sooner cannot be told: computing is not estimated."
    if not remote.longest_tokens:
        return "No length can be fetched from the remote tier."
    if remote.break_even_tokens is None:
        return f"Up to {remote.longest_tokens:,} tokens computing is sooner than a fetch from the remote tier."
    is_all = remote.longest_tokens == plan.lengths[-1].tokens
    end = "on" if is_all else f"to {remote.longest_tokens:,}, the longest that fit"
    return f"A fetch from the remote tier is sooner than computing from {remote.break_even_tokens:,} tokens {end}."


def remote_notes(remote: RemotePlan) -> list[str]:
    """What the columns mean, and how blocks are packed."""
    big = ", ".join(f"{name} {size(n)}" for name, n in remote.big_blocks.items())
    packed = [f"Blocks that are objects by themselves: {big}."] if big else []
    if remote.tile_bytes:
        tile = size(remote.tile_bytes)
        packed.append(f"Small full-attention blocks: tiles of {remote.tile_tokens:,} tokens, {tile}.")
    if remote.most_end_bytes:
        packed.append(f"Small blocks of a hit's end: one object, {size(remote.most_end_bytes)} at most.")
    reasons = dict.fromkeys(of.why_not for of in remote.lengths if of.why_not)
    absent = [", ".join(f"{of.tokens:,}" for of in remote.lengths if of.why_not == why) + f": {why}" for why in reasons]
    in_vain = size(remote.tile_bytes + remote.most_end_bytes)
    packed.append(f"If a part of the hit is here, the fetch reads at most {in_vain} that was not asked for.")
    return [
        *([f"Not fetched, in tokens: {'; '.join(absent)}."] if absent else []),
        f"time to fetch: {seconds(remote.call_s)} for the call, the bytes at {remote.gb_per_s:g} GB/s (--remote-gbps), "
        "and their way from the host to the device; read ampl.: bytes to fetch over the bytes of the blocks.",
        " ".join(packed),
        "a text takes: the objects of a prompt; if it ends with a block, those of the hit on all but its last token "
        "too. one more end: windows and chunks that each further end stores again, such as that of the answer. Texts "
        "are counted as sharing nothing.",
    ]
