"""The figure: a panel per sweep, microseconds of a step against what varies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.scaling.sweeps import SWEEPS

SHAPE_NAMES = {"L": "full", "G": "full + window", "X": "six groups"}
_COLOURS = {"L": "#4477aa", "G": "#228833", "X": "#ee6677"}
_GREY = "#555555"


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the figure of a result of ``python -m benchmarks.scaling``."""
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        from matplotlib.lines import Line2D
    except ImportError as problem:
        raise SystemExit("the figure needs matplotlib: pip install 'kvtier[plot]'") from problem
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(2, 2, figsize=(8.4, 6.2), layout="constrained")
    for sweep, axes in zip(SWEEPS, panels.flat, strict=True):
        for shape in sweep.shapes:
            rows = [row for row in result["rows"] if (row["sweep"], row["shape"]) == (sweep.name, shape)]
            values = [row["value"] for row in rows]
            for name, style in (("with_pages", "-o"), ("without_pages", "--o")):
                medians = [row[name]["median"] for row in rows]
                colour = _GREY if sweep.name == "groups" else _COLOURS[shape]
                axes.plot(values, medians, style, color=colour, markersize=3, linewidth=1.3)
        axes.set_xlabel(sweep.label)
        axes.set_ylabel("one step (µs)")
        if sweep.name != "groups":
            axes.set_xscale("log", base=2)
            ticks = sorted({row["value"] for row in result["rows"] if row["sweep"] == sweep.name})
            axes.set_xticks(ticks, [_short(n) for n in ticks])
            axes.minorticks_off()
        if sweep.name == "running":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        else:
            axes.set_ylim(0, None)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    lines = [Line2D([], [], color=_COLOURS[shape], label=SHAPE_NAMES[shape]) for shape in _COLOURS]
    lines.append(Line2D([], [], color=_GREY, linestyle="-", label="all arrays"))
    lines.append(Line2D([], [], color=_GREY, linestyle="--", label="without block tables and page lists"))
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    if result["quick"]:
        figure.suptitle("quick run: points are small and few")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _short(n: int) -> str:
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n >= size:
            return f"{n // size}{unit}"
    return str(n)
