"""What a reader has to hold in mind: ``python tools/house.py [ROOT]``, of a checkout or an unpacked ``git archive``.

Prints, for kvtier/ and runner/: files, lines, lines of code (no docstrings, comments or empty lines), entries at the
top, arrows between rooms, circles, and functions with more than nine parameters, ``self`` not counted. A room is an
entry at the top. An arrow leads from a room to another one that some module of it imports, in a function too. A circle
is a set of modules that import each other, in whatever roundabout way. Then the words of the top documents.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MOST_PARAMETERS = 9
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Lines with code that is no docstring."""
    said = set[int]()
    for node in ast.walk(ast.parse(text)):
        for part in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                said |= {*range(part.lineno, (part.end_lineno or part.lineno) + 1)}
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - said)


def crowded(text: str) -> Iterator[str]:
    """Functions with more than ``MOST_PARAMETERS``, with their number."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
            count = len(names) + len(given.kwonlyargs) + bool(given.vararg) + bool(given.kwarg)
            count -= bool(names) and names[0] in ("self", "cls")
            if count > MOST_PARAMETERS:
                yield f"{node.name} {count}"


def imports(text: str, names: set[str], only_at_import: bool) -> Iterator[str]:
    """The modules among ``names`` that a module imports."""
    left: list[tuple[ast.AST, bool]] = [(node, True) for node in ast.parse(text).body]
    while left:
        node, at_import = left.pop()
        if isinstance(node, ast.Import) and (at_import or not only_at_import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and (at_import or not only_at_import):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from [full] if full in names else [str(node.module)] if node.module in names else ()
        inside = at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        left += [
            (child, inside) for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler))
        ]


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Sets of names that lead to each other."""
    reached, before = {name: {name} for name in arrows}, 0
    while (now := sum(map(len, reached.values()))) > before:
        before = now
        for name, goals in arrows.items():
            reached[name] |= {further for goal in goals for further in reached[goal]}
    sets = {frozenset(b for b in reached[a] if a in reached[b]) for a in arrows}
    return sorted(sorted(one) for one in sets if len(one) > 1)


def look(root: Path, package: str) -> None:
    """Prints the figures of one package."""
    texts = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = [package, *path.relative_to(root / package).with_suffix("").parts]
        texts[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    lines, code = sum(text.count("\n") for text in texts.values()), sum(map(code_lines, texts.values()))
    top = [path for path in (root / package).iterdir() if path.is_file() or any(path.rglob("*.py"))]
    print(f"{package}: {len(texts)} files, {lines:,} lines, {code:,} of them code; {len(top)} entries at the top")
    own = {name for name in texts if name != package and not name.endswith("__main__")}  # the facade names all rooms
    for when, only in (("at import", True), ("calls included", False)):
        arrows = {name: {*imports(texts[name], own, only)} - {name} for name in own}
        rooms = {(room(a), room(b)) for a, goals in arrows.items() for b in goals if room(a) != room(b)}
        found = circles(arrows)
        print(f"  {when}: {len(rooms)} arrows between rooms, {len(found)} circles", *found)
    over = [each for text in texts.values() for each in crowded(text)]
    print(f"  {len(over)} functions with more than {MOST_PARAMETERS} parameters:", ", ".join(over))


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


if __name__ == "__main__":
    here = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for each in ("kvtier", "runner"):
        look(here, each)
    pages = [page for page in (*here.glob("*.md"), *(here / "docs").glob("*.md")) if page.stem != "CODE_OF_CONDUCT"]
    print(
        f"{sum(len(page.read_text(encoding='utf-8').split()) for page in pages):,} words in {len(pages)} top documents"
    )
