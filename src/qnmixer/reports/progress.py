"""Progress while something runs: a bar at the bottom of a terminal, elsewhere whole lines at intervals."""

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
"""Seconds between two lines: at first, and in a long run."""
_REDRAW = 0.1  # seconds between two drawings of a bar


def takes_a_bar(console: Console) -> bool:
    """Whether a bar can be drawn there. FORCE_COLOR makes rich take a file for a terminal, so the file is asked."""
    return console.is_interactive and console.file.isatty() and not console.quiet


class Pace:
    """Tells when the next line is due: after 10 s, later after a tenth of the time so far, at most after 60 s."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def due(self) -> bool:
        """Whether a line is due; then it counts as printed."""
        now = time.monotonic()
        if now - self._last < min(LONGEST, max(SHORTEST, (now - self._start) / 10)):
            return False
        self._last = now
        return True

    def printed(self) -> None:
        """Count from now: a line was printed, due or not."""
        self._last = time.monotonic()


class Bar:
    """One line at the bottom of a terminal, which all that is printed goes above. `end` takes it away.

    rich has such a bar too. Three things are different here. A W&B logger of the user's own, which keeps what is
    printed, does not see this one: it would keep the control characters. No thread draws it: data workers are forked,
    with the lock of such a thread. The cursor stays visible, so a run that is killed leaves a terminal in order.

    Args:
        console: of a terminal: see `takes_a_bar`.
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
        """Whether to draw it again: ten times a second is enough."""
        return time.monotonic() - self._last > _REDRAW

    def draw(self, before: str, after: str, done: float, total: float | None) -> None:
        """Draw it: words, how much is done, words. Without a total there is none but the words."""
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
        """Write a text above it."""
        self._clear()
        n_written = stream.write(text)
        stream.flush()
        self._mid_line = not text.endswith("\n")
        self._redraw()
        return n_written

    def end(self) -> None:
        """Take it away."""
        self._clear()
        self._line = ""
        if (sys.stdout, sys.stderr) == self._above:
            sys.stdout, sys.stderr = self._streams

    def _clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write("\r\x1b[2K")

    def _redraw(self) -> None:
        if self._line and not self._mid_line:  # or it would stand in a line that is to go on
            self._is_drawn = True
            self._write(f"\r\x1b[2K{self._line}")

    def _write(self, text: str) -> None:
        """Past `write` of the stream, which such a logger listens to."""
        self._terminal.buffer.write(text.encode(self._terminal.encoding, "replace"))
        self._terminal.flush()


class _Above:
    """A stream whose text goes above a bar."""

    def __init__(self, stream: TextIO, bar: Bar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        return self._bar.print(text, self._stream) if text else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def progress(items: Collection[T] | DataLoader[T], doing: str, unit: str, console: Console) -> Iterator[T]:
    """Each of some items, with a bar on a terminal and lines in a log; a quiet console shows neither."""
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
