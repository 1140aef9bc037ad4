"""Where a fragment of Python stands in the packages, and the text of a file in which another has taken its place.

A fragment is found by structure: its syntax tree occurs exactly once in the functions of a name, wherever they are and
however they are formatted. A file keeps the rest of its text.

A place is the end of a qualified name: ``leave``, ``Coordinator.leave``, ``coordinator.coordinator.Coordinator.leave``.
It means functions; if none has that name, classes; if no class has either, modules.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
KINDS: tuple[tuple[type[ast.AST], ...], ...] = (FUNCTIONS, (ast.ClassDef,), (ast.Module,))
PACKAGES = ("kvtier", "runner")


class NotFound(ValueError):
    """A fragment is not in its place, or is there more than once."""


@dataclass(frozen=True)
class Site:
    """An expression of a file, or statements that follow each other."""

    file: str
    nodes: tuple[ast.AST, ...]

    @property
    def begin(self) -> tuple[int, int]:
        """Line, and bytes before it in the line."""
        first = self.nodes[0]
        decorators = getattr(first, "decorator_list", [])
        return (decorators[0] if decorators else first).lineno, first.col_offset

    @property
    def end(self) -> tuple[int, int]:
        """The same of the first byte behind it."""
        return self.nodes[-1].end_lineno, self.nodes[-1].end_col_offset

    def split(self, text: str) -> tuple[str, str, str]:
        """What the file says before it, there and behind it."""
        lines = text.encode().splitlines(keepends=True)
        begin, end = (sum(map(len, lines[: line - 1])) + column for line, column in (self.begin, self.end))
        return tuple(part.decode() for part in (text.encode()[:begin], text.encode()[begin:end], text.encode()[end:]))

    def with_other(self, text: str, new: str) -> str:
        """The file with ``new`` in its place."""
        before, _, behind = self.split(text)
        new = dedented(new)
        if isinstance(self.nodes[0], ast.expr):
            return f"{before}({new}){behind}"
        return before + new.replace("\n", "\n" + " " * self.begin[1]) + behind


class Code:
    """Python files by path: their text and their syntax trees."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = dict(texts)
        self.trees = {file: ast.parse(text) for file, text in texts.items()}
        self._named = [found for file, tree in self.trees.items() for found in _named(file, tree)]

    @classmethod
    def below(cls, root: Path) -> Code:
        """That of ``PACKAGES``."""
        files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
        return cls({file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files})

    def find(self, place: str, fragment: str) -> Site:
        """The one place that a fragment can mean; NotFound if there is none or another one."""
        named = [(file, node) for name, file, node in self._named if f".{name}".endswith(f".{place}")]
        there = next((t for kind in KINDS if (t := [(f, node) for f, node in named if isinstance(node, kind)])), [])
        wanted = parsed(fragment)
        sites = {id(site.nodes[0]): site for file, node in there for site in _equal(file, node, wanted)}
        if len(sites) != 1:
            raise NotFound(f"in {place} ({len(there)} of that name) occurs {len(sites)} times: {fragment}")
        (site,) = sites.values()
        if not _says(site, site.split(self.texts[site.file])[1]):
            raise NotFound(f"in {place} cannot be replaced (an elif, or within an f-string): {fragment}")
        return site

    def changed(self, edits: Iterable[tuple[Site, str]]) -> dict[str, str]:
        """The files in which these sites have given way to other fragments."""
        texts: dict[str, str] = {}
        for site, new in sorted(edits, key=lambda edit: edit[0].begin, reverse=True):  # positions before it stay
            texts[site.file] = site.with_other(texts.get(site.file, self.texts[site.file]), new)
        for file, text in texts.items():
            ast.parse(text, file)
        return texts


def dedented(fragment: str) -> str:
    """Without the indentation that it has in a list of mutations."""
    return textwrap.dedent(fragment).strip()


def parsed(fragment: str) -> list[ast.AST]:
    """An expression, or statements."""
    body = ast.parse(dedented(fragment)).body
    return [body[0].value] if len(body) == 1 and isinstance(body[0], ast.Expr) else list(body)


def _named(file: str, tree: ast.Module) -> Iterator[tuple[str, str, ast.AST]]:
    """The module, its classes and its functions with their qualified names."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def below(prefix: str, node: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                yield f"{prefix}.{child.name}", file, child
                yield from below(f"{prefix}.{child.name}", child)
            else:
                yield from below(prefix, child)

    yield module, file, tree
    yield from below(module, tree)


def _equal(file: str, within: ast.AST, wanted: Sequence[ast.AST]) -> Iterator[Site]:
    """Where these nodes stand in a definition. An expression that is a whole statement is found as the statement."""
    dumps = [ast.dump(node) for node in wanted]
    nodes = list(ast.walk(within))
    whole = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(wanted[0], ast.expr):
            value = node.value if isinstance(node, ast.Expr) else node
            if type(value) is type(wanted[0]) and id(node) not in whole and ast.dump(value) == dumps[0]:
                yield Site(file, (node,))
            continue
        for body in (value for _, value in ast.iter_fields(node) if isinstance(value, list)):
            for at in range(len(body) - len(dumps) + 1):
                run = body[at : at + len(dumps)]
                if type(run[0]) is type(wanted[0]) and [ast.dump(statement) for statement in run] == dumps:
                    yield Site(file, tuple(run))


def _says(site: Site, text: str) -> bool:
    """Whether a text is what stands there; positions of nodes are not always those of their text."""
    if isinstance(site.nodes[0], ast.expr):
        text = f"({text}\n)"
    elif site.begin[1]:
        text = f"if True:\n{' ' * site.begin[1]}{text}"
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    if isinstance(site.nodes[0], ast.expr):
        nodes: list[ast.AST] = [statement.value for statement in body if isinstance(statement, ast.Expr)]
    else:
        nodes = list(body[0].body) if site.begin[1] and isinstance(body[0], ast.If) else list(body)
    return [ast.dump(node) for node in nodes] == [ast.dump(node) for node in site.nodes]
