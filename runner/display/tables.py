"""Tables for a terminal of any width.

Promises   nothing is cut off: a table that is wider than the terminal is printed as lines of "name: value".
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000


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
