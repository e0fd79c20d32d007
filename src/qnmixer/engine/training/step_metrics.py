"""What every run checks and logs at each step: loss, gradient, learning rate, step, samples and speed."""

import time
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.data.sampler import EpochSampler
from qnmixer.engine.parallel.shards import gather
from qnmixer.engine.run_module import RunModule
from qnmixer.errors import ConfigError

_T = TypeVar("_T", bound=Callback)


def callback_of(trainer: L.Trainer, kind: type[_T]) -> _T:
    """The callback of this kind, which every run has."""
    return next(it for it in trainer.callbacks if isinstance(it, kind))  # type: ignore[attr-defined]  # Lightning's, untyped


def samples_until(trainer: L.Trainer, step: int) -> int:
    """Slices that all devices together have seen after this number of optimizer steps."""
    loader = trainer.train_dataloader
    if loader is None:  # a network that does not learn, or a resumed run that only lacks its last validation
        loader = trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]  # Lightning's, untyped
    sampler = loader.sampler
    assert isinstance(sampler, EpochSampler)
    return sampler.samples_until(step)


class StepMetrics(Callback):
    """Raises FloatingPointError, with step and slices, for a loss that is not finite. Logs the numbers of each step.

    It is the first callback of a run, so that others may read what it computes. `step`, the number of optimizer steps
    done, and `samples`, the slices seen by all devices together, are in each row. Lightning uses `step` as the step of
    the row. The speed is measured since the previous row, with data loading but without validation.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._asked: tuple[Tensor, torch.cuda.Event | None, Tensor, str] | None = None  # a loss that is being checked
        self._largest_norm: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0
        self._batches = 1  # of a step, when training began
        self._row = (0, 0.0)  # samples at the previous row, and its time, moved by the time of validations since
        self._paused: float | None = None  # when a validation began

    def state_dict(self) -> dict[str, Any]:
        """The largest norm so far."""
        return {"largest_norm": float(self._largest_norm)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the largest norm of a resumed run."""
        self._largest_norm = state_dict["largest_norm"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._batches = trainer.accumulate_grad_batches
        self._row = samples_until(trainer, trainer.global_step), time.monotonic()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, *_: Any) -> None:
        """Store the names of the slices, for the message. Leave out the time of a validation.

        Raises ConfigError if a callback has changed the batches of a step: `samples` and resuming rely on their number.
        """
        if (now := trainer.accumulate_grad_batches) != self._batches:
            raise ConfigError(
                f"a callback changed trainer.accumulate_grad_batches from {self._batches} to {now}: leave it "
                f"out, and set trainer.accumulate_grad_batches={now}"
            )
        self._names = batch["name"]
        if self._paused is not None:
            samples, since = self._row
            self._row = samples, since + time.monotonic() - self._paused
            self._paused = None

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Ask whether the loss is finite.

        If the host reads a number from a GPU, it waits for all queued work, and then the GPU waits for the host. So the
        answer is copied in the background, and read before the weights change. The GPU has the backward pass meanwhile.
        """
        self._raise_if_not_finite()  # with accumulation, the loss of the batch before is still unchecked
        loss = loss.detach()
        finite = torch.isfinite(loss).to("cpu", non_blocking=True)  # into pinned memory
        copied = torch.cuda.current_stream(loss.device).record_event() if loss.is_cuda else None
        self._asked = finite, copied, loss, f"at step {trainer.global_step} (slices: {', '.join(self._names)})"
        if copied is None:
            self._raise_if_not_finite()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the loss. Log the gradient norm before clipping, its maximum in the run, lr and the mean of λ_t."""
        assert isinstance(pl_module, RunModule)
        self._raise_if_not_finite()
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = gather(torch.nn.utils.get_total_norm(gradients))  # that of shards is itself in shards
        # The scaler skips a step whose gradient overflows. That norm would be the largest for the rest of the run.
        counted = norm if _scaler(trainer) is None else norm.nan_to_num(nan=0.0, posinf=0.0)
        self._largest_norm = torch.maximum(counted, torch.as_tensor(self._largest_norm, device=norm.device))
        pl_module.log("train/grad_norm", norm)
        pl_module.log("train/grad_norm_max", self._largest_norm)
        # As a tensor in float64: Lightning would round a Python float to float32.
        pl_module.log("train/lr", torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))
        if (trainer.global_step + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]  # Lightning's, untyped
            return  # no logger would see these values, and each costs small operators on the GPU
        for t, step_size in enumerate(pl_module.network.step_sizes):
            pl_module.log(f"train/lambda_{t}", gather(step_size.detach()).mean())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Log an optimizer step after its last batch: place, speed, and the loss, the mean over its samples."""
        n = trainer.accumulate_grad_batches
        # Lightning has divided the loss by the batches of a step already.
        self._loss = outputs["loss"] + (self._loss if batch_idx % n else 0.0)
        if (batch_idx + 1) % n:
            return
        pl_module.log("train/loss", self._loss, batch_size=1, sync_dist=True)
        samples = _log_place(trainer, pl_module, on_epoch=False)
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]  # Lightning's, untyped
            return
        (before, since), self._row = self._row, (samples, time.monotonic())
        pl_module.log("train/samples_per_second", torch.tensor((samples - before) / (self._row[1] - since)))
        if (scaler := _scaler(trainer)) is not None:
            pl_module.log("train/loss_scale", torch.tensor(scaler.get_scale()))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the time."""
        self._paused = time.monotonic()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the place of the validation."""
        _log_place(trainer, pl_module, on_epoch=True)

    def _raise_if_not_finite(self) -> None:
        if self._asked is None:
            return
        (finite, copied, loss, where), self._asked = self._asked, None
        if copied is not None:
            copied.synchronize()  # waits for that copy only
        if not finite:
            raise FloatingPointError(f"the loss became {loss.item()} {where}")


def _log_place(trainer: L.Trainer, module: L.LightningModule, *, on_epoch: bool) -> int:
    """Log step and samples, and return the samples. They are on the CPU, so the host waits for no device."""
    samples = samples_until(trainer, trainer.global_step)
    for name, value in (("step", trainer.global_step), ("samples", samples)):
        exact = torch.tensor(value, dtype=torch.float64)
        module.log(name, exact, on_step=not on_epoch, on_epoch=on_epoch, reduce_fx="max", batch_size=1)
    return samples


def _scaler(trainer: L.Trainer) -> Any:
    """The GradScaler of 16-mixed, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)
