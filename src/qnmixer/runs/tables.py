"""A table, its renderers (terminal, Markdown, CSV, HTML), and the numbers in its cells."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import ConsoleOptions
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

    def terminal(self, words: int = 1, **look: Any) -> "OnATerminal":
        """For a rich console. The first `words` columns are aligned left, numbers right; `look`: rich's options."""
        return OnATerminal(self, words, look)

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


@dataclass
class OnATerminal:
    """A table for a rich console. One that is too wide is printed in parts, so that no number is broken."""

    table: Table
    words: int  # columns that all parts have
    look: dict[str, Any]

    def __rich_console__(self, _: Any, options: ConsoleOptions) -> Iterator[RichTable]:
        table, numbers = self.table, range(len(self.table.headings))
        is_wide = sum(self._width(n, whole=True) + _BESIDE_A_CELL for n in numbers) >= options.max_width
        parts = self._parts(options.max_width) if is_wide else [[*numbers]]
        for n, columns in enumerate(parts):
            title, note = table.title * (n == 0), table.note * (n == len(parts) - 1)
            printed = RichTable(**{"title": title, "caption": note, "title_justify": "left"} | self.look)
            for number in columns:
                is_fixed = number >= self.words and is_wide
                heading, width = Text(_visible_text(table.headings[number])), self._width(number) if is_fixed else None
                printed.add_column(heading, justify="left" if number < self.words else "right", width=width)
            for row in table.rows:
                printed.add_row(*(Text(_visible_text(row[number])) for number in columns))
            yield printed

    def _parts(self, width: int) -> list[list[int]]:
        """The columns of each part, for a console of this width. Words may be broken, and have half of it at most."""
        first, parts, room = [*range(self.words)], list[list[int]](), 0
        for number in range(self.words, len(self.table.headings)):
            needed = self._width(number) + _BESIDE_A_CELL
            if needed > room:
                parts.append([*first])
                room = width - 1 - min(sum(self._width(column) + _BESIDE_A_CELL for column in first), width // 2)
            parts[-1].append(number)
            room -= needed
        return parts or [first]

    def _width(self, number: int, whole: bool = False) -> int:
        """The cells of a column as they are, and the whole heading, or the longest word of it."""
        cells = [line for row in self.table.rows for line in _visible_text(row[number]).split("\n")]
        heading = _visible_text(self.table.headings[number])
        return max(map(cell_len, [*cells, *(heading.split("\n") if whole else heading.split()), ""]))


_BESIDE_A_CELL = 3  # letters of its padding and of a border


def _visible_text(cell: str) -> str:
    return visible(cell, keep="\n")


def _unlike_a_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or not (cell := visible(cell)).startswith(("=", "+", "-", "@")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


NOTHING = "–"  # the cell of a value that is not known


def in_digits(value: float | None, deviation: float | None = None, reference: float | None = None) -> str:
    """A value as text: "30.12", "34.13 ± 0.52"; "–" for None. A value below 1 has four digits: "0.04321".

    `reference`: the value whose size gives the decimals, if it is another one.
    """
    if value is None:
        return NOTHING
    size = abs(value if reference is None else reference)
    decimals = 3 - math.floor(math.log10(size)) if 0 < size < 1 else 2
    return f"{value:.{decimals}f}" + ("" if deviation is None else f" ± {deviation:.{decimals}f}")
