import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from qnmixer.runs import terminal as module
from qnmixer.runs.tables import Table
from qnmixer.runs.terminal import Console

from ..pages import STUDIES

SRC = Path(__file__).resolve().parents[2] / "src"


def test_markdown_escapes_bars() -> None:
    assert Table(["a", "b"], [["1", "x|y"]]).markdown() == "| a | b |\n|---|---|\n| 1 | x\\|y |"
    assert Table(["a"], [["x\ny\x1b"]]).markdown() == "| a |\n|---|\n| x\\ny\\x1b |"
    assert Table(["", ""], [["1", ""]]).markdown() == "| | |\n|---|---|\n| 1 | |"


def test_a_terminal_has_words_left_and_figures_right_as_they_are() -> None:
    console = Console(width=40)
    with console.capture() as capture:
        console.print(Table(["name", "value"], [["[red]", "9"], ["b", "1234"]]).terminal(box=None))
    assert [line.rstrip() for line in capture.get().splitlines()[1:]] == [" [red]      9", " b       1234"]


def test_a_table_that_is_too_wide_is_printed_in_parts() -> None:
    headings, cells = ["method", *(f"a long heading {n}" for n in range(6))], ["12.34 ± 0.56"] * 6
    console = Console(width=60)
    with console.capture() as capture:
        console.print(Table(headings, [["a method of many words", *cells]], "title", "note").terminal())
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 60
    assert [text.count(part) for part in ("12.34 ± 0.56", "title", "note")] == [6, 1, 1]
    assert text.count("a method of many words") == 3


def test_a_name_is_no_formula_of_a_spreadsheet() -> None:
    rows = [["=1+1.npy", -3.5], ["-1", "+2.5"], ["@a", "-b"], ["\t=1+1", "a\r=1+1"]]
    assert Table(["name", "psnr"], rows).csv() == "name,psnr\n'=1+1.npy,-3.5\n-1,+2.5\n'@a,'-b\n\\t=1+1,a\\r=1+1\n"


def test_a_notebook_can_silence_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Jupyter kernel rich sends its lines past sys.stdout."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    console = Console()
    with redirect_stdout(StringIO()) as silenced:
        console.print("a line")
    assert silenced.getvalue() == "a line\n"


def test_a_log_has_whole_lines_and_a_quiet_console_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/promises has the bar on a real terminal."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for quiet in (False, True):
        console = Console(file=StringIO(), quiet=quiet, width=20)
        for _ in module.progress(range(5), 5, "evaluating", "batch", console):
            now[0] += 0.6 * module.SECONDS_TO_LINE
        assert isinstance(console.file, StringIO)
        lines = "evaluating · batch 3 of 5\nevaluating · batch 5 of 5\n"
        assert console.file.getvalue() == ("" if quiet else lines)


def test_every_console_shows_names_as_they_are() -> None:
    """Paths have brackets, which are markup to rich, and may have control characters, which it passes on."""
    paths = (path for root in (SRC, STUDIES) for path in root.rglob("*.py"))
    built = [path for path in paths if re.search(r"\bConsole\(", path.read_text())]
    assert len(built) > 5
    assert [path for path in built if "rich.console import Console" in path.read_text()] == []
    console = Console(width=60)
    with console.capture() as capture:
        console.print("[red]\x1b[2Ja\n[/b]\x9b", Table(["\x1b"], [["a\x1b]0;x\x07"]]).terminal())
    assert capture.get().startswith("[red]\\x1b[2Ja\n[/b]\\x9b")
    assert "\\x1b]0;x\\x07" in capture.get()
    assert not {"\x1b", "\x9b", "\x07"} & {*capture.get()}
