"""Docstrings as pages show them: a griffe extension (mkdocs.yml names this file).

Promises   lists of the house's form, a name in double backticks, two spaces or more and what it means, become
           definition lists. Names of classes that the reference shows become links to them. What is there for audits
           alone is left out. All other text is Markdown already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"

_ENTRY = re.compile(r"(?P<indent> *)(?P<names>``[^`]+``(?:, ``[^`]+``)*) {2,}(?P<text>\S.*)")


class HouseDocstrings(Extension):
    """Reads each docstring once, after its module has been read."""

    def __init__(self) -> None:
        pages = "".join(page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
        self._shown = {path.split(".")[-1]: path for path in re.findall(r"^::: ([\w.]+\.[A-Z]\w+)$", pages, re.M)}
        """The classes that pages show, and their full names."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites its docstring."""
        if obj.docstring is not None and "for auditing" in obj.docstring.value:
            obj.docstring = None  # mkdocstrings shows nothing without one
        elif obj.docstring is not None:
            text = "\n".join(_listed(obj.docstring.value.splitlines()))
            obj.docstring.value = re.sub(r"(?<!`)``(\w+)``(?!`)", self._linked, text)

    def _linked(self, found: re.Match[str]) -> str:
        there = self._shown.get(found[1])
        return f"[`{found[1]}`][{there}]" if there else found[0]


def _listed(lines: list[str]) -> Iterator[str]:
    indent = -1  # of the list that we are in
    for line in lines:
        entry = _ENTRY.fullmatch(line)
        if entry:
            indent = len(entry["indent"])
            yield from ("", entry["names"], f":   {entry['text']}")
        elif indent >= 0 and line.strip() and len(line) - len(line.lstrip()) > indent:
            yield f"    {line.strip()}"
        else:
            if indent >= 0 and line.strip():
                yield ""
            indent = -1
            yield line
