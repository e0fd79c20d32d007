"""A table, its renderers (terminal, Markdown, CSV, HTML), and the numbers in its cells."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from qnmixer.errors import visible


@dataclass
class Table:
    """Rows as long as the headings, a title, and a note below them. All cells are texts, but of a table for `csv`."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    note: str = ""

    def terminal(self, words: int = 1, **look: Any) -> RichTable:
        """For a rich console. The first `words` columns are aligned left, numbers right; `look`: rich's options."""
        table = RichTable(**{"title": self.title, "caption": self.note, "title_justify": "left"} | look)
        for number, heading in enumerate(self.headings):
            table.add_column(Text(visible(heading, keep="\n")), justify="left" if number < words else "right")
        for row in self.rows:
            table.add_row(*(Text(visible(cell, keep="\n")) for cell in row))
        return table

    def markdown(self, title: str = "**{}**") -> str:
        """The title in this form, the rows, and the note, without a newline at the end."""
        escaped = ([visible(cell).replace("|", "\\|") for cell in row] for row in (self.headings, *self.rows))
        head, *lines = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in escaped)
        body = "\n".join([head, f"|{'---|' * len(self.headings)}", *lines])
        return "\n\n".join(filter(None, (self.title and title.format(self.title), body, self.note)))

    def csv(self) -> str:
        """Headings and rows. A text that a spreadsheet would read as a formula gets a ' before it."""
        stream = io.StringIO()
        lines = ([_unlike_a_formula(cell) for cell in row] for row in (self.headings, *self.rows))
        csv.writer(stream, lineterminator="\n").writerows(lines)
        return stream.getvalue()

    def html(self, escape: Callable[[str], str]) -> str:
        """A section of a page, whose first column has the names of the rows. `escape` makes a text safe for HTML."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.headings)
        body = "\n".join(
            f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
            for name, *cells in self.rows
        )
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<section class="table"><h2>{escape(self.title)}</h2><div class="wide" tabindex="0">\n'
            f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>{note}</section>"
        )


def _unlike_a_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or not (cell := visible(cell)).startswith(("=", "+", "-", "@")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


NOTHING = "–"
"""The cell of a value that is not known."""


def in_digits(value: float | None, deviation: float | None = None, reference: float | None = None) -> str:
    """A value as text: "30.12", "34.13 ± 0.52"; "–" for None. A value below 1 has four digits: "0.04321".

    `reference`: the value whose size gives the decimals, if it is another one.
    """
    if value is None:
        return NOTHING
    size = abs(value if reference is None else reference)
    decimals = 3 - math.floor(math.log10(size)) if 0 < size < 1 else 2
    return f"{value:.{decimals}f}" + ("" if deviation is None else f" ± {deviation:.{decimals}f}")
