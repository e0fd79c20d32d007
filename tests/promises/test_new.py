"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `new`: a project of one's own, which takes no place of files, and whose training step is the user's.
"""

import sys
from pathlib import Path

import pytest

from qnmixer import module, new

from ..conftest import PHANTOMS, metrics
from ..conftest import TINY as COMMON
from .commands import Command

TINY = [word for word in COMMON if not word.startswith(("model.n_mixer", "trainer.max"))]
MINE = ["--config-dir", "conf", "experiment=mine", *TINY, *PHANTOMS, "trainer.max_steps=2"]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["qnmixer-new", *words])
    new.main()


def test_a_project_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "my project"
    run(monkeypatch, str(folder))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {
        ".gitignore", "README.md", "my_losses.py", "my_module.py", "my_network.py", "conf/experiment/mine.yaml",
        "conf/loss/mine.yaml", "conf/model/mine.yaml", "conf/module/mine.yaml",
    }  # fmt: skip
    assert (folder / "my_module.py").read_text() == Path(module.__file__).read_text()
    assert capsys.readouterr().out.endswith(f"cd '{folder}' && qnmixer-train --config-dir conf experiment=mine\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["here"], "exists and is not empty: give a new folder"),
        ([], "give the name of one new folder: qnmixer-new my_project"),
        (["a", "b"], "give the name of one new folder: qnmixer-new my_project"),
        (["--force"], "give the name of one new folder: qnmixer-new my_project"),
    ],
)
def test_nothing_is_written_but_into_one_new_folder(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "conf").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^error: .*{message}$"):
        run(monkeypatch, *words)
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "conf"]


@pytest.mark.slow
def test_its_training_step_is_the_users_and_goes_on(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "mine"
    new.new(folder)
    assert command(folder, "train", *MINE, "hydra.run.dir=before").code == 0
    step = folder / "my_module.py"
    plain = 'return (batch["weight"] * self.loss(image, batch["image"])).mean()'
    assert plain in step.read_text()
    step.write_text(step.read_text().replace(plain, plain.replace("return", "return 10 *")))
    assert command(folder, "train", *MINE, "hydra.run.dir=run").code == 0
    before, after = (metrics(folder / run) for run in ("before", "run"))
    assert after["train/loss"][0] == pytest.approx(10 * before["train/loss"][0], rel=1e-5)
    assert after["val/loss"] == pytest.approx(before["val/loss"], rel=0.5)  # other weights, but the same measure

    assert command(folder, "train", "resume=run", "trainer.max_steps=3").code == 0  # the run is this user's
    assert len(metrics(folder / "run")["train/loss"]) == 3
    evaluate = ["run=run", "hydra.run.dir=evaluated"]
    word = command(folder, "evaluate", *evaluate).error.rpartition("add ")[2].strip("'")
    assert word == "trust=my_network"
    assert command(folder, "evaluate", *evaluate, word).code == 0
    assert "| Mine |" in (folder / "evaluated" / "table.md").read_text()
