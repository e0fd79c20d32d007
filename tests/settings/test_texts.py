"""Texts of files that somebody else made reach a terminal without what would rule it."""

import io
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qnmixer.errors import say
from qnmixer.evaluate import evaluate
from qnmixer.reconstruct import reconstruct
from qnmixer.runs.records import write_sweep
from qnmixer.runs.sweeps import rows_of, write_report
from qnmixer.runs.tables import Table
from qnmixer.runs.terminal import Console, Progress

ODD = ["\x1b[2J\x1b]0;x\x07", "\x9b31m", "\u202eabc\u2066", "a\r\x08b"]


def is_plain(text: str) -> bool:
    return bool(text) and all(it.isprintable() or it == "\n" for it in text)


@pytest.mark.parametrize("odd", ODD)
def test_a_table_a_bar_and_a_line_show_escapes(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    console.print(Table([odd, "b"], [[odd, odd]], odd, odd).terminal())
    Progress(console).show(odd, odd, 1, 2)
    console.warn(odd)
    say(odd)
    assert is_plain(stream.getvalue())
    assert is_plain(capsys.readouterr().out)


@pytest.mark.parametrize("command", [evaluate, reconstruct])
@pytest.mark.parametrize("odd", [*ODD, "a\nerror: b"])
def test_the_first_line_of_a_command_is_one_line(odd: str, command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - there is no such run
        command(OmegaConf.create({"run": odd, "input": odd}))  # type: ignore[operator]
    told = capsys.readouterr().out
    assert is_plain(told)
    assert told.count("\n") == 1


@pytest.mark.parametrize("odd", ODD)
def test_the_report_of_a_sweep_shows_escapes(odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path, {"overrides": [], "varying": [odd], "jobs": {odd: [f"{odd}={odd}"]}})
    write_report(tmp_path, rows_of(tmp_path))
    assert is_plain(capsys.readouterr().out)
