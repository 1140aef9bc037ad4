"""Docstrings as pages show them: a griffe extension (mkdocs.yml names this file).

Promises   lists of the house's form, a name in double backticks, two spaces or more and what it means, become
           definition lists. All other text is Markdown already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension, Object

_ENTRY = re.compile(r"(?P<indent> *)(?P<names>``[^`]+``(?:, ``[^`]+``)*) {2,}(?P<text>\S.*)")


class HouseDocstrings(Extension):
    """Reads each docstring once, after its module has been read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites its docstring."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(_listed(obj.docstring.value.splitlines()))


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
