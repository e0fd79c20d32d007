"""Tables: CSV for programs, Markdown and the terminal for people."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def csv_table(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV, headings first. A text that a spreadsheet would read as a formula gets a ' before it."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([_unlike_a_formula(cell) for cell in row] for row in rows)
    return stream.getvalue()


def _unlike_a_formula(cell: Any) -> Any:
    if not (isinstance(cell, str) and cell.startswith(("=", "+", "-", "@"))):
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


def in_digits(value: float) -> str:
    """A value as text: "30.12", "0.04321"."""
    return f"{value:.{decimals_of(value)}f}"


def terminal_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, **look: Any) -> Table:
    """A table for a rich console. The first `words` columns are aligned left, numbers right; `look`: rich's options."""
    table = Table(title_justify="left", **look)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a newline at its end."""
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in (headings, *rows))
    first, *others = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in escaped)
    return "\n".join([first, f"|{'---|' * len(headings)}", *others])
