"""Every row of the micro benchmark still runs and gives a figure; how large it is, is no test's business."""

import pytest
from rich.console import Console

from benchmarks.micro import submit
from benchmarks.micro.__main__ import measure, table
from benchmarks.micro.rows import Row, rows


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.name}, {row.shape}")
def test_a_row_gives_a_positive_figure(row, unaudited):
    repeats = row.measure()
    assert next(repeats) > 0.0
    repeats.close()


def test_the_table_says_where_a_mark_is_missed_and_where_vllm_was_measured():
    row = Row("keys", "L", "ns", 1.0, must=2.0, reach=1.0, vllm=1_428, measure=lambda: iter([9.0, 3.0, 3.0, 3.0, 3.0]))
    figure = measure(row)
    assert (figure["median"], figure["repeats"]) == (3.0, 4)  # the first fifth warms caches
    console = Console(record=True, width=200)
    console.print(table([figure]))
    assert "elsewhere" in console.export_text(clear=False)
    assert "1,428" in console.export_text(clear=False)
    console.print(table([figure | {"vllm_here": 6.0}]))
    text = console.export_text()
    assert "vLLM / kvtier" in text and " 2 " in text


def test_a_loads_runs_do_not_touch_each_other():
    transfer = submit.load(10)
    both = (transfer.device[1:] - transfer.device[:-1] == 1) & (transfer.host[1:] - transfer.host[:-1] == 1)
    assert int((~both).sum()) == 9
    assert len(set(transfer.host.tolist())) == submit.BLOCKS
