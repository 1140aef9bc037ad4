"""docs/FIELD-BUGS*.md against the tests: every entry has one row, and every test that any row names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("FIELD-BUGS*.md"))

LAST_ENTRY = {"A": 21, "B": 15, "C": 16, "D": 17, "E": 11, "F": 12, "G": 12, "H": 5, "I": 3, "J": 7, "K": 10}
ENTRIES = [f"{section}{n}" for section, last in LAST_ENTRY.items() for n in range(1, last + 1)]

COLUMNS = 5  # entry, threads, what went wrong, invariants, where tested
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
ENTRY = re.compile(r"[A-K]-?\d+")
REASONS = ("cannot apply", "not built yet", "needs a gpu", "see section")


def rows_of(text: str) -> list[list[str]]:
    """The cells of every table row; an entry such as I-1 is I1."""
    out = []
    for line in text.splitlines():
        if line.startswith("|"):
            name, *cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            out.append([name.replace("-", "") if ENTRY.fullmatch(name) else name, *cells])
    return out


def names_in(path: Path) -> set[str]:
    """Functions and classes of a Python file, methods included; the file is read, not imported."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def problems(texts: Iterable[str], entries: Iterable[str], root: Path) -> list[str]:
    """What is wrong with the tables in these texts; empty if nothing is."""
    rows = [row for text in texts for row in rows_of(text)]
    count, found = Counter(row[0] for row in rows if ENTRY.fullmatch(row[0])), []
    wanted = set(entries)
    found += [f"{entry}: {count[entry]} rows" for entry in sorted(wanted) if count[entry] != 1]
    found += [f"{entry}: not in the list" for entry in sorted(set(count) - wanted)]
    known: dict[str, set[str]] = {}
    for entry, *cells in rows:
        if entry in count and (len(cells) != COLUMNS - 1 or not all(cells)):
            found.append(f"{entry}: not {COLUMNS} filled cells")
        elif entry in count and not (TEST.search(cells[-1]) or any(why in cells[-1].lower() for why in REASONS)):
            found.append(f"{entry}: neither a test nor a reason")
        for path, name in TEST.findall(" ".join(cells)):
            if name not in known.setdefault(path, names_in(root / path)):
                found.append(f"{entry}: there is no {path}::{name}")
    return found


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
