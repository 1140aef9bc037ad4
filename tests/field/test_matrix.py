"""docs/FIELD-BUGS*.md against the tests: every entry has one row and a status, and every test that is named exists."""

from __future__ import annotations

import re
from collections import Counter

from field.matrix import DOCS, ENTRIES, ROOT, STATUSES, covered, problems


def pages() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in DOCS]


def test_every_entry_has_one_row_with_a_status_and_every_test_that_it_names_exists():
    assert len(ENTRIES) == 129
    assert problems(pages(), ENTRIES, ROOT) == []


def test_the_figures_in_testing_md_are_those_of_the_page():
    whole = sum(covered("\n".join(pages())).values(), Counter())
    text = (ROOT / "docs" / "TESTING.md").read_text(encoding="utf-8")
    section = text.split("## Field bugs")[1].split("\n## ")[0]
    said = {status: int(n) for n, status in re.findall(rf"(\d+) \*({'|'.join(STATUSES)})\*", section)}
    assert said == whole
    assert f"{whole.total()} entries" in section


def test_the_check_itself_sees_what_is_wrong():
    here = "tests/field/test_matrix.py"
    name = f"`{here}::test_the_check_itself_sees_what_is_wrong`"
    good = [
        f"| A1 | t#1 | w | I1 | tested | {name} |",
        "| I-1 | t#2 | w | I2 | no part here | Not built yet: one rank |",
    ]
    assert problems(["| entry |\n|---|\n" + "\n".join(good)], ["A1", "I1"], ROOT) == []
    for well in (
        f"in part | {name}; the rest needs a GPU",
        f"no part here | {name} in its place",
        "refers | see section H",
    ):
        assert problems([f"| A1 | t | w | I1 | {well} |"], ["A1"], ROOT) == []
    for bad, seen in [
        ([], "A1: 0 rows"),
        ([good[0], good[0]], "A1: 2 rows"),
        ([good[0], "| B2 | t | w | I1 | no part here | not built yet |"], "B2: not in the list"),
        (
            ["| A1 | t | w | I1 | tested | `tests/field/test_matrix.py::test_gone` |"],
            f"A1: there is no {here}::test_gone",
        ),
        (["| A1 | t | w | I1 | tested | `tests/gone.py::test_x` |"], "A1: there is no tests/gone.py::test_x"),
        (
            [good[0], f"| D-twin | t | w | I1 | tested | `{here}::test_gone` |"],
            f"D-twin: there is no {here}::test_gone",
        ),
        ([good[0], f"| a claim | `{here}::test_gone` | w |"], f"a claim: there is no {here}::test_gone"),
        ([f"| A1 | t | w | I1 | mostly | {name} |"], "A1: 'mostly' is no status"),
        ([f"| A1 | t | w | I1 | Tested | {name} |"], "A1: 'Tested' is no status"),
        (["| A1 | t | w | I1 | tested | somewhere |"], "A1: tested, but no test is named"),
        (["| A1 | t | w | I1 | in part | needs a GPU |"], "A1: in part, but no test is named"),
        ([f"| A1 | t | w | I1 | in part | {name}, {name} |"], "A1: in part, but not why"),
        ([f"| A1 | t | w | I1 | no part here | {name} |"], "A1: no part here, but not why"),
        (["| A1 | t | w | I1 | refers | elsewhere |"], "A1: refers, but not to what"),
        (["| A1 | t | w |  | no part here | not built yet |"], "A1: not 6 filled cells"),
        (["| A1 | t | w | I1 |  | not built yet |"], "A1: not 6 filled cells"),
        ([f"| A1 | t | w | I1 | {name} |"], "A1: not 6 filled cells"),
    ]:
        assert problems(["\n".join(bad)], ["A1"], ROOT) == [seen]


def test_what_is_covered_is_counted_by_status():
    """By the status alone, whatever else a row says."""
    page = "\n".join(
        [
            "| A1 | t | w | I1 | tested | `tests/x.py::test_x`; on a real driver it needs a GPU |",
            "| A2 | t | w | I1 | in part | `tests/x.py::test_x`, without the other half |",
            "| I-1 | t | w | I1 | no part here | Not built yet: one rank |",
            "| a claim | `tests/x.py::test_x` | w | I1 | tested | said |",
        ]
    )
    assert covered(page) == {"A": {"tested": 1, "in part": 1}, "I": {"no part here": 1}}
