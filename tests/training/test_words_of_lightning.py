"""What the arguments of Lightning's Trainer do in a run."""

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from qnmixer import steps
from qnmixer.errors import ConfigError
from qnmixer.fit import fit
from qnmixer.module import ReconstructionModule
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.runs.records import read_metrics, read_results
from qnmixer.runs.run import Run
from qnmixer.settings.run import Config

from ..conftest import assert_equal, last_checkpoint, metrics, tiny_config

# Eight slices in batches of two: four steps an epoch. Three validation slices in two batches.
EPOCHS = ["trainer.max_steps=-1", "trainer.max_epochs=2", "callbacks=none", "noise=field"]
UNTESTED = "test_after_training=false"


class Seen(Callback):
    """The samples of the batches of training and of validation, and of the sanity check."""

    def __init__(self) -> None:
        self.train: list[list[int]] = []
        self.val: list[list[int]] = []
        self.sanity: list[list[int]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, *_: Any) -> None:
        self.train.append(batch["sample"].tolist())

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, *_: Any) -> None:
        (self.sanity if trainer.sanity_checking else self.val).append(batch["sample"].tolist())


def watched(config: Config, folder: Path) -> Seen:
    """The batches of a run."""
    seen, all_callbacks = Seen(), steps.all_callbacks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "all_callbacks", lambda *parts: [*all_callbacks(*parts), seen])
        fit(config, Run(folder))
    return seen


def validated(folder: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(folder / "metrics.csv") if row.get("val/psnr")]


def assert_equal_weights(folder: Path, other: Path) -> None:
    assert_equal(last_checkpoint(folder)["state_dict"], last_checkpoint(other)["state_dict"])


def test_fast_dev_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two batches of each, though a step has four elsewhere; no checkpoint, no metrics, no table, and a word of it."""
    words = ["trainer.fast_dev_run=2", "trainer.accumulate_grad_batches=4", "logger=[wandb,csv]", "data.n_val=8"]
    seen = watched(tiny_config(*EPOCHS, *words), tmp_path)
    assert (len(seen.train), len(seen.val)) == (2, 2)
    results = read_results(tmp_path)
    assert (results["status"], results["steps"], results["fast_dev_run"]) == ("done", 2, 2)
    assert not {"test", "evaluated"} & {*results}
    assert {path.name for path in tmp_path.iterdir()} <= {"results.json", "code.diff", "pictures"}
    out = capsys.readouterr().out
    assert "fast_dev_run: 2 batches of training, validation and test; no checkpoint" in out
    assert "step 2/2" in out


@pytest.mark.parametrize(("words", "expected"), [
    (["trainer.val_check_interval=0.5"], [2, 4, 6, 8]),
    (["trainer.val_check_interval=3"], [3, 7, 8]),  # Lightning counts anew in each epoch; the last is ours
    (["trainer.val_check_interval=3", "trainer.check_val_every_n_epoch=null"], [3, 6, 8]),
    (["trainer.val_check_interval=00:00:00:00"], [1, 2, 3, 4, 5, 6, 7, 8]),
    (["trainer.check_val_every_n_epoch=2"], [8]),
    (["trainer.val_check_interval=0.3", "trainer.accumulate_grad_batches=2"], [1, 2, 3, 4]),  # no half step
    (["trainer.limit_train_batches=3", "trainer.gradient_clip_algorithm=value"], [3, 6]),
    (["trainer.max_time=00:00:00:00"], [0]),
], ids=str)  # fmt: skip
def test_when_a_run_validates(tmp_path: Path, words: list[str], expected: list[int]) -> None:
    config = tiny_config(*EPOCHS, *words, UNTESTED, "trainer.val_every_n_steps=null")
    fit(config, Run(tmp_path))
    assert validated(tmp_path) == expected
    assert read_results(tmp_path)["steps"] == expected[-1]


def test_more_batches_between_validations_than_there_are(tmp_path: Path) -> None:
    config = tiny_config(*EPOCHS, "trainer.val_check_interval=5", "trainer.val_every_n_steps=null")
    with pytest.raises(ConfigError, match=r"val_check_interval \(5\) must be less than or equal"):
        fit(config, Run(tmp_path))


def test_a_validation_before_training_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.num_sanity_val_steps=1", "trainer.reload_dataloaders_every_n_epochs=1"]
    run = [*EPOCHS, "callbacks=default", "trainer.val_every_n_steps=4", UNTESTED]
    plain = watched(tiny_config(*run), tmp_path / "plain")
    lines = capsys.readouterr().out.count("\n")
    seen = watched(tiny_config(*run, *words), tmp_path / "sanity")
    assert (len(plain.sanity), len(seen.sanity)) == (0, 1)
    assert capsys.readouterr().out.count("\n") == lines
    assert (plain.train, plain.val) == (seen.train, seen.val)
    assert_equal_weights(tmp_path / "sanity", tmp_path / "plain")
    pictures = [sorted(path.name for path in (tmp_path / name / "pictures").iterdir()) for name in ("plain", "sanity")]
    assert pictures[0] == pictures[1]


def test_overfit_batches(tmp_path: Path) -> None:
    """The same two batches in each epoch, in the order of the data, and as many of validation."""
    words = ["trainer.overfit_batches=2", "trainer.val_every_n_steps=null", "data.n_val=8", UNTESTED]
    seen = watched(tiny_config(*EPOCHS, *words), tmp_path)
    assert seen.train == [[0, 1], [2, 3]] * 2
    assert seen.val == [[0, 1], [2, 3]] * 2
    assert read_results(tmp_path)["steps"] == 4
    assert float(read_metrics(tmp_path / "metrics.csv")[-1]["samples"]) == 8


def test_a_resumed_run_of_few_batches_has_the_weights_of_one_run(tmp_path: Path) -> None:
    words = ["trainer.overfit_batches=0.75", "trainer.val_check_interval=2", UNTESTED, *EPOCHS]
    words += ["trainer.val_every_n_steps=null", "trainer.max_epochs=3", "schedule=constant"]
    fit(tiny_config(*words), Run(tmp_path / "one"))
    folder = tmp_path / "two"
    fit(tiny_config(*words, "trainer.max_steps=5"), Run(folder))
    fit(tiny_config(*words, f"resume={folder}"), Run(folder, resume=str(folder)))
    assert read_results(folder)["steps"] == 9
    assert_equal_weights(folder, tmp_path / "one")


def test_limits_of_validation_and_test(tmp_path: Path) -> None:
    words = ["trainer.limit_val_batches=0.5", "trainer.limit_test_batches=1", "trainer.val_every_n_steps=null"]
    seen = watched(tiny_config(*EPOCHS, *words), tmp_path)
    assert seen.val == [[0, 1]] * 2
    images = (tmp_path / "evaluation" / "images.csv").read_text()
    assert {line.split(",")[0] for line in images.splitlines()[1:]} == {"0", "1"}


def test_without_validation_the_last_checkpoint_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*EPOCHS, "trainer.limit_val_batches=0"]
    assert math.isnan(fit(tiny_config(*words), Run(tmp_path)))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    out = capsys.readouterr().out
    assert "no validation (trainer.limit_val_batches=0): the checkpoint is last.ckpt, and none is best" in out
    assert "evaluating last.ckpt on 4 slices" in out
    assert not [name for name in read_metrics(tmp_path / "metrics.csv")[0] if name.startswith("val/")]
    results = read_results(tmp_path)
    assert (results["status"], results["best"], results["steps"]) == ("done", {}, 8)
    fit(tiny_config(*words, "trainer.max_epochs=3", f"resume={tmp_path}"), Run(tmp_path, resume=str(tmp_path)))
    assert read_results(tmp_path)["steps"] == 12


@pytest.mark.parametrize("name", ["simple", "pytorch"])
def test_profilers_and_what_a_run_prints(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=true", "trainer.max_steps=2"]
    words += [f"trainer.profiler={name}", "trainer.limit_val_batches=0", UNTESTED, "callbacks=none"]
    fit(tiny_config(*words), Run(tmp_path))
    (report,) = (tmp_path / "profile").glob(f"*{name}*.txt")
    assert "step" in report.read_text()
    out = capsys.readouterr().out
    assert "Trainable params" in out
    assert "step 2/2" not in out


# Of several arguments at once: debug=


@pytest.mark.slow
@pytest.mark.long
def test_overfitting_drives_the_loss_down(tmp_path: Path) -> None:
    options = ["model.n_iterations=3", "model.channels=16", "optimizer.lr=3e-3", "trainer.val_every_n_steps=40"]
    fit(tiny_config("debug=overfit", *options, "trainer.max_steps=40"), Run(tmp_path))
    losses, results = metrics(tmp_path)["train/loss"], read_results(tmp_path)
    assert losses[-1] < losses[0] / 3
    assert results["status"] == "done"
    assert "test" not in results


@pytest.mark.slow
@pytest.mark.long  # make test runs debug=few_batches among the commands of docs
def test_few_batches_are_a_whole_run(tmp_path: Path) -> None:
    fit(tiny_config("debug=few_batches", "data.n_train=1000", "data.n_test=1000"), Run(tmp_path))
    assert read_results(tmp_path)["status"] == "done"
    assert len((tmp_path / "evaluation" / "images.csv").read_text().splitlines()) == 1 + 2 * 4
    assert load_run(tmp_path).config.data == tiny_config("data.n_train=1000", "data.n_test=1000").data


@pytest.mark.slow
def test_a_profile_is_a_trace_that_viewers_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["debug.warm_up=2", "debug.steps=1", "trainer.max_steps=4", "trainer.val_every_n_steps=3"]
    fit(tiny_config("debug=profile", *options), Run(tmp_path))
    assert f"profile: {tmp_path / 'profile'}" in capsys.readouterr().out.splitlines()
    trace, *_ = sorted((tmp_path / "profile").glob("*training_step*.json"))
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep#") for event in events if event["ph"] == "X") == 1
    (table,) = (tmp_path / "profile").glob("*.txt")
    assert "Self CPU" in table.read_text()


@pytest.mark.slow
def test_anomaly_detection_names_the_operator_and_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_loss(self: ReconstructionModule, batch: Any, batch_idx: int) -> torch.Tensor:
        return (0 * self.network(self.measure(batch, "train"))).sum().sqrt()

    monkeypatch.setattr(ReconstructionModule, "training_step", bad_loss)
    line = r"NaN in MulBackward0 of `.*sum\(\)\.sqrt\(\)` \(.*test_words_of_lightning"
    with pytest.raises(FloatingPointError, match=line):
        fit(tiny_config("debug=anomaly"), Run(tmp_path))
