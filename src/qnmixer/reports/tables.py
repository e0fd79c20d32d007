"""Tables: CSV for programs, Markdown and the terminal for people."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.]+([eE][+-]?\d+)?( ± [\d.]+)?$)")  # a number is none


def csv_table(rows: Iterable[Sequence[Any]]) -> str:
    """Rows, the headings first, as CSV; text that a spreadsheet would compute begins with an apostrophe."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(map(_harmless, row) for row in rows)
    return stream.getvalue()


def _harmless(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def terminal_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, **look: Any) -> Table:
    """A table for a rich console; its first `words` columns to the left, figures to the right; `look`: rich's."""
    table = Table(title_justify="left", **look)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a newline at its end."""
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in (headings, *rows))
    first, *others = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in escaped)
    return "\n".join([first, f"|{'---|' * len(headings)}", *others])
