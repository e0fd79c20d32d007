"""The mean of the weights: its values, and that a stopped run with it resumes as if it had not been stopped."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer.config import Config
from qnmixer.errors import ConfigError, Stopped
from qnmixer.fit import fit
from qnmixer.module import ReconstructionModule
from qnmixer.tracking.run import Run
from qnmixer.training.weight_averaging import MeanWeights

TinyConfig = Callable[..., Config]
RUN = ["callbacks=ema", "callbacks.ema.decay=0.5", "test_after_training=false", "trainer.max_steps=4"]
MEASURE = ReconstructionModule.measure


def kept(folder: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def test_checkpoints_hold_the_mean_and_what_is_trained(tiny_config: TinyConfig, tmp_path: Path) -> None:
    trained = []
    for n in (1, 2, 3):
        length = ["trainer.max_steps=3", "trainer.save_every_n_steps=null", "schedule=constant"]
        fit(tiny_config(*RUN, *length, f"trainer.max_steps={n}"), Run(tmp_path / str(n)))
        trained.append(kept(tmp_path / str(n))["trained_weights"])
    fit(tiny_config("trainer.max_steps=3", "schedule=constant", "test_after_training=false"), Run(tmp_path / "plain"))
    mean = kept(tmp_path / "3")["state_dict"]
    for name, value in kept(tmp_path / "plain")["state_dict"].items():
        assert torch.equal(trained[2][name], value)  # training is the same
    first = kept(tmp_path / "1")
    start = {name: 2 * first["state_dict"][name] - value for name, value in trained[0].items()}
    for name, value in trained[2].items():
        expected = start[name] / 8 + trained[0][name] / 8 + trained[1][name] / 4 + value / 2
        torch.testing.assert_close(mean[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stream", "step", "batches"), [("train", 2, 1), ("val", 2, 1), ("train", 2, 2)])
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


def test_a_run_can_resume_without_it(tiny_config: TinyConfig, tmp_path: Path) -> None:
    plain = ["schedule=constant", "trainer.max_steps=4", "test_after_training=false"]
    fit(tiny_config(*plain), Run(tmp_path / "plain"))
    folder = tmp_path / "averaged"
    fit(tiny_config(*RUN, *plain, "trainer.max_steps=2"), Run(folder))
    fit(tiny_config(*plain, f"resume={folder}"), Run(folder, resume=str(folder)))
    for name, value in kept(tmp_path / "plain")["state_dict"].items():
        assert torch.equal(kept(folder)["state_dict"][name], value), name
    assert "trained_weights" not in kept(folder)


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ValueError, match="decay must be from 0 to below 1"):
        MeanWeights(decay=1.0)
    trainer: Any = type("Trainer", (), {"strategy": object()})
    with pytest.raises(ConfigError, match="strategy=single or strategy=ddp"):
        MeanWeights().setup(trainer, None, "fit")  # type: ignore[arg-type]  # not looked at
