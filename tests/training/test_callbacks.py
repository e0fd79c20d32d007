"""Callbacks that the command line adds to a run."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qnmixer.errors import PluginError
from qnmixer.fit import fit
from qnmixer.module import ReconstructionModule
from qnmixer.reconstruction.checkpoints import Checkpoint
from qnmixer.runs.records import read_results
from qnmixer.runs.run import Run
from qnmixer.settings.parts import CallbackConfig, Callbacks
from qnmixer.settings.validation import validated
from qnmixer.training.callbacks import EMA, build_callbacks

from ..conftest import last_checkpoint, tiny_config


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a callback of somebody's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_callbacks", raising=False)
    shutil.copy(Path(__file__).parents[1] / "own.py", tmp_path / "my_callbacks.py")
    return tmp_path


def test_a_callback_in_a_file_of_this_folder_is_not_read_from_a_checkpoint(here: Path) -> None:
    """Not even that its module is there is asked."""
    mine = ["+callbacks.mine._target_=my_callbacks.Counting", "+callbacks.mine.path=steps"]
    fit(tiny_config("callbacks=default", *mine, "~callbacks.pictures", "test_after_training=false"), Run(here / "run"))
    assert (here / "steps.0").read_text() == "4"
    assert not (here / "run" / "pictures").exists()
    (here / "my_callbacks.py").unlink()
    path = here / "run" / "checkpoints" / "last.ckpt"
    assert Checkpoint(path).config.callbacks == {}
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["qnmixer"]["config"]["callbacks"] = {"bad": {"_target_": "nowhere.Bad"}}
    torch.save(checkpoint, path)
    assert Checkpoint(path).config.callbacks == {}


@pytest.mark.parametrize(("given", "message"), [
    ({"_target_": "my_callbacks.Counting"}, "needs an argument path: give it as +callbacks.mine.path=VALUE"),
    ({"_target_": "my_callbacks.Counting", "pth": 1},
     "unknown key callbacks.mine.pth: did you mean callbacks.mine.path?"),
    ({"_target_": "subprocess.Popen", "args": "ls"}, "is not a subclass of"),
])  # fmt: skip
def test_a_bad_callback_is_one_line(here: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError) as error:
        build_callbacks(validated(Callbacks, {"mine": given}, "callbacks"), {})
    assert "callbacks.mine" in str(error.value)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["BatchSizeFinder", "GradientAccumulationScheduler", "LearningRateFinder"])
def test_a_callback_that_changes_what_the_config_fixes_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match=r"would change the run while it trains: set data\.batch_size, "):
        build_callbacks({"mine": CallbackConfig(_target_=f"lightning.pytorch.callbacks.{name}")}, {})


class Dipping(ReconstructionModule):
    """Its metric is worse once, after step 2, and best after step 6."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = torch.full((len(batch["image"]),), [0.0, 1, 0, 2, 3, 4, 5, 5, 5][self.global_step])
        self.log_means("val", {"loss": value, "psnr": value, "ssim": value}, counted=batch["weight"] > 0)


def test_a_stop_before_min_steps_is_decided_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended at step 5, though the metric was best there, without a word. A resumed run went on."""
    words = [f"module._target_={__name__}.Dipping", "test_after_training=false", "trainer.enable_progress_bar=false"]
    words += ["callbacks=early_stopping", "~callbacks.pictures", "callbacks.early_stopping.patience=1"]
    words += ["trainer.min_steps=5", "trainer.val_every_n_steps=1", "schedule=constant"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(tiny_config(*words, "trainer.max_steps=2"), Run(parts))
    assert "early stopping" not in capsys.readouterr().out
    for run, resume in ((whole, []), (parts, [f"resume={parts}"])):
        best = fit(tiny_config(*words, "trainer.max_steps=8", *resume), Run(run, resume=str(run) if resume else None))
        results = read_results(run)
        assert (results["status"], results["steps"], results["best"]) == ("done", 7, {"val/psnr": best})
        assert last_checkpoint(run)["global_step"] == 7
        line = "stopping after 7 steps: Monitored metric val/psnr did not improve in the last 1 records. Best score:"
        assert f"early {line}" in capsys.readouterr().out


def test_the_mean_is_of_optimizer_steps_and_stands_for_the_weights_in_a_checkpoint() -> None:
    """Of two batches each. A stopped run with it resumes as any other: test_checkpointing has that."""
    module: Any = torch.nn.Linear(1, 1, bias=False)
    weights = [1.0, 2.0, 4.0, 8.0]
    trainer: Any = SimpleNamespace(accumulate_grad_batches=2, global_step=0)
    module.weight.data.fill_(1.0)
    averaging = EMA(decay=0.75)
    averaging.on_fit_start(trainer, module)
    for trainer.global_step, weight in enumerate(weights, 1):
        averaging.on_train_batch_end(trainer, module, None, None, 0)
        module.weight.data.fill_(weight)
        averaging.on_train_batch_end(trainer, module, None, None, 1)
    mean = ((1 * 0.75 + 2 * 0.25) * 0.75 + 4 * 0.25) * 0.75 + 8 * 0.25
    for validating in (False, True):
        if validating:
            averaging.on_validation_start(trainer, module)
        assert module.weight.item() == pytest.approx(mean if validating else 8)
        checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
        averaging.on_save_checkpoint(trainer, module, checkpoint)
        assert checkpoint["state_dict"]["weight"].item() == pytest.approx(mean)
        assert checkpoint["trained_weights"]["weight"].item() == pytest.approx(8)
    averaging.on_validation_end(trainer, module)
    assert module.weight.item() == pytest.approx(8)
