"""What the documents name is in the code: classes, methods, functions, files, the list of files in CONTRIBUTING.md.

ADRs and logs are left out: they say what was there when they were written.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard, get_args

import pytest

from kvtier.geometry.kinds import Attention, FullAttention, Kind

ROOT = Path(__file__).parent.parent
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [
    ROOT / "README.md",
    CONTRIBUTING,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
BENEATH = [ROOT, ROOT / "kvtier", ROOT / "runner", ROOT / "tests"]
"""Where paths of documents begin."""
CODE = ["kvtier", "runner", "tests", "benchmarks", "tools", "examples"]
SUFFIXES = {"py", "md", "json", "toml", "so", "gguf"}
YOURS = {"ask.py"}
"""Files that a reader is told to write."""
FOREIGN = {
    "AWS_REGION",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "collective_rpc",
    "PYTORCH_CUDA_ALLOC_CONF",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}


def assigned(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that statements give to a module or a class."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from assigned(node.body)
        else:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All of them, in whatever they stand. To walk the expressions too would take three times as long."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            if inner := getattr(node, part, None):
                yield from statements(inner)


def targets(body: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What statements assign to."""
    for node in statements(body):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
            yield node.target
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            yield from (item.optional_vars for item in node.items if item.optional_vars is not None)


class Names:
    """The names of modules and classes, as the sources have them."""

    def __init__(self) -> None:
        self.words = set(re.findall(r"\w+", (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()))
        self.modules: dict[str, set[str]] = defaultdict(set)
        self.classes: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
            text, module = path.read_text(encoding="utf-8"), path.parent.name if path.stem == "__init__" else path.stem
            tree = ast.parse(text)
            self.words |= {path.stem, *re.findall(r"\w+", text)}
            self.modules[module] |= {*assigned(tree.body)}
            self.modules[path.parent.name].add(path.stem)
            for node in statements(tree.body):
                if isinstance(node, ast.ClassDef):
                    fields = {n.attr for target in targets(node.body) for n in ast.walk(target) if is_field(n)}
                    self.classes[node.name] |= {*assigned(node.body), *fields}
                    self._bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}

    def has(self, owner: str, name: str) -> bool:
        """Whether class or module ``owner`` has ``name``. An ``owner`` in lower case may be an object of any class."""
        if owner[0].isupper():
            bases = self._bases[owner] - {owner}
            return name in self.classes[owner] or any(self.has(base, name) for base in bases)
        is_ours = owner in self.modules
        return not is_ours or name in self.modules[owner] or any(name in own for own in self.classes.values())


def is_field(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether it is ``self.name`` that something is assigned to."""
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.value, ast.Name) and node.value.id == "self"


@functools.cache
def names() -> Names:
    return Names()


def gone(text: str) -> Iterator[str]:
    """What stands between backticks and is in no source file."""
    for code in sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))):
        member = re.fullmatch(r"(?:(?:kvtier|runner)\.(?:\w+\.)*)?(\w+)\.(\w+)(?:\(.*\))?", code)
        word = re.fullmatch(r"(\w+)(?:\(.*\))?", code)
        if member:
            is_there = member[2] in SUFFIXES or names().has(member[1], member[2])
        else:
            is_there = not word or not re.search(r"_|[a-z][A-Z]", word[1]) or word[1] in names().words | FOREIGN
        if not is_there:
            yield code


def lost(text: str) -> Iterator[str]:
    """Paths between backticks that end in .py and are no file.

    In a row of a table a path, or a name alone, may also go on from the folder of the one before. Elsewhere a name
    alone may be of any folder.
    """
    for line in text.splitlines():
        bases, is_row = BENEATH, line.startswith("|")
        for path in re.findall(r"`([\w/]+\.py)`", line):
            anywhere = [] if is_row or "/" in path else [of for folder in CODE for of in (ROOT / folder).rglob(path)]
            found = anywhere or [base / path for base in bases if (base / path).is_file()]
            if not found and "NAME" not in path and path not in YOURS:
                yield path
            elif is_row and found:
                bases = [found[0].parent, *BENEATH]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_a_document_is_a_file(page: Path) -> None:
    assert [*lost(page.read_text(encoding="utf-8"))] == []


def test_a_path_that_is_gone_is_seen() -> None:
    rows = ["| `remote/tier.py`, `spills.py`, `backends/uri.py`, `threads.py`, `audit/pools.py` |", "| `spills.py` |"]
    assert [*lost("\n".join(rows))] == ["spills.py"]
    prose = "`runner/sampling/gone.py`, `kvtier/remote/backends/NAME.py`, `core/test_keys.py`, `mooncake.py`, `any.py`"
    assert [*lost(prose)] == ["runner/sampling/gone.py", "any.py"]


def test_every_name_in_a_document_is_in_the_code() -> None:
    """One test for all pages: to read all sources takes seconds, and each process that runs tests would."""
    found = {str(page.relative_to(ROOT)): [*gone(page.read_text(encoding="utf-8"))] for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


@pytest.mark.parametrize("page", ["OPERATIONS", "DEPLOYMENT", "SECURITY", "SERVING", "COMMANDS", "reference/errors"])
def test_every_option_in_a_document_is_an_option_of_kvtier(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    commands = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "runner" / "commands").glob("*.py"))
    told = {*re.findall(r"(?<![-\w])--[a-z][a-z-]+", " ".join(re.findall(r"`(--[^`]+|kvtier [^`]+)`", text)))}
    assert told
    there = {*re.findall(r'"(--[^"]+)"', commands)}
    there |= {option.replace("--", "--no-", 1) for option in there}  # argparse's way to turn one off
    assert told - there <= {"--help"}


def test_a_name_that_is_gone_is_seen() -> None:
    absent = ["Coordinator.promised", "plan.run_plan", "_".join(["twin", "until"])]
    present = ["Room.promised", "plan.plan_running", "cache.stats()", "Tracked", "block_tokens", "docs/x.md"]
    assert [*gone(" ".join(f"`{name}`" for name in present + absent))] == absent


def test_the_checklist_of_an_attention_kind_names_every_file_that_tells_kinds_apart() -> None:
    """A file that asks only whether a group is full takes every other kind as local."""
    kinds = "|".join(kind.name for kind in Kind if kind is not Kind.FULL)
    classes = "|".join(make.__name__ for make in get_args(Attention) if make is not FullAttention)
    asks = re.compile(rf"\bKind\.({kinds})\b|\b({classes})\b")
    files = {
        str(path.relative_to(ROOT))
        for folder in ("kvtier", "runner")
        for path in (ROOT / folder).rglob("*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    section = CONTRIBUTING.read_text(encoding="utf-8").split("### ... an attention kind")[1].split("###")[0]
    listed = set(re.findall(r"`((?:kvtier|runner)/[\w/]+\.py)`", section))
    assert files - listed == set(), "name these files in the checklist of CONTRIBUTING.md"
    assert [name for name in listed if not (ROOT / name).exists()] == []


def test_no_test_file_is_longer_than_contributing_allows() -> None:
    assert "500 lines at most" in CONTRIBUTING.read_text(encoding="utf-8")
    lines = {path: path.read_bytes().count(b"\n") for path in (ROOT / "tests").rglob("*.py")}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > 500} == {}
