"""A plan as a picture: bytes of one request, by group, against its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.geometry import capacity
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import ConfigError
from runner.display.pictures import pyplot
from runner.plan.report import Plan, RemotePlan

_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
_POINTS = 600


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture, in the format that the file's ending names. Raises ``ConfigError`` if it cannot be written.

    What a request holds between two steps, stacked by group, up to the plan's longest; dashed: if all layers kept all
    tokens. With a remote tier, beside it: the time of a fetch from it and of computing, by length.
    """
    plt, spec, longest_tokens = pyplot(), plan.spec, plan.lengths[-1].tokens
    lengths = sorted(
        {*(max(1, longest_tokens * i // _POINTS) for i in range(_POINTS + 1)), *_edges(spec, longest_tokens)}
    )
    held = [capacity.bytes_of(spec, capacity.held_blocks(spec, n)) for n in lengths]
    full = [sum(capacity.bytes_of(spec, capacity.full_blocks(spec, n))) / 2**30 for n in lengths]
    stacks = [[row[g] / 2**30 for row in held] for g in range(len(spec.groups))]
    labels = [f"{group.name} ({group.num_layers} layers)" for group in spec.groups]
    panels = 1 if plan.remote is None else 2
    figure, every = plt.subplots(1, panels, figsize=(7.2 * panels, 4.2), layout="constrained", squeeze=False)
    axes = every[0][0]
    try:
        colours = [_COLOURS[g % len(_COLOURS)] for g in range(len(stacks))]
        axes.stackplot(lengths, *stacks, labels=labels, colors=colours, linewidth=0)
        axes.plot(lengths, full, "--", color="#555555", linewidth=1.2, label="if all layers kept all tokens")
        axes.set(xlim=(0, longest_tokens), ylim=(0, None))
        axes.set_xlabel("context of one request (tokens)")
        axes.set_ylabel("KV memory (GiB)")
        axes.set_title(f"{plan.model}: KV of one request, {plan.dtype}", loc="left", fontsize=11)
        axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1000:g}k" if n else "0")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], names[::-1], frameon=False, loc="upper left")
        if plan.remote is not None:
            _draw_times(plan, plan.remote, every[0][1])
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--plot {path} cannot be written: {' '.join(str(problem).split())}") from problem
    finally:
        plt.close(figure)


def _draw_times(plan: Plan, remote: RemotePlan, axes: Any) -> None:
    """Seconds against tokens, at the lengths of the plan; both axes are logarithmic."""
    tokens = [length.tokens for length in plan.lengths]
    told = [(length.tokens, length.fetch_s) for length in remote.lengths if length.fetch_s is not None]
    fetch = [fetch_s for _, fetch_s in told]
    label = f"fetch from the remote tier, {remote.gb_per_s:g} GB/s"
    axes.plot([n for n, _ in told], fetch, "o-", color=_COLOURS[0], label=label)
    compute = [length.recompute_s for length in plan.lengths if length.recompute_s is not None]
    if compute:
        axes.plot(tokens, compute, "s--", color=_COLOURS[4], label="compute (assumed, not measured)")
    if remote.break_even_tokens is not None:
        axes.axvline(remote.break_even_tokens, color="#555555", linewidth=0.8, linestyle=":")
        top = max(fetch, default=1.0)
        axes.annotate(f"{remote.break_even_tokens:,}", (remote.break_even_tokens, top), rotation=90, ha="right")
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("context of one request (tokens)")
    axes.set_ylabel("time to the KV on the device (s)")
    axes.set_title("a fetch against computing", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left")


def _edges(spec: CacheSpec, longest_tokens: int) -> set[int]:
    """Lengths at which a group's memory turns: when windows are full, and on both sides of a chunk's end."""
    edges: set[int] = set()
    for span in {group.attention.span_tokens for group in spec.groups} - {0}:
        for k in range(1, min(longest_tokens // span, _POINTS) + 1):
            edges |= {k * span - 1, k * span}
    return {n for n in edges if 1 <= n <= longest_tokens}
