"""Optimizer steps, samples and speed for every row of the metrics."""

import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from qnmixer.engine.batch import Batch
from qnmixer.engine.data.sampler import EpochSampler
from qnmixer.engine.run_module import RunModule


def main_metric(trainer: L.Trainer, module: RunModule) -> str:
    """The metric of a validation that is shown and watched: val/psnr, or the monitored one if there is no PSNR."""
    return "val/psnr" if "val/psnr" in trainer.callback_metrics else module.config.monitor


class Stopwatch:
    """Measures seconds; it can be stopped and started again."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)

    def start(self) -> None:
        """Start, if it is stopped."""
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        """Stop."""
        self._before, self._since = self.seconds, None


class ProgressMetrics(Callback):
    """Logs `step` and `samples` with each row, train/samples_per_second and, under 16-mixed, train/loss_scale.

    `step` is the number of optimizer steps done. Lightning uses it as the step of the row. `samples` is the number of
    slices seen by all devices together. The speed is measured since the previous row, with data loading but without
    validation.
    """

    def __init__(self) -> None:
        self._sampler: EpochSampler | None = None
        self._step = 0
        self._logged = (0, 0.0)  # samples and training seconds at the last row
        self._clock = Stopwatch()  # of training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start from the steps of the checkpoint, or from zero."""
        sampler = trainer.train_dataloader.sampler  # type: ignore[union-attr]  # it has been made
        assert isinstance(sampler, EpochSampler)
        self._sampler, self._step = sampler, trainer.global_step
        self._logged = sampler.samples_until(self._step), self._clock.seconds
        self._clock.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Start the clock after a validation."""
        self._clock.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Log, if the batch ended an optimizer step."""
        if trainer.global_step == self._step or self._sampler is None:
            return
        self._step = trainer.global_step
        samples = self._log_place(pl_module, on_epoch=False)
        if self._step % trainer.log_every_n_steps:  # type: ignore[attr-defined]  # Lightning's, untyped
            return
        seconds = self._clock.seconds
        speed = (samples - self._logged[0]) / (seconds - self._logged[1])
        self._logged = samples, seconds
        pl_module.log("train/samples_per_second", torch.tensor(speed))
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            pl_module.log("train/loss_scale", torch.tensor(scaler.get_scale()))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        if self._sampler is None:  # a resumed run that only lacks its last validation
            sampler = trainer.datamodule.train_dataloader().sampler  # type: ignore[attr-defined]  # Lightning's, untyped
            assert isinstance(sampler, EpochSampler)
            self._sampler, self._step = sampler, trainer.global_step
        self._clock.stop()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the place of the validation."""
        if self._sampler is not None:
            self._log_place(pl_module, on_epoch=True)

    def _log_place(self, pl_module: L.LightningModule, *, on_epoch: bool) -> int:
        """Log step and samples, and return the samples. They are on the CPU, so the host waits for no device."""
        assert self._sampler is not None
        samples = self._sampler.samples_until(self._step)
        for name, value in (("step", self._step), ("samples", samples)):
            exact = torch.tensor(value, dtype=torch.float64)
            pl_module.log(name, exact, on_step=not on_epoch, on_epoch=on_epoch, reduce_fx="max", batch_size=1)
        return samples
