"""docs/FIELD-BUGS.md as data: what is tested of each entry, by the status that it has there.

``python -m tests.field.matrix`` prints the figures; ``test_matrix.py`` checks the page.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("FIELD-BUGS*.md"))

LAST_ENTRY = {"A": 21, "B": 15, "C": 16, "D": 17, "E": 11, "F": 12, "G": 13, "H": 5, "I": 3, "J": 7, "K": 10}
ENTRIES = [f"{section}{n}" for section, last in LAST_ENTRY.items() for n in range(1, last + 1)]

ITEM = re.compile(r"^- \*\*([A-K]-?\d+)\*\* (.*(?:\n  .*)*)", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
STATUS = re.compile(r"(?<!\*)\*([^*`]+)\*(?!\*): ")
REFERENCE = re.compile(r"see section [A-K]\b")
STATUSES = ("tested", "in part", "no part here", "refers")


def items_of(text: str) -> list[tuple[str, str, str]]:
    """Each entry, its status, and what is said of it from there on; an entry such as I-1 is I1."""
    out = []
    for name, said in ITEM.findall(text):
        said = " ".join(said.split())
        marked = STATUS.search(said)
        status, rest = (marked[1].lower(), said[marked.end() :]) if marked else ("tested", said)
        out.append((name.replace("-", ""), status, rest))
    return out


def names_in(path: Path) -> set[str]:
    """Functions and classes of a Python file, methods included; the file is read, not imported."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def played(folder: Path) -> set[str]:
    """The entries that tests in this folder are named after: A1 by ``test_a1_...``."""
    names = {name for path in folder.glob("test_*.py") for name in names_in(path)}
    return {found[1].upper() for name in names if (found := re.match(r"test_([a-k]\d+)_", name))}


def problems(texts: Iterable[str], entries: Iterable[str], root: Path, own: Collection[str] = ()) -> list[str]:
    """What is wrong with the lists in these texts; empty if nothing is. ``own``: entries that tests are named after."""
    texts = [*texts]
    items = [item for text in texts for item in items_of(text)]
    count, found = Counter(name for name, _, _ in items), []
    wanted = set(entries)
    found += [f"{entry}: {count[entry]} times" for entry in sorted(wanted) if count[entry] != 1]
    found += [f"{entry}: not in the list" for entry in sorted(set(count) - wanted)]
    for entry, status, said in items:
        if status not in STATUSES:
            found.append(f"{entry}: {status!r} is no status")
        elif lacks := _lacks(status, said, entry in own):
            found.append(f"{entry}: {status}, but {lacks}")
    known: dict[str, set[str]] = {}
    for path, name in (test for text in texts for test in TEST.findall(text)):
        if path not in known:
            known[path] = names_in(root / path)
        if name not in known[path]:
            found.append(f"there is no {path}::{name}")
    return found


def _lacks(status: str, said: str, has_own: bool) -> str:
    """What an entry of this status should have, and has not; "" if nothing."""
    if status in ("tested", "in part") and not has_own and not TEST.search(said):
        return "no test is named"
    if status == "refers" and not REFERENCE.search(said):
        return "not to what"
    if status in ("in part", "no part here") and not re.search(r"\w", TEST.sub("", said)):
        return "not why"
    return ""


def covered(text: str) -> dict[str, Counter[str]]:
    """For each section, how many entries have which status."""
    found: dict[str, Counter[str]] = {}
    for entry, status, _ in items_of(text):
        found.setdefault(entry[0], Counter())[status] += 1
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
