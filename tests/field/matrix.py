"""docs/FIELD-BUGS.md as data: what is tested of each entry, by the status that its row gives it.

``python -m tests.field.matrix`` prints the figures; ``test_matrix.py`` checks the page.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("FIELD-BUGS*.md"))

LAST_ENTRY = {"A": 21, "B": 15, "C": 16, "D": 17, "E": 11, "F": 12, "G": 12, "H": 5, "I": 3, "J": 7, "K": 10}
ENTRIES = [f"{section}{n}" for section, last in LAST_ENTRY.items() for n in range(1, last + 1)]

COLUMNS = 6  # entry, threads, what went wrong, invariants, status, where tested
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
ENTRY = re.compile(r"[A-K]-?\d+")
REFERENCE = re.compile(r"see section [A-K]\b")
STATUSES = ("tested", "in part", "no part here", "refers")


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
        elif entry in count and cells[-2] not in STATUSES:
            found.append(f"{entry}: {cells[-2]!r} is no status")
        elif entry in count and (lacks := _lacks(*cells[-2:])):
            found.append(f"{entry}: {cells[-2]}, but {lacks}")
        for path, name in TEST.findall(" ".join(cells)):
            if path not in known:
                known[path] = names_in(root / path)
            if name not in known[path]:
                found.append(f"{entry}: there is no {path}::{name}")
    return found


def _lacks(status: str, where: str) -> str:
    """What a row of this status should say in its last cell, and does not; "" if nothing."""
    if status in ("tested", "in part") and not TEST.search(where):
        return "no test is named"
    if status == "refers" and not REFERENCE.search(where):
        return "not to what"
    if status in ("in part", "no part here") and not re.search(r"\w", TEST.sub("", where)):
        return "not why"
    return ""


def covered(text: str) -> dict[str, Counter[str]]:
    """For each section, how many entries have which status."""
    found: dict[str, Counter[str]] = {}
    for entry, *cells in rows_of(text):
        if ENTRY.fullmatch(entry):
            found.setdefault(entry[0], Counter())[cells[-2]] += 1
    return found


def table(found: dict[str, Counter[str]]) -> Table:
    """For people."""
    shown = Table("section", *STATUSES, "entries")
    for section, counts in found.items():
        shown.add_row(section, *(str(counts[status] or "") for status in STATUSES), str(counts.total()))
    whole = sum(found.values(), Counter())
    shown.add_section()
    shown.add_row("all", *(str(whole[status]) for status in STATUSES), str(whole.total()))
    return shown


if __name__ == "__main__":
    Console(width=160).print(table(covered("\n".join(path.read_text(encoding="utf-8") for path in DOCS))))
