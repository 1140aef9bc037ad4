"""docs/FIELD-BUGS*.md against the tests: every entry has one row, and every test that any row names exists."""

from __future__ import annotations

from field.matrix import DOCS, ENTRIES, ROOT, covered, problems


def test_every_entry_has_one_row_and_every_test_that_it_names_exists():
    assert len(ENTRIES) == 129
    assert problems([path.read_text(encoding="utf-8") for path in DOCS], ENTRIES, ROOT) == []


def test_the_check_itself_sees_what_is_wrong():
    here = "tests/field/test_matrix.py"
    good = [
        f"| A1 | t#1 | w | I1 | `{here}::test_the_check_itself_sees_what_is_wrong` |",
        "| I-1 | t#2 | w | I2 | Not built yet: one rank |",
    ]
    assert problems(["| entry |\n|---|\n" + "\n".join(good)], ["A1", "I1"], ROOT) == []
    for bad, seen in [
        ([], "A1: 0 rows"),
        ([good[0], good[0]], "A1: 2 rows"),
        ([good[0], "| B2 | t | w | I1 | not built yet |"], "B2: not in the list"),
        (["| A1 | t | w | I1 | `tests/field/test_matrix.py::test_gone` |"], f"A1: there is no {here}::test_gone"),
        (["| A1 | t | w | I1 | `tests/gone.py::test_x` |"], "A1: there is no tests/gone.py::test_x"),
        ([good[0], f"| D-twin | t | w | I1 | `{here}::test_gone` |"], f"D-twin: there is no {here}::test_gone"),
        ([good[0], f"| a claim | `{here}::test_gone` | w |"], f"a claim: there is no {here}::test_gone"),
        (["| A1 | t | w | I1 | somewhere |"], "A1: neither a test nor a reason"),
        (["| A1 | t | w |  | not built yet |"], "A1: not 5 filled cells"),
        (["| A1 | t | w | not built yet |"], "A1: not 5 filled cells"),
    ]:
        assert problems(["\n".join(bad)], ["A1"], ROOT) == [seen]


def test_what_is_covered_is_counted_by_kind():
    page = "\n".join(
        [
            "| A1 | t | w | I1 | `tests/x.py::test_x` |",
            "| A2 | t | w | I1 | On a GPU (*needs a GPU*); here `tests/x.py::test_x` |",
            "| I-1 | t | w | I1 | Not built yet: one rank |",
            "| a claim | `tests/x.py::test_x` | w | I1 | said |",
        ]
    )
    assert covered(page) == {"A": {"tested": 1, "tested in part": 1}, "I": {"not built yet": 1}}
