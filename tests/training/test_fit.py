"""The output and the files of a run before and after training."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from qnmixer.errors import CheckpointError, DataError, OutOfMemory, Stopped
from qnmixer.fit import fit
from qnmixer.reconstruction.checkpoints import Checkpoint
from qnmixer.runs.records import read_metrics, read_results
from qnmixer.runs.run import Run

from ..conftest import tiny_config

QUICK = ["callbacks=none", "test_after_training=false"]


LOGGER = """
from pathlib import Path
from lightning.pytorch.loggers import CSVLogger

class Mine(CSVLogger):
    def __init__(self, save_dir, word):
        super().__init__(save_dir, name="mine", version="")
        self.word = word

    def log_metrics(self, metrics, step=None):
        with open(Path(self.save_dir) / "mine.txt", "a") as file:
            file.write(f"{self.word} {step} {' '.join(metrics)}\\n")
"""


@pytest.mark.parametrize(("overrides", "step"), [
    (["callbacks=early_stopping", "optimizer.lr=0.5", "trainer.val_every_n_steps=1", "trainer.max_steps=20"], 3),
    pytest.param(["callbacks=none", "optimizer.lr=1000", "trainer.max_steps=1"], 1, marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_whose_last_validation_is_not_finite_has_failed(tmp_path: Path, overrides: list[str], step: int) -> None:
    with pytest.raises(FloatingPointError, match=rf"val/psnr became (nan|-inf) at step {step}$"):
        fit(tiny_config(*overrides), Run(tmp_path))
    assert read_results(tmp_path)["status"] == "failed"
    assert not (tmp_path / "evaluation").exists()
    with pytest.raises(FloatingPointError):  # also if there is nothing left to train
        fit(tiny_config(*overrides, f"resume={tmp_path}"), Run(tmp_path, resume=str(tmp_path)))


def test_loggers_get_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a file of the user, which nobody looks for when the checkpoint is read, and one of Lightning."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_second_logger.py").write_text(LOGGER)
    mine = ["logger._target_=my_second_logger.Mine", "+logger.word=said"]
    theirs = ["+logger.theirs._target_=lightning.pytorch.loggers.CSVLogger", "+logger.theirs.name=theirs"]
    fit(tiny_config("logger=[csv,custom]", *mine, *theirs), Run(tmp_path / "run"))
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    names = {name for row in rows for name, value in row.items() if value} - {"step"}
    assert {"train/loss", "val/psnr", "val/psnr_best", "test/psnr", "test/fbp/psnr"} <= names
    lines = (tmp_path / "run" / "mine.txt").read_text().splitlines()
    assert lines[0].startswith("said ")
    assert {name for line in lines for name in line.split()[2:]} == names
    (written,) = (tmp_path / "run" / "theirs").rglob("metrics.csv")
    assert {name for row in read_metrics(written) for name, value in row.items() if value} - {"step"} == names
    (tmp_path / "my_second_logger.py").unlink()
    assert Checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt").config.logger == {}


def test_a_resume_that_is_refused_or_fails_leaves_what_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resume(*overrides: str) -> None:
        words = [*overrides, f"resume={tmp_path}"]
        fit(tiny_config(*QUICK, *words), Run(tmp_path, words, str(tmp_path)))

    fit(tiny_config(*QUICK), Run(tmp_path, ["trainer.max_steps=2"]))
    before = read_results(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer\.lr"):
        resume("optimizer.lr=0.5")
    with monkeypatch.context() as other:
        other.setattr("qnmixer.steps.build_data", raising(DataError("no slices")))
        with pytest.raises(DataError):
            resume("trainer.max_steps=5")
    assert read_results(tmp_path)["overrides"] == ["trainer.max_steps=2"]
    assert read_results(tmp_path)["status"] == "done"
    with monkeypatch.context() as other:  # before the first step
        other.setattr("qnmixer.steps.training", raising(RuntimeError("the device is busy")))
        with pytest.raises(RuntimeError):
            resume("trainer.max_steps=6")
    after = read_results(tmp_path)
    assert (after["status"], after["steps"]) == ("failed", before["steps"])
    assert after["seconds"] >= before["seconds"]
    resume("trainer.max_steps=6")
    assert read_results(tmp_path)["overrides"] == ["trainer.max_steps=6"]
    assert read_results(tmp_path)["status"] == "done"


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: object) -> None:
        raise error

    return function


def test_a_stop_while_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qnmixer.data.datamodule._Loader.__iter__", raising(Stopped(signal.SIGINT)))
    with pytest.raises(Stopped):  # Lightning's teardown fails then
        fit(tiny_config("test_after_training=false"), Run(tmp_path))
    assert read_results(tmp_path)["status"] == "interrupted"


def test_a_step_that_no_memory_is_there_for_is_refused_before_any_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("memory=recompute", "data.batch_size=1")  # of which few smaller ones are tried
    monkeypatch.setattr("qnmixer.training.steps.memory_of", lambda device: 0.1)
    monkeypatch.setattr("qnmixer.training.steps.build_module", lambda config: pytest.fail("it was built"))
    with pytest.raises(OutOfMemory, match=r"^out of memory: a step of this run needs .* but 0 MiB were free"):
        fit(config, Run(tmp_path / "run"))
