"""Progress in a log, and the bar on a real terminal."""

import io
import re
import sys

import pytest
from rich.console import Console

from qnmixer.engine.reports import terminal as module
from qnmixer.engine.reports.terminal import SECONDS_TO_LINE, progress

from ..terminal import in_terminal


def test_a_log_has_whole_lines_and_a_quiet_console_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for quiet in (False, True):
        console = Console(file=io.StringIO(), quiet=quiet, width=20)
        for _ in progress(range(5), "evaluating", "batch", console):
            now[0] += 0.6 * SECONDS_TO_LINE
        assert isinstance(console.file, io.StringIO)
        lines = "evaluating · batch 3 of 5\nevaluating · batch 5 of 5\n"
        assert console.file.getvalue() == ("" if quiet else lines)


BAR = """
import sys, time, warnings
from rich.console import Console
from qnmixer.engine.reports import terminal
terminal.SECONDS_TO_DRAWING = 0.0
console = Console()
before = sys.stdout, sys.stderr
for n in terminal.progress(range(4), "counting", "number", console):
    if n == 1:
        console.print("a line of a console")
        print("a line", "of print")
        time.sleep(0.2)
        print("begun", end="")
    if n == 2:
        print(", and ended")
        warnings.warn("a warning that is longer than a line")
    time.sleep(0.02)
assert (sys.stdout, sys.stderr) == before
"""


def test_a_bar_stays_below_all_other_lines_and_is_gone_at_the_end() -> None:
    seen = in_terminal([sys.executable, "-c", BAR], columns=60)
    assert seen.code == 0, seen.text
    bars = [line for screen in seen.screens for line in screen.splitlines() if line.startswith("counting ")]
    assert [line for line in bars if not line.endswith(" of 4")] == []
    assert {line.split()[-3] for line in bars} == {"1", "2", "3", "4"}
    assert any(re.search(r"of print\ncounting .* 2 of 4$", screen) for screen in seen.screens)  # at once, below it
    assert all(len(line) <= 60 for line in bars)
    lines = seen.text.splitlines()
    assert lines[:3] == ["a line of a console", "a line of print", "begun, and ended"]
    assert lines[3].endswith("UserWarning: a warning that is longer than a line")
    assert "counting" not in seen.text
