"""Small changes of the bookkeeping, drawn by chance: how much of it could be wrong without a test noticing?

Operators on syntax trees, one place at a time: a comparison swapped, a number off by one, ``and`` for ``or``, a
condition negated, a statement left out. Nothing says that a change matters: some survivors are equivalent.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .structure import FUNCTIONS, Code, Site

PACKAGES = ("kvtier/coordinator/", "kvtier/cpu_offload/", "kvtier/gpu_pool/", "kvtier/pools/")
IDLE = (ast.Assert, ast.Raise, ast.JoinedStr, ast.arguments)
"""Checks of our own bugs, texts for people, defaults."""
SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    a: b
    for pair in ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
    for a, b in (pair, pair[::-1])
}
ANY = ("tests/core/coordinator/test_giving_way.py", "tests/core/coordinator/test_lifecycle.py")
"""Who looks first at a module that no test of tests/core imports."""


@dataclass(frozen=True)
class Sampled:
    """One change, as the runner takes a mutation."""

    site: Site
    new: str
    operator: str
    old: str
    tests: tuple[str, ...]
    invariants: str = ""
    hangs: bool = True

    @property
    def name(self) -> str:
        """Where it is, and which operator made it."""
        return f"{self.site.file}:{self.site.begin[0]} {self.operator}"

    @property
    def breaks(self) -> str:
        """What it changes."""
        return " ".join(f"{self.old} -> {self.new}".split())

    def apply(self, code: Code) -> dict[str, str]:
        """The file that has it, with it."""
        return code.changed([(self.site, self.new)])


def draw(code: Code, root: Path, count: int, seed: int) -> list[Sampled]:
    """``count`` changes; the same for the same code and seed."""
    found = [
        (Site(file, (node,)), operator, new)
        for file, tree in sorted(code.trees.items())
        if file.startswith(PACKAGES)
        for node, operator, new in changes(tree)
    ]
    drawn = random.Random(seed).sample(found, min(count, len(found)))
    tests = {path: path.read_text(encoding="utf-8") for path in sorted((root / "tests/core").rglob("test_*.py"))}
    return [
        Sampled(site, new, operator, site.split(code.texts[site.file])[1], _first_to_look(site.file, root, tests))
        for site, operator, new in drawn
    ]


def _first_to_look(file: str, root: Path, tests: dict[Path, str]) -> tuple[str, ...]:
    """The file's own test module, or else those that import it."""
    module, path = file.removesuffix(".py").replace("/", "."), Path(file)
    own = root / "tests/core" / path.relative_to("kvtier").with_name(f"test_{path.name}")
    chosen = [own] if own in tests else [test for test, text in tests.items() if module in text]
    return tuple(test.relative_to(root).as_posix() for test in chosen) or ANY


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    """Every node within a function that an operator changes, which one, and what it makes of the node."""
    for node in _live(tree, within=False):
        match node:
            case ast.Compare(ops=[op]) if type(op) in SWAPPED:
                other = ast.Compare(node.left, [SWAPPED[type(op)]()], node.comparators)
                yield node, "comparison", ast.unparse(other)
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                yield node, "off_by_one", str(number + 1)
            case ast.BoolOp(op=op, values=values):
                yield (
                    node,
                    "and_or",
                    ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)),
                )
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield node, "left_out", "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield node, "left_out", "pass"
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test, "negated", f"not ({ast.unparse(node.test)})"


def _live(node: ast.AST, within: bool) -> Iterator[ast.AST]:
    """What runs, within functions: no annotations, no decorators, nothing idle."""
    for name, value in ast.iter_fields(node):
        if name in ("decorator_list", "annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_idle(child):
                if within:
                    yield child
                yield from _live(child, within or isinstance(child, FUNCTIONS))


def _is_idle(node: ast.AST) -> bool:
    """Whether no change of it can be seen: ``IDLE``, and reading ahead."""
    match node:
        case ast.FunctionDef(name=name) | ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name == "__repr__" or name.startswith("prefetch")
    return isinstance(node, IDLE)
