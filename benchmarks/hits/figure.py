"""The figure: a panel per shape; each row a point, by vLLM's and kvtier's share of the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.hits.rows import KVTIER, VLLM, Memory, Row, below

_COLOURS = ("#ee6677", "#ccbb44", "#228833", "#4477aa", "#aa3377", "#66ccee", "#bbbbbb")
_NAMED = 6
"""Of a panel, the workloads that are named, at the row that is farthest below."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes it, of a result with vLLM's side. Above the line kvtier finds more; hollow points: several at once."""
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
        from matplotlib.lines import Line2D
    except ImportError as problem:
        raise SystemExit("the figure needs matplotlib: pip install 'kvtier[plot]'") from problem
    rows = [row for row in result["rows"] if VLLM in row]
    if not rows:
        raise SystemExit("the figure compares with vLLM: --vllm PYTHON")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    memories = sorted({row["memory"] for row in rows}, key=Memory.parse)
    colours = dict(zip(memories, _COLOURS, strict=False))
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(1, len(shapes), figsize=(4.2 * len(shapes), 4.8), layout="constrained", squeeze=False)
    for shape, axes in zip(shapes, panels.flat, strict=True):
        axes.axline((0, 0), slope=1, color="#999999", linewidth=0.8)
        of = [row for row in rows if row["shape"] == shape]
        for row in of:
            face = colours[row["memory"]] if row["at_once"] == 1 else "none"
            axes.scatter(*_point(row), s=20, facecolor=face, edgecolor=colours[row["memory"]], linewidth=1)
        worst = sorted(filter(below, of), key=lambda row: row[KVTIER]["rate"] - row[VLLM]["rate"])
        once = {row["workload"]: row for row in reversed(worst)}
        for row in [row for row in worst if once[row["workload"]] is row][:_NAMED]:
            axes.annotate(row["workload"], _point(row), xytext=(4, -7), textcoords="offset points", fontsize=7)
        axes.set(title=shape, xlim=(-3, 103), ylim=(-3, 103), aspect="equal", xlabel="vLLM, % of the bound")
    panels[0, 0].set_ylabel("kvtier, % of the bound")
    lines = [Line2D([], [], marker="o", linestyle="", color=colours[m], label=f"memory {m}") for m in memories]
    if len({row["at_once"] for row in rows}) > 1:
        lines.append(
            Line2D([], [], marker="o", linestyle="", color="#555555", markerfacecolor="none", label="several at once")
        )
    figure.legend(handles=lines, loc="outside upper center", ncols=min(len(lines), 3 * len(shapes)), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _point(row: Row) -> tuple[float, float]:
    return 100 * row[VLLM]["rate"] / row["bound"], 100 * row[KVTIER]["rate"] / row["bound"]
