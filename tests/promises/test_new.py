"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `new`: a project of one's own, which takes no place of files.
"""

import sys
from pathlib import Path

import pytest

from qnmixer import new


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["qnmixer-new", *words])
    new.main()


def test_a_project_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "my project"
    run(monkeypatch, str(folder))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {
        ".gitignore", "README.md", "my_network.py", "conf/model/mine.yaml", "conf/experiment/mine.yaml"
    }  # fmt: skip
    assert capsys.readouterr().out.endswith(f"cd '{folder}' && qnmixer-train --config-dir conf experiment=mine\n")


@pytest.mark.parametrize("name", ["my_network.py", ".gitignore", "conf"])
def test_nothing_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(SystemExit, match=r"^error: .* exists and is not empty: give a new folder$"):
        run(monkeypatch, str(tmp_path))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--force"]])
def test_one_folder_is_asked_for(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^error: give the name of one new folder: qnmixer-new my_project$"):
        run(monkeypatch, *words)
    assert not [*tmp_path.iterdir()]
