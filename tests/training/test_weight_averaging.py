"""The mean of the weights: its values, and that a stopped run with it resumes as if it had not been stopped."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qnmixer.engine.config.run import Config
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training.callbacks import MeanWeights
from qnmixer.errors import Stopped
from qnmixer.fit import fit
from qnmixer.module import ReconstructionModule

TinyConfig = Callable[..., Config]
RUN = ["callbacks=ema", "callbacks.ema.decay=0.5", "test_after_training=false", "trainer.max_steps=4"]
MEASURE = ReconstructionModule.measure


def kept(folder: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def test_the_mean_is_of_optimizer_steps_and_stands_for_the_weights_in_a_checkpoint() -> None:
    """Of two batches each. Before `start` it follows the weights."""
    module: Any = torch.nn.Linear(1, 1, bias=False)
    weights = [1.0, 2.0, 4.0, 8.0]
    trainer: Any = SimpleNamespace(accumulate_grad_batches=2, global_step=0)
    averaging = MeanWeights(decay=0.75, start=1)
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


@pytest.mark.parametrize(
    ("stream", "step", "batches"), [("val", 2, 1), pytest.param("train", 2, 2, marks=pytest.mark.long)]
)
def test_a_stopped_run_resumes_with_both(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str, step: int, batches: int
) -> None:
    overrides = [*RUN, f"trainer.accumulate_grad_batches={batches}"]
    fit(tiny_config(*overrides), Run(tmp_path / "whole"))
    sent: list[int] = []

    def measure(self: ReconstructionModule, batch: Any, of: Any) -> torch.Tensor:
        if (of, self.global_step) == (stream, step) and not sent:
            sent.append(step)
            signal.raise_signal(signal.SIGTERM)
        return MEASURE(self, batch, of)

    monkeypatch.setattr(ReconstructionModule, "measure", measure)
    folder = tmp_path / "stopped"
    with pytest.raises(Stopped):
        fit(tiny_config(*overrides), Run(folder))
    fit(tiny_config(*overrides, f"resume={folder}"), Run(folder, resume=str(folder)))
    for name in ("last", "best"):
        ours, theirs = kept(folder, name), kept(tmp_path / "whole", name)
        for part in ("state_dict", "trained_weights"):
            for key, value in theirs[part].items():
                assert torch.equal(ours[part][key], value), (name, part, key)
    assert kept(folder)["qnmixer_run"]["best"] == kept(tmp_path / "whole")["qnmixer_run"]["best"]
