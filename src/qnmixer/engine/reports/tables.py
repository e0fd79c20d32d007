"""Tables and the numbers in them: CSV for programs, Markdown and the terminal for people."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import rich.console
from rich.table import Table as RichTable
from rich.text import Text

from qnmixer.errors import visible

NOTHING = "–"
"""The cell of a value that is not known."""


@dataclass
class Table:
    """A table of texts. Each row is as long as the headings; its first cell is its name."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


class Console(rich.console.Console):
    """A console that shows names as they are: brackets are no markup, and control characters are escapes.

    In a Jupyter kernel it prints to sys.stdout too, so that a user can redirect it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, force_jupyter=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does. Texts may have several lines."""
        return super().render_str(visible(text, keep="\n"), **options)

    def warn(self, line: str, style: str = "") -> None:
        """Print one line that begins with "warning:"."""
        self.print(f"warning: {visible(line)}", style=style, highlight=False, soft_wrap=True)


def csv_table(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV, headings first. A text that a spreadsheet would read as a formula gets a ' before it."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([_unlike_a_formula(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _unlike_a_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or not (cell := visible(cell)).startswith(("=", "+", "-", "@")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def decimals_of(value: float) -> int:
    """Decimals that show a value: 2, or as many as 4 digits of a smaller one need."""
    size = abs(value)
    return 3 - math.floor(math.log10(size)) if 0 < size < 1 else 2


def in_digits(value: float | None, deviation: float | None = None, of: float | None = None, sign: str = "") -> str:
    """A value as text: "30.12", "0.04321", "34.13 ± 0.52"; "–" for None.

    `of`: the value whose size gives the decimals, if it is another one. `sign`: "+" shows that of a positive value.
    """
    if value is None:
        return NOTHING
    decimals = decimals_of(value if of is None else of)
    return f"{value:{sign}.{decimals}f}" + ("" if deviation is None else f" ± {deviation:.{decimals}f}")


def terminal_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, **look: Any) -> RichTable:
    """A table for a rich console. The first `words` columns are aligned left, numbers right; `look`: rich's options."""
    table = RichTable(title_justify="left", **look)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*(Text(visible(cell, keep="\n")) for cell in row))
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a newline at its end."""
    escaped = ([visible(cell).replace("|", "\\|") for cell in row] for row in (headings, *rows))
    first, *others = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in escaped)
    return "\n".join([first, f"|{'---|' * len(headings)}", *others])
