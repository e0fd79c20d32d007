"""What people read on a terminal: a console, and progress (a bar, or lines in a log)."""

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import rich.console
import rich.progress
from rich.progress import BarColumn, TextColumn
from rich.table import Column
from rich.text import Text

from qnmixer.errors import visible


class Console(rich.console.Console):
    """A console that shows names as they are: brackets are no markup, and control characters are escapes.

    In a Jupyter kernel it prints to sys.stdout too, so that a user can redirect it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, force_jupyter=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does. Texts may have several lines."""
        return super().render_str(visible(text, keep="\n"), **options)

    def lines(self, *lines: str) -> None:
        """Print lines as they are: a terminal breaks the long ones, and no number has a colour."""
        self.print(*lines, sep="\n", highlight=False, soft_wrap=True)

    def warn(self, line: str, style: str = "") -> None:
        """Print one line that begins with "warning:"."""
        self.print(f"warning: {visible(line)}", style=style, highlight=False, soft_wrap=True)


T = TypeVar("T")


def progress(items: Iterable[T], total: int, doing: str, unit: str, console: Console) -> Iterator[T]:
    """Iterate over so many items, with a bar on a terminal and lines in a log. A quiet console shows neither."""
    bar = Progress(console)
    try:
        for n, item in enumerate(items):
            if bar.is_due():
                bar.show(doing, f"{unit} {n + 1} of {total}", n, total)
            yield item
    finally:
        bar.end()


SECONDS_TO_LINE, SECONDS_TO_DRAWING = 20.0, 0.1


class Progress:
    """One bar of rich's at the bottom of a terminal, below all printed lines; in a log a line every 20 seconds.

    No thread draws the bar: data workers are forked, and would inherit the lock of such a thread. The cursor stays
    visible, so a killed run leaves the terminal usable.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, time.monotonic()
        # FORCE_COLOR makes rich treat a file as a terminal, so this asks the file itself.
        self._draws = console.is_interactive and console.file.isatty() and not console.quiet
        self._bar = rich.progress.Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, note="")

    def is_due(self) -> bool:
        """Whether it is time for the next line, or to draw the bar again."""
        return time.monotonic() - self._last >= (SECONDS_TO_DRAWING if self._draws else SECONDS_TO_LINE)

    def show(self, label: str, note: str, completed: float, total: float | None) -> None:
        """Show text, a bar, text; in a log the texts. The bar of an unknown total moves back and forth."""
        self._last, label, note = time.monotonic(), visible(label), visible(note)
        if not self._draws:
            self._console.print(" · ".join(filter(None, (label, note))), highlight=False, soft_wrap=True)
            return
        self._bar.update(self._task, description=label, note=note, completed=completed, total=total, refresh=True)
        if not self._bar.live.is_started:
            self._bar.start()
            self._console.show_cursor(True)
            self._console.soft_wrap = True  # else rich would break long lines of others

    def end(self) -> None:
        """Remove the bar. `show` begins another one."""
        if self._bar.live.is_started:
            self._bar.stop()
            self._console.soft_wrap = False
