"""Every row of the micro benchmark still runs and gives a figure; how large it is, is no test's business."""

import json
import subprocess

import pytest
from breadth import sample
from rich.console import Console

from benchmarks.micro import against, submit
from benchmarks.micro.__main__ import measure, table
from benchmarks.micro.rows import Row, rows

ROWS = rows()
ONE_OF_EACH = list({row.name: row for row in reversed(ROWS)}.values())


@pytest.mark.parametrize("row", sample(ROWS, ONE_OF_EACH), ids=lambda row: f"{row.name}, {row.shape}")
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


STANDS_FOR_THE_BENCHMARK = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--only"), parser.add_argument("--json")
options = parser.parse_args()
rows = [{"name": name, "shape": "L", "median": median} for name, median in %s.items() if options.only in name]
open(options.json, "w").write(json.dumps({"rows": rows}))
"""


@pytest.fixture
def repository(tmp_path):
    """Two commits whose benchmarks report what they are told; the second one is checked out."""
    main = tmp_path / "benchmarks" / "micro" / "__main__.py"
    main.parent.mkdir(parents=True)
    for package in (main.parents[1], main.parent):
        (package / "__init__.py").touch()  # or a namespace, which loses to this project's own package in PYTHONPATH

    def git(*command):
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    for medians in ({"keys": 10.0, "match": 10.0, "gone": 1.0}, {"keys": 13.0, "match": 11.0, "new": 5.0}):
        main.write_text(STANDS_FOR_THE_BENCHMARK % json.dumps(medians))
        git("add", "."), git("commit", "--quiet", "--message", "a commit")
    return tmp_path


@pytest.mark.parametrize("only, tolerance, status", [("", "0.15", 1), ("match", "0.15", 0), ("", "0.4", 0)])
def test_a_row_that_an_earlier_commit_ran_sooner_is_told(repository, capsys, only, tolerance, status):
    command = ["HEAD~1", "--rounds", "1", "--only", only, "--tolerance", tolerance]
    assert against.main(command, repository) == status
    shown = capsys.readouterr().out
    assert "match" in shown and "gone" not in shown and "new" not in shown
    assert f"{status} of {1 if only else 2} rows slower" in shown


@pytest.mark.parametrize("command", [["no such commit"], ["HEAD~1", "--rounds", "0"], ["HEAD~1", "--only", "nothing"]])
def test_nothing_to_compare_is_a_usage_error(repository, command, capsys):
    with pytest.raises(SystemExit) as ended:
        against.main(command, repository)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_row_counts_as_slower_only_where_all_rounds_agree():
    row = ("keys", "L")
    (change,) = against.changes([{row: 10.0}, {row: 10.0}, {row: 10.0}], [{row: 15.0}, {row: 14.0}, {row: 9.9}])
    assert change.ratios == (1.5, 1.4, 0.99)
    assert not change.is_slower(0.15)
    (change,) = against.changes([{row: 10.0}, {row: 20.0}, {row: 10.0}], [{row: 15.0}, {row: 21.0}, {row: 12.0}])
    assert (change.before, change.after, change.is_slower(0.15), change.is_slower(0.2)) == (10.0, 15.0, True, False)
