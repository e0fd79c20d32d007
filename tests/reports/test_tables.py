import re
from pathlib import Path

from rich.console import Console

from qnmixer.engine.reports.tables import csv_table, markdown_table, terminal_table

SRC = Path(__file__).resolve().parents[2] / "src"


def test_csv_quotes_what_needs_it() -> None:
    assert csv_table([["a", "b"], [1, "x,y"], [None, 'say "it"']]) == 'a,b\n1,"x,y"\n,"say ""it"""\n'


def test_markdown_escapes_bars() -> None:
    assert markdown_table(["a", "b"], [["1", "x|y"]]) == "| a | b |\n|---|---|\n| 1 | x\\|y |"
    assert markdown_table(["", ""], [["1", ""]]) == "| | |\n|---|---|\n| 1 | |"


def test_a_terminal_has_words_left_and_figures_right_as_they_are() -> None:
    console = Console(width=40)
    with console.capture() as capture:
        console.print(terminal_table(["name", "value"], [["[red]", "9"], ["b", "1234"]], box=None))
    assert [line.rstrip() for line in capture.get().splitlines()[1:]] == [" [red]      9", " b       1234"]


def test_a_name_is_no_formula_of_a_spreadsheet() -> None:
    rows = [["name", "psnr"], ["=1+1.npy", -3.5], ["-1", "+2.5"], ["@a", "-b"]]
    assert csv_table(rows) == "name,psnr\n'=1+1.npy,-3.5\n-1,+2.5\n'@a,'-b\n"


def test_no_console_takes_brackets_for_markup() -> None:
    """Paths and errors have brackets. rich leaves them out, or fails at [/…]."""
    calls = [call for path in SRC.rglob("*.py") for call in re.findall(r"\bConsole\((.*)", path.read_text())]
    assert len(calls) > 5
    assert [call for call in calls if "markup=False" not in call] == []
