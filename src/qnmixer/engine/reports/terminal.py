"""What people read: tables (terminal, Markdown, CSV), the numbers in them, and progress (a bar, or lines in a log)."""

import csv
import io
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from qnmixer.errors import visible

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


# The console


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


# Tables


@dataclass
class Table:
    """A table of texts. Each row is as long as the headings; its first cell is its name."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


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


# Numbers

NOTHING = "–"
"""The cell of a value that is not known."""


def in_digits(value: float | None, deviation: float | None = None, of: float | None = None, sign: str = "") -> str:
    """A value as text: "30.12", "0.04321", "34.13 ± 0.52"; "–" for None.

    `of`: the value whose size gives the decimals, if it is another one. `sign`: "+" shows that of a positive value.
    """
    if value is None:
        return NOTHING
    decimals = decimals_of(value if of is None else of)
    return f"{value:{sign}.{decimals}f}" + ("" if deviation is None else f" ± {deviation:.{decimals}f}")


def decimals_of(value: float) -> int:
    """Decimals that show a value: 2, or as many as 4 digits of a smaller one need."""
    size = abs(value)
    return 3 - math.floor(math.log10(size)) if 0 < size < 1 else 2


# Progress

T = TypeVar("T")


def progress(items: "Collection[T] | DataLoader[T]", doing: str, unit: str, console: Console) -> Iterator[T]:
    """Iterate over items, with a bar on a terminal and lines in a log. A quiet console shows neither."""
    bar = Bar(console) if takes_a_bar(console) else None
    pace, total = Pace(), len(items)
    try:
        for n, item in enumerate(items):
            if bar is not None and bar.is_due():
                bar.draw(doing, f"{unit} {n + 1} of {total}", n, total)
            yield item
            if bar is None and pace.due():
                console.print(f"{doing}: {unit} {n + 1} of {total} done", highlight=False, soft_wrap=True)
    finally:
        if bar is not None:
            bar.end()


def takes_a_bar(console: Console) -> bool:
    """Whether a bar can be drawn. FORCE_COLOR makes rich treat a file as a terminal, so this asks the file itself."""
    return console.is_interactive and console.file.isatty() and not console.quiet


SHORTEST_PAUSE, LONGEST_PAUSE = 10.0, 60.0
"""Seconds between two lines of progress: at the start, and in a long run."""


class Pace:
    """Decides when the next line is due: after 10 s, later after a tenth of the elapsed time, 60 s at most."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def due(self) -> bool:
        """Whether a line is due. If so, it counts as printed."""
        now = time.monotonic()
        if now - self._last < min(LONGEST_PAUSE, max(SHORTEST_PAUSE, (now - self._start) / 10)):
            return False
        self._last = now
        return True

    def printed(self) -> None:
        """Start to count from now: a line was printed, even if none was due."""
        self._last = time.monotonic()


_REDRAW = 0.1  # seconds between two drawings of a bar


class Bar:
    """One line at the bottom of a terminal. rich puts all printed lines above it. `end` removes it.

    No thread draws it: data workers are forked, and would inherit the lock of such a thread. The cursor stays visible,
    so a killed run leaves the terminal usable.

    Args:
        console: of a terminal, see `takes_a_bar`.
    """

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._last = 0.0
        self._live.start()
        console.show_cursor(True)
        self._soft_wrap, console.soft_wrap = console.soft_wrap, True  # else rich would cut long lines of others

    def is_due(self) -> bool:
        """Whether to draw it again. Ten times a second is enough."""
        return time.monotonic() - self._last > _REDRAW

    def draw(self, before: str, after: str, done: float, total: float | None) -> None:
        """Draw the line: text, the bar, text. Without a total there is only text."""
        self._last = time.monotonic()
        line = RichTable.grid(expand=True, padding=(0, 1, 0, 0))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        middle: Any = "" if total is None else ProgressBar(max(total, 1), done)
        line.add_row(Text(before), middle, Text(after))
        self._live.update(line, refresh=True)

    def end(self) -> None:
        """Remove the bar."""
        self._live.stop()
        self._live.console.soft_wrap = self._soft_wrap
