"""Show progress: a bar at the bottom of a terminal, and whole lines at intervals in a log."""

import time
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch.utils.data import DataLoader

T = TypeVar("T")
SHORTEST, LONGEST = 10.0, 60.0
"""Seconds between two lines: at the start, and in a long run."""
_REDRAW = 0.1  # seconds between two drawings of a bar


def takes_a_bar(console: Console) -> bool:
    """Whether a bar can be drawn. FORCE_COLOR makes rich treat a file as a terminal, so this asks the file itself."""
    return console.is_interactive and console.file.isatty() and not console.quiet


class Pace:
    """Decides when the next line is due: after 10 s, later after a tenth of the elapsed time, 60 s at most."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def due(self) -> bool:
        """Whether a line is due. If so, it counts as printed."""
        now = time.monotonic()
        if now - self._last < min(LONGEST, max(SHORTEST, (now - self._start) / 10)):
            return False
        self._last = now
        return True

    def printed(self) -> None:
        """Start to count from now: a line was printed, even if none was due."""
        self._last = time.monotonic()


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
        line = Table.grid(expand=True, padding=(0, 1, 0, 0))
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


def progress(items: Collection[T] | DataLoader[T], doing: str, unit: str, console: Console) -> Iterator[T]:
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
