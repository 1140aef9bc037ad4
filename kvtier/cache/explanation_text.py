"""An explanation in words, a line for each thing that happened, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.cache.explanation import Eviction, Explanation, GaveWay, Hit, Load, Missed, Wait

_SENT_BACK = {
    "blocks": "preempted: {by} needed blocks of {group}",
    "rows": "preempted: {by} got its row",
    "cancel": "sent back: the forward of its step failed",
    "load_failed": "sent back: its load failed",
    "reset": "sent back: the cache was reset while its prefix was being loaded",
    "disowned": "sent back: the content that it was loading was wrong",
}
_ENDS = {"prompt": "a prompt's end", "answer": "an answer's end", "parting": "a parting"}
SHORT_S = 0.001
"""Waits for a first look that are shorter are left out."""


def lines(told: Explanation) -> list[str]:
    """The whole story."""
    prompt = "" if told.prompt_tokens is None else f", {told.prompt_tokens:,} prompt tokens"
    head = f"request {told.request_id}: {_state(told)}{prompt}"
    if not told.is_whole:
        head += "; its first events are forgotten"
    parts: list[tuple[float, list[str]]] = [
        *((back.at_s, [_sent_back(back)]) for back in told.preemptions),
        *((wait.at_s, [_wait(wait)]) for wait in told.waits if wait.reason != "queue" or _lasted(wait)),
        *((hit.at_s, _hit(hit)) for hit in told.hits),
    ]
    if told.first_token_s is not None:
        parts.append((told.first_token_s, ["its prompt was computed: the first token"]))
    found = [head]
    for at_s, texts in sorted(parts, key=lambda part: part[0]):
        found += [f"{seconds(at_s):>9}  {texts[0]}", *(f"{'':>9}    {text}" for text in texts[1:])]
    if told.finish_reason is not None:
        found.append(f"{seconds(told.seconds):>9}  ended with {told.finish_reason!r}")
    return found + _pushed_out(told.pushed_out)


def seconds(value: float) -> str:
    """A time as people read it."""
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _state(told: Explanation) -> str:
    if told.generated_tokens is None:
        return told.state
    return f"{told.state}, {told.generated_tokens:,} generated tokens"


def _lasted(wait: Wait) -> bool:
    return wait.seconds is None or wait.seconds >= SHORT_S


def _wait(wait: Wait) -> str:
    lasts = "until now" if wait.seconds is None else seconds(wait.seconds)
    first = "at first " if wait.lacking else ""
    return f"waited {lasts} ({wait.reason}): {first}{wait.why}"


def _hit(hit: Hit) -> list[str]:
    first = f"admitted: {hit.tokens:,} of {hit.known_tokens:,} tokens hit"
    if hit.tokens:
        remote = f", {hit.remote_tokens:,} in the remote tier" if hit.remote_tokens else ""
        first += f" ({hit.device_tokens:,} on the device, {hit.host_tokens:,} in the host tier{remote})"
    found = [first]
    if hit.limited_by and hit.missing_from == 0 == hit.full_tokens:
        found.append(f"no tier had its first block of {hit.limited_by}")
    elif hit.limited_by:
        found.append(
            f"limited by {hit.limited_by}, which lacked the block from token {hit.missing_from:,} on"
            + (f"; full attention alone had {hit.full_tokens:,}" if hit.full_tokens > hit.tokens else "")
        )
    found += map(_missed, hit.missed)
    if hit.load is not None:
        found.append(_load(hit.load))
    if hit.recompute_s is not None:
        found.append(f"computing the {hit.tokens:,} tokens would have taken about {seconds(hit.recompute_s)}")
    if hit.prefill_s is not None:
        rest = f"the other {hit.computed_tokens:,}" if hit.tokens else f"its {hit.computed_tokens:,}"
        unit = "token" if hit.computed_tokens == 1 else "tokens"
        found.append(f"computed {rest} {unit} in {seconds(hit.prefill_s)}")
    return found


def _missed(missed: Missed) -> str:
    tokens = f"tokens {missed.start:,} to {missed.end:,}"
    if missed.why == "parted":
        return f"{tokens}: no text that is remembered goes on like this"
    if missed.why == "not_kept":
        what = f"{tokens}: {missed.group} had nothing for a hit that ends there"
        return what + (
            f", at {_ENDS[missed.ended]}: such ends did not pay" if missed.ended else "; no text had ended there"
        )
    if missed.pushed_s is None:
        return f"{tokens} were there, and are gone; nobody remembers whose blocks of {missed.group} they made room for"
    by = ", ".join(missed.pushed_for)
    last = seconds(missed.pushed_s)
    return f"{tokens} were pushed out: blocks of {missed.group} went to request {by}, the last {last} before"


def _load(load: Load) -> str:
    what = f"{blocks(load.blocks)}, {load.num_bytes / 1e6:,.1f} MB"
    if load.seconds is None:
        return f"is loading {what}"
    if load.error:
        return f"loading {what} failed after {seconds(load.seconds)}: {load.error}"
    return f"loaded {what} in {seconds(load.seconds)}"


def _sent_back(back: GaveWay) -> str:
    by = f"request {back.by}" if back.by else "another request"
    known = _SENT_BACK.get(back.why)  # else an engine's own words, whatever stands in them
    return f"sent back: {back.why}" if known is None else known.format(by=by, group=back.group)


def _pushed_out(evictions: list[Eviction]) -> list[str]:
    found = []
    for tier in ("device", "host"):
        for alone in (True, False):
            mine = [e for e in evictions if e.tier == tier and (e.beside == 1) is alone]
            if mine:
                whose = "for it alone" if alone else "for it and others in its steps"
                found.append(f"{'':>9}  pushed out of the {tier} tier, {whose}: {blocks(_sum(mine))}")
    return found


def _sum(evictions: list[Eviction]) -> dict[str, int]:
    total: dict[str, int] = {}
    for eviction in evictions:
        for group, n in eviction.blocks.items():
            total[group] = total.get(group, 0) + n
    return total


def blocks(of: Mapping[str, int]) -> str:
    """Numbers of blocks by group."""
    return ", ".join(f"{n:,} {group}" for group, n in of.items()) + (" blocks" if sum(of.values()) != 1 else " block")
