"""``benchmarks.scaling`` runs: a point of every sweep is what it says, and the figure is drawn."""

from __future__ import annotations

from pathlib import Path

import inside
import pytest

from benchmarks.scaling import sweeps
from benchmarks.scaling.figure import draw

pytestmark = pytest.mark.usefixtures("unaudited")


@pytest.mark.parametrize("sweep", sweeps.SWEEPS, ids=lambda sweep: sweep.name)
def test_a_point_is_what_it_says(sweep: sweeps.Sweep) -> None:
    point = list(sweeps.points(sweep, quick=True))[-1]
    assert point.value == sweep.quick[-1]
    scheduler = sweeps._decoding(point)
    step = scheduler.schedule()
    assert len(step.request_ids) == step.num_tokens == point.running
    assert all(0 < n - (point.context - 32) < 64 for n in step.seq_lens.tolist())
    groups = inside.pools(scheduler)
    if sweep.name == "pool":
        assert set(groups.usable.tolist()) == {point.value}
    if sweep.name == "groups":
        assert len(groups.usable) == point.value
    scheduler.cancel(step)


def test_the_points_cover_what_was_asked_for() -> None:
    found = {sweep.name: [point.value for point in sweeps.points(sweep, quick=False)] for sweep in sweeps.SWEEPS}
    bounds = {name: (min(values), max(values)) for name, values in found.items()}
    assert bounds == {"running": (16, 2048), "context": (1024, 2**19), "pool": (2**15, 2**20), "groups": (1, 6)}


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; `make test` installs it")
    point = next(sweeps.points(sweeps.SWEEPS[-1], quick=True))
    row = sweeps.measure(point, 2)
    assert (row["sweep"], row["value"], row["shape"]) == ("groups", 1, "X")
    assert 0 < row["with_pages"]["least"] <= row["with_pages"]["median"] <= row["with_pages"]["most"]
    rows = [
        {**row, "sweep": sweep.name, "shape": shape, "value": value}
        for sweep in sweeps.SWEEPS
        for shape in sweep.shapes
        for value in sweep.values
    ]
    draw({"quick": True, "rows": rows}, tmp_path / "new" / "scaling.png")
    assert (tmp_path / "new" / "scaling.png").read_bytes().startswith(b"\x89PNG")
