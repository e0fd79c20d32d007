"""The loss and the gradient of each step: checked to be finite before the weights change, and logged."""

from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.parallel.shards import gather
from qnmixer.engine.run_module import RunModule
from qnmixer.engine.training.finite_check import FiniteCheck

_T = TypeVar("_T", bound=Callback)


def callback_of(trainer: L.Trainer, kind: type[_T]) -> _T:
    """The callback of this kind, which every run has."""
    return next(it for it in trainer.callbacks if isinstance(it, kind))  # type: ignore[attr-defined]  # Lightning's, untyped


class StepChecks(Callback):
    """Raises FloatingPointError, with step and slices, for a loss that is not finite. Logs loss, gradient and rates.

    It is the first callback of a run, so that others may read what it computes.

    Attributes:
        norm: of the gradient of all devices at this step, before clipping.
    """

    def __init__(self) -> None:
        self.norm = torch.tensor(0.0)
        self._finite = FiniteCheck()
        self._names: list[str] = []
        self._largest_norm: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The largest norm so far."""
        return {"largest_norm": float(self._largest_norm)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the largest norm of a resumed run."""
        self._largest_norm = state_dict["largest_norm"]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Store the names of the slices, for the message."""
        self._names = batch["name"]

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Check the loss.

        On a GPU its answer comes after the backward pass, and before the weights change: see `FiniteCheck`.
        """
        self._finite.raise_if_not()  # with accumulation, the loss of the batch before is still unchecked
        self._finite.ask(loss, f"at step {trainer.global_step} (slices: {', '.join(self._names)})")
        if not loss.is_cuda:  # a CPU has the number already
            self._finite.raise_if_not()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the loss. Log the gradient norm before clipping, its maximum in the run, lr and the mean of λ_t."""
        assert isinstance(pl_module, RunModule)
        self._finite.raise_if_not()
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norm = norm = gather(torch.nn.utils.get_total_norm(gradients))  # that of shards is itself in shards
        # The scaler skips a step whose gradient overflows. That norm would be the largest for the rest of the run.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        counted = norm.nan_to_num(nan=0.0, posinf=0.0) if scaled else norm
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
        """Log the loss of an optimizer step, the mean over its samples, after its last batch."""
        n = trainer.accumulate_grad_batches
        # Lightning has divided the loss by the batches of a step already.
        self._loss = outputs["loss"] + (self._loss if batch_idx % n else 0.0)
        if (batch_idx + 1) % n == 0:
            pl_module.log("train/loss", self._loss, batch_size=1, sync_dist=True)
