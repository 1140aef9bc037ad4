"""A run as a picture: latencies as shares, and load and first tokens over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvtier.machine.errors import ConfigError
from runner.bench.figures import samples_ms
from runner.bench.run import Finished
from runner.bench.show import words
from runner.bench.told import printable
from runner.display.pictures import pyplot

_BLUE, _RED, _GREY = "#4477aa", "#ee6677", "#888888"


def draw(finished: Finished, path: Path) -> None:
    """Writes the picture, in the format that the file's ending names; raises ``ConfigError`` if it cannot."""
    plt = pyplot()
    figure, ((first, gaps), (load, times)) = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    try:
        samples = samples_ms(finished.run.records)
        _shares(first, samples["ttft"], "time to first token (ms)")
        _shares(gaps, samples["itl"], "time between two pieces of an answer (ms)")
        _load(load, finished)
        _first_tokens(times, finished)
        for axes in (first, gaps, load, times):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
        figure.suptitle(_title(finished), fontsize=9, x=0.01, ha="left")
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--plot {path} cannot be written: {' '.join(str(problem).split())}") from problem
    finally:
        plt.close(figure)


def _title(finished: Finished) -> str:
    """No picture without workload and seed."""
    plan, server = finished.plan, finished.server
    software = f"{server.owned_by or 'unknown'} {server.version or ''}".strip()
    lines, line = [], f"{server.model} ({software}), {finished.date:%Y-%m-%d}."
    for word in words(plan.workload, plan.parameters, plan.seed).split():
        if len(line) + len(word) > 130:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join(printable(one, "utf-8") for one in (*lines, line))


def _shares(axes: Any, values: Any, label: str) -> None:
    axes.set(xlabel=label, ylabel="share of answers" if "first" in label else "share of gaps", ylim=(0, 1.02))
    if len(values):
        ordered = np.sort(values)
        axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=_BLUE)
        if ordered[0] > 0 and ordered[-1] > 20 * ordered[0]:
            axes.set_xscale("log")


def _load(axes: Any, finished: Finished) -> None:
    """Requests under way, and how many were due and answered by then."""
    run = finished.run
    axes.set(xlabel="seconds", ylabel="requests")
    if run.concurrency:
        axes.plot(*zip(*run.concurrency, strict=True), color=_BLUE, linewidth=1, label="under way")
    due = np.sort([record.due_s for record in run.records])
    ended = np.sort([record.end_s for record in run.records if record.is_ok])
    axes.step(due, np.arange(1, len(due) + 1), where="post", color=_GREY, linewidth=1, label="due")
    axes.step(ended, np.arange(1, len(ended) + 1), where="post", color=_RED, linewidth=1, label="answered")
    axes.legend(frameon=False, fontsize=8)


def _first_tokens(axes: Any, finished: Finished) -> None:
    """Each answer's first token against when it was due; darker: more of its prompt was cached."""
    whole = [record for record in finished.run.records if record.is_ok]
    axes.set(xlabel="due (seconds)", ylabel="time to first token (ms)", yscale="log" if whole else "linear")
    shares = [(r.cached_tokens or 0) / max(1, r.planned_prompt) for r in whole]
    points = axes.scatter([r.due_s for r in whole], [r.ttft_s * 1e3 for r in whole], c=shares, s=10, cmap="viridis_r",
                          vmin=0, vmax=1)  # fmt: skip
    if any(record.cached_tokens is not None for record in whole):
        axes.figure.colorbar(points, ax=axes, label="share of the prompt cached")
