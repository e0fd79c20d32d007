"""Progress in a log. tests/promises has the bar on a real terminal."""

import io

import pytest
from rich.console import Console

from qnmixer.runs import terminal as module
from qnmixer.runs.terminal import SECONDS_TO_LINE, progress


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
