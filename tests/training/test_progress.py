"""The axes of all metrics: optimizer steps and samples, in every row, and their speed."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback

from qnmixer.engine.build import build_module
from qnmixer.engine.config import Config
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.sampler import EpochSampler
from qnmixer.engine.tracking.loggers import build_loggers
from qnmixer.engine.tracking.metrics_file import read_metrics
from qnmixer.engine.training.callbacks import build_callbacks
from qnmixer.engine.training.trainer import build_trainer

# 7 slices, 4 an optimizer step: every second step is of 3.
SEVEN = ["data.n_train=7", "data.n_val=3", "data.batch_size=2", "trainer.accumulate_grad_batches=2"]


class Validated(Callback):
    """Keeps `global_step`, as a checkpoint made then has it, and the rows that were there; and takes its time."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self.path, self.seconds = folder / "metrics.csv", seconds
        self.rows: dict[int, list[dict[str, str]]] = {}

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        time.sleep(self.seconds)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.rows.setdefault(trainer.global_step, read_metrics(self.path))


def train(config: Config, folder: Path, seconds: float = 0.0, *more: Callback) -> Validated:
    watch = Validated(folder, seconds)
    L.seed_everything(0, verbose=False)
    trainer = build_trainer(
        config, folder, [watch, *more, *build_callbacks(config.callbacks)], build_loggers(config, folder, [])
    )
    trainer.fit(build_module(config), datamodule=SliceDataModule(config.data))
    return watch


def test_a_row_has_the_step_of_the_checkpoint_that_it_goes_with(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    """A checkpoint of k steps goes with the rows up to k: those of training and of validation after step k."""
    watch = train(tiny_config(*SEVEN, "trainer.max_steps=5", "trainer.val_every_n_steps=2"), tmp_path)
    for global_step, rows in watch.rows.items():
        places = [(int(row["step"]), bool(row.get("val/psnr"))) for row in rows]
        expected = [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
        assert places == [place for place in expected if place[0] <= global_step]
    assert [(int(row["step"]), float(row["samples"])) for row in read_metrics(watch.path)] == [
        (1, 4), (2, 7), (2, 7), (3, 11), (4, 14), (4, 14), (5, 18)
    ]  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_samples_are_those_that_the_sampler_gives(replicas: int) -> None:
    shares = [
        EpochSampler(10, shuffle=True, num_replicas=replicas, rank=rank, batch_size=4 // replicas)
        for rank in range(replicas)
    ]
    seen = 0
    for epoch in range(3):
        weighed = []
        for share in shares:
            share.set_epoch(epoch)
            weighed.append([pick.weight > 0 for pick in share])
        for step in range(3):
            assert shares[0].samples_until(3 * epoch + step) == seen
            size = 4 // replicas
            seen += sum(sum(weights[step * size : (step + 1) * size]) for weights in weighed)
    assert shares[0].samples_until(9) == seen == 30


def test_speed_is_that_of_training_alone(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    """All seconds that the rows account for, of which validations of 0.2 s each are none."""
    config = tiny_config("trainer.max_steps=6", "trainer.val_every_n_steps=1", "trainer.log_every_n_steps=2")
    start = time.monotonic()
    train(config, tmp_path, seconds=0.2)
    took = time.monotonic() - start
    rows = read_metrics(tmp_path / "metrics.csv")
    speeds = [float(speed) for row in rows if (speed := row["train/samples_per_second"])]
    seconds = [2 * config.data.batch_size / speed for speed in speeds]
    assert len(seconds) == 3
    assert 0 < sum(seconds) < took - 6 * 0.2


@pytest.mark.parametrize(("precision", "scaled"), [("32", False), ("16-mixed", True), ("bf16-mixed", False)])
def test_the_scale_is_there_where_there_is_a_scaler(
    tiny_config: Callable[..., Config], tmp_path: Path, precision: str, scaled: bool
) -> None:
    overflow = LambdaCallback(on_after_backward=_overflow_at_the_second_step)
    train(tiny_config(f"trainer.precision={precision}", "trainer.max_steps=3"), tmp_path, 0.0, *[overflow] * scaled)
    first, *others = (row for row in read_metrics(tmp_path / "metrics.csv") if row["train/grad_norm"])
    assert ("train/loss_scale" in first) == scaled
    if scaled:
        assert float(first["train/loss_scale"]) == 65536
    assert float(first["train/lr"]) == pytest.approx(1e-3)
    for name in ("train/grad_norm", "train/lambda_0", "train/samples_per_second"):
        assert float(first[name]) > 0
    norms = [float(row["train/grad_norm"]) for row in (first, *others)]
    assert [math.isfinite(norm) for norm in norms] == [True, not scaled, True]
    # The scaler skips a step that overflows.
    assert float(others[-1]["train/grad_norm_max"]) == max(filter(math.isfinite, norms))


def _overflow_at_the_second_step(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    if trainer.global_step == 1:
        next(p for p in pl_module.parameters() if p.grad is not None).grad.fill_(math.inf)
