"""The lines after training can be copied into a shell."""

import shlex
from pathlib import Path

import pytest

from qnmixer.config import parse
from qnmixer.config.commands import parse_evaluate
from qnmixer.config.compose import compose
from qnmixer.tracking.run import Run
from qnmixer.training.terminal import print_end


def test_a_folder_with_spaces_and_brackets_is_printed_as_a_shell_and_hydra_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ü [red] a"
    run = Run(folder)
    run.record["picture"] = str(folder / "picture.png")
    print_end(parse(compose("train", ["experiment=demo"])), run)
    place, hint, picture = capsys.readouterr().out.splitlines()
    assert (place, picture) == (f"run folder: {folder}", f"picture: {folder / 'picture.png'}")
    words = shlex.split(hint.partition("qnmixer.evaluate ")[2])
    assert parse_evaluate(compose("evaluate", words)).run == str(folder)
