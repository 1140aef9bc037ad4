"""What commands print on a terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from runner.display.tables import print_text

VERDICT = "S0's second answer equals its first and is right; first token after 0.03 s instead of 17.73 s: 519x sooner, "
VERDICT += "of 3.25 GiB in 90,112 tokens."


@pytest.mark.parametrize("width", range(20, 130))
def test_a_number_and_its_unit_stay_on_one_line(width: int) -> None:
    console = Console(width=width, record=True)
    print_text(console, VERDICT, style="bold")
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    assert " ".join(line.strip() for line in lines) == VERDICT
    for pair in ("0.03 s", "17.73 s", "3.25 GiB", "90,112 tokens"):
        assert any(pair in line for line in lines), (pair, lines)


def test_an_empty_line_and_brackets_are_printed_as_they_are() -> None:
    console = Console(width=40, record=True)
    for text in ("", "pip install 'kvtier[plot]' [red]"):
        print_text(console, text)
    assert console.export_text() == "\npip install 'kvtier[plot]' [red]\n"
