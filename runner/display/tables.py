"""Tables and sentences for a terminal of any width.

Promises   nothing is cut off: a table that is wider than the terminal is printed as lines of "name: value". A number
           and its unit stay on one line.
"""

from __future__ import annotations

import re
import textwrap

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000
_TOGETHER = re.compile(r"(?<=\d) (?=(?:[KMGTP]?i?B|[kMGTP]|m?s|GB/s|[GTP]FLOPs?|tokens|blocks)\b)")
_HARD_SPACE = "\u00a0"


def plain_table(title: str, text: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """A plain table: text columns to the left, numbers right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in text:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """The table if the console is wide enough for it, else a block of lines for each row."""
    anywhere = console.options.update(width=_ANY_WIDTH)
    if console.measure(table, options=anywhere).maximum <= console.width:
        console.print(table, highlight=False)
        return
    console.print(Text.from_markup(str(table.title), style="bold"), "")
    names = [" ".join(str(column.header).split()) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for i, (name, value) in enumerate(zip(names, row, strict=True)):
            line = f"{name}: {value}" if name else str(value)
            if value:
                console.print(Padding(Text.from_markup(line), (0, 0, 0, 2 if i else 0)))
        console.print()


def print_text(console: Console, text: str, style: str = "") -> None:
    """Plain text, without markup; a line ends between words, and not between a number and its unit."""
    whole = _TOGETHER.sub(_HARD_SPACE, text)
    lines = textwrap.wrap(whole, console.width, break_on_hyphens=False) or [""]
    for line in lines:
        console.print(Text(line.replace(_HARD_SPACE, " "), style=style), highlight=False)
