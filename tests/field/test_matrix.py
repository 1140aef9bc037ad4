"""docs/FIELD-BUGS*.md against the tests: every entry stands there once, and every test that is named exists."""

from __future__ import annotations

import re
from collections import Counter

from field.matrix import DOCS, ENTRIES, ROOT, STATUSES, covered, played, problems


def pages() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in DOCS]


def test_every_entry_stands_there_once_with_a_status_and_every_test_that_it_names_exists():
    assert len(ENTRIES) == 130
    own = played(ROOT / "tests" / "field")
    assert own <= set(ENTRIES)
    assert problems(pages(), ENTRIES, ROOT, own) == []


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
        f"- **A1** It broke (t#1). I1.\n  {name}",
        "- **I-1** It broke (t#2). I2. *No part here*: not built yet: one rank.",
    ]
    assert problems(["# Title\n\n" + "\n".join(good)], ["A1", "I1"], ROOT) == []
    for well in (
        f"*In part*: the rest needs a GPU: {name}",
        f"*In part*: the rest\n  needs a GPU:\n  {name}",
        f"*No part here*: another stands in its place: {name}",
        "*Refers*: see section H.",
    ):
        assert problems([f"- **A1** It broke (t#1). {well}"], ["A1"], ROOT) == []
    for well in ("I1.", "*In part*: the rest needs a GPU.", "*No part here*: another stands in its place."):
        assert problems([f"- **A1** It broke (t#1). {well}"], ["A1"], ROOT, {"A1"}) == []
    for bad, seen in [
        ([], "A1: 0 times"),
        ([good[0], good[0]], "A1: 2 times"),
        ([good[0], "- **B2** It broke. *No part here*: not built yet."], "B2: not in the list"),
        ([good[0], f"  `{here}::test_gone`"], f"there is no {here}::test_gone"),
        ([f"- **A1** It broke. {name}, `tests/gone.py::test_x`"], "there is no tests/gone.py::test_x"),
        ([good[0], f"- **D-twin** It broke. `{here}::test_gone`"], f"there is no {here}::test_gone"),
        ([good[0], f"A claim: `{here}::test_gone`"], f"there is no {here}::test_gone"),
        ([f"- **A1** It broke. *Mostly*: not all: {name}"], "A1: 'mostly' is no status"),
        (["- **A1** It broke. I1. Somewhere."], "A1: tested, but no test is named"),
        (["- **A1** It broke. *In part*: it needs a GPU."], "A1: in part, but no test is named"),
        ([f"- **A1** It broke. *In part*: {name}, {name}"], "A1: in part, but not why"),
        ([f"- **A1** It broke. *No part here*: {name}"], "A1: no part here, but not why"),
        (["- **A1** It broke. *Refers*: elsewhere."], "A1: refers, but not to what"),
    ]:
        assert problems(["\n".join(bad)], ["A1"], ROOT) == [seen]


def test_an_entry_is_played_by_the_tests_that_are_named_after_it(tmp_path):
    (tmp_path / "test_x.py").write_text("def test_a1_it_broke(): ...\ndef test_a12(): ...\ndef a2_(): ...\n")
    (tmp_path / "other.py").write_text("def test_b1_it_broke(): ...\n")
    assert played(tmp_path) == {"A1"}


def test_what_is_covered_is_counted_by_status():
    """By the status alone, whatever else an entry says."""
    page = "\n".join(
        [
            "- **A1** It broke. On a real driver it needs a GPU. `tests/x.py::test_x`",
            "- **A2** It broke. *In part*: without the other half: `tests/x.py::test_x`",
            "- **I-1** It broke. *No part here*: not built yet: one rank.",
            "- **D-twin** It broke. `tests/x.py::test_x`",
        ]
    )
    assert covered(page) == {"A": {"tested": 1, "in part": 1}, "I": {"no part here": 1}}
