"""Show progress: a bar at the bottom of a terminal, and whole lines at intervals in a log."""

import sys
import time
from collections.abc import Collection, Iterator
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console
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
    """One line at the bottom of a terminal. All printed text goes above it. `end` removes it.

    rich has such a bar too. Three things are different here. A user's W&B logger records all output, and would record
    control characters; it does not see this bar. No thread draws this bar: data workers are forked, and would inherit
    the lock of such a thread. The cursor stays visible, so a killed run leaves the terminal usable.

    Args:
        console: of a terminal, see `takes_a_bar`.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._terminal = cast(TextIO, console.file)
        self._line = ""
        self._is_drawn = self._mid_line = False
        self._last = 0.0
        self._streams = sys.stdout, sys.stderr
        self._above = tuple(cast(TextIO, _Above(stream, self)) for stream in self._streams)
        sys.stdout, sys.stderr = self._above

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
        middle = "" if total is None else ProgressBar(max(total, 1), done)
        line.add_row(Text(before), middle, Text(after))
        with self.console.capture() as drawn:
            self.console.print(line, width=self.console.width - 1, no_wrap=True)
        self._line = drawn.get().splitlines()[0]
        self._redraw()

    def print(self, text: str, stream: TextIO) -> int:
        """Write a text above the bar."""
        self._clear()
        n_written = stream.write(text)
        stream.flush()
        self._mid_line = not text.endswith("\n")
        self._redraw()
        return n_written

    def end(self) -> None:
        """Remove the bar."""
        self._clear()
        self._line = ""
        # Somebody else may have replaced the streams since, and still use them.
        if (sys.stdout, sys.stderr) == self._above:
            sys.stdout, sys.stderr = self._streams

    def _clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write("\r\x1b[2K")

    def _redraw(self) -> None:
        if self._line and not self._mid_line:  # a line that is not finished must not end in a bar
            self._is_drawn = True
            self._write(f"\r\x1b[2K{self._line}")

    def _write(self, text: str) -> None:
        """Write to the terminal directly, because W&B listens to the stream's `write`."""
        self._terminal.buffer.write(text.encode(self._terminal.encoding, "replace"))
        self._terminal.flush()


class _Above:
    """A stream whose text is written above a bar."""

    def __init__(self, stream: TextIO, bar: Bar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        return self._bar.print(text, self._stream) if text else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
