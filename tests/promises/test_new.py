"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `new`: a project of one's own, which takes no place of files, and whose training step is the user's.
"""

import csv
import json
import os
import sys
from pathlib import Path

import pytest

from qnmixer import module, new

from ..warm import Done, Warm

TINY = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=4", "data.num_workers=0", "data.batch_size=2", "data.n_train=8",
    "data.n_val=2", "data.n_test=2", "trainer.max_steps=2", "trainer.val_every_n_steps=2",
    "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "logger=csv", "test_after_training=false",
]  # fmt: skip
MINE = ["--config-dir", "conf", "experiment=mine", *TINY]


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


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """A project with a run of two steps, `before`, and one after a change of its training step, `run`."""
    folder = tmp_path_factory.mktemp("projects") / "mine"
    new.new(folder)
    assert_done(command(warm, folder, "train", *MINE, "hydra.run.dir=before"))
    copied = folder / "my_module.py"
    plain = 'return (batch["weight"] * self.loss(image, batch["image"])).mean()'
    assert plain in copied.read_text()
    copied.write_text(copied.read_text().replace(plain, plain.replace("return", "return 10 *")))
    assert_done(command(warm, folder, "train", *MINE, "hydra.run.dir=run"))
    return folder


def command(warm: Warm, folder: Path, name: str, *words: str) -> Done:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "HYDRA"))}
    return warm.run("-m", f"qnmixer.{name}", *words, cwd=folder, env=environment)


def assert_done(done: Done) -> None:
    assert done.returncode == 0, done.stderr


def with_trust(stderr: str) -> str:
    """The word that a line of refusal names, as a shell reads it."""
    (line,) = stderr.splitlines()
    return line.rpartition("add ")[2].strip("'")


def column(run: Path, name: str) -> list[float]:
    with (run / "metrics.csv").open(newline="") as stream:
        return [float(row[name]) for row in csv.DictReader(stream) if row[name]]


@pytest.mark.slow
@pytest.mark.xdist_group("new")
def test_its_training_step_is_the_users(project: Path) -> None:
    (before, _), (after, _) = (column(project / run, "train/loss") for run in ("before", "run"))
    assert after == pytest.approx(10 * before, rel=1e-5)
    # The weights have changed between the two, but not by a factor: validation is as before.
    (before,), (after,) = (column(project / run, "val/loss") for run in ("before", "run"))
    assert after != before
    assert after == pytest.approx(before, rel=0.5)


@pytest.mark.slow
@pytest.mark.xdist_group("new")
def test_it_is_resumed_and_evaluated(project: Path, warm: Warm) -> None:
    """Resumed without a word: the run is this user's. Evaluated with one of trust."""
    assert_done(command(warm, project, "train", "resume=run", "trainer.max_steps=3"))
    assert json.loads((project / "run" / "results.json").read_text())["steps"] == 3
    assert len(column(project / "run", "train/loss")) == 3
    evaluate = ["evaluate", "run=run", "hydra.run.dir=evaluated"]
    refused = command(warm, project, *evaluate)
    assert refused.returncode == 1
    assert with_trust(refused.stderr) == "trust=my_network"
    assert_done(command(warm, project, *evaluate, "trust=my_network"))
    assert "| Mine |" in (project / "evaluated" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.xdist_group("new")
@pytest.mark.long
def test_a_sweep_of_it(project: Path, warm: Warm) -> None:
    assert_done(command(warm, project, "train", "-m", *MINE, "loss.epsilon=1e-3,1e-2", "hydra.sweep.dir=sweep"))
    with (project / "sweep" / "sweep.csv").open(newline="") as stream:
        assert [row["status"] for row in csv.DictReader(stream)] == ["done", "done"]
    first = column(project / "before", "train/loss")[0]
    assert column(project / "sweep" / "0", "train/loss")[0] == pytest.approx(10 * first, rel=1e-5)
