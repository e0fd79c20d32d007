"""An exponential moving average of the weights: a run validates, saves and evaluates the average."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qnmixer.weights import MEAN_KEY, TRAINED_KEY


class MeanWeights(Callback):
    """Validation and checkpoints use the mean of the weights. Training continues with the weights themselves.

    Lightning's own callback would copy the scan's matrix too. It also swaps the two sets of weights in a checkpoint
    that is written during a validation.

    Args:
        decay: the share of the old mean that remains after a step.
        start: optimizer steps after which averaging starts.
    """

    def __init__(self, decay: float = 0.999, start: int = 0) -> None:
        if not 0 <= decay < 1 or start < 0:
            raise ValueError("decay must be from 0 to below 1, and start must be 0 or more")
        self.decay, self.start = decay, start
        self.mean: dict[str, Tensor] = {}
        self._swapped = False

    @torch.no_grad()
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start from the mean in the checkpoint, or from the weights of the network."""
        weights = {name: p.detach() for name, p in pl_module.named_parameters()}
        self.mean = {name: self.mean.get(name, p).to(p.device, copy=True) for name, p in weights.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the mean after an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        # Before `start` the mean follows the weights, because a mean of bad first weights would last long.
        share = 1.0 if trainer.global_step <= self.start else 1 - self.decay
        for name, parameter in pl_module.named_parameters():
            self.mean[name].lerp_(parameter, share)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the mean into the network."""
        self._swap(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the trained weights back."""
        self._swap(pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the mean as the weights, for every reader of a checkpoint, and the trained weights beside it."""
        if not self.mean:
            return
        now = {name: p.detach() for name, p in pl_module.named_parameters()}
        trained, mean = (self.mean, now) if self._swapped else (now, self.mean)
        checkpoint[TRAINED_KEY] = trained
        checkpoint["state_dict"] = checkpoint["state_dict"] | mean

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the mean; the weights themselves in a checkpoint of a run without this callback."""
        self.mean = checkpoint[MEAN_KEY]

    @torch.no_grad()
    def _swap(self, pl_module: L.LightningModule) -> None:
        self._swapped = not self._swapped
        for name, parameter in pl_module.named_parameters():
            if name in self.mean:
                before = parameter.detach().clone()
                parameter.copy_(self.mean[name])
                self.mean[name].copy_(before)
