"""The LightningModule: what one step of training does. Change it here, or name your own: module._target_=my_file.Mine.

The run around it adds the rest, and needs no change: memory modes, several devices, checks of losses and gradients,
checkpoints, and the metrics in tables.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import qnmixer.needs_train  # noqa: F401

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from qnmixer.data.batch import Batch
from qnmixer.evaluation.metrics import psnr, ssim_percent
from qnmixer.losses import mse
from qnmixer.models.data_term import safe_step_size
from qnmixer.models.unrolled import UnrolledNetwork, at_image
from qnmixer.module.base import RunModule
from qnmixer.schedules import constant

OfEach = Callable[[Tensor, Tensor], Tensor]
"""A loss: [B], a number for each image, from images and truths [B, 1, H, W]."""

Metric = Callable[[Tensor, Batch], Tensor]
"""A metric: [B], a number for each image, from images [B, 1, H, W] and their batch, which has truths and HU scales."""


def adamw(network: UnrolledNetwork[Any]) -> Optimizer:
    """AdamW at torch's rate of 1e-3."""
    return AdamW(network.parameters())


def same_rate(n_steps: int) -> Callable[[int], float]:
    """The same learning rate in all steps of a run."""
    return partial(constant, n_steps=n_steps)


METRICS: dict[str, Metric] = {
    "psnr": lambda image, batch: psnr(image, batch["image"]),
    "ssim": lambda image, batch: ssim_percent(image, batch["image"]),
}
"""PSNR in dB and SSIM × 100, both at a data range of 1."""


class ReconstructionModule(RunModule):
    """Learns x_T ≈ x from simulated or measured sinograms y.

    A run builds all arguments from its config. The defaults are for scripts.

    Args:
        network: y [B, 1, V, D] → x_T [B, 1, H, W].
        loss: of each image.
        optimizer: builds the optimizer for a network.
        schedule: from the number of steps of a run, the factor on the learning rate at each step.
        metrics: of each image, by name, for validation.
    """

    def __init__(
        self,
        network: UnrolledNetwork[Any],
        loss: OfEach = mse,
        optimizer: Callable[[UnrolledNetwork[Any]], Optimizer] = adamw,
        schedule: Callable[[int], Callable[[int], float]] = same_rate,
        metrics: Mapping[str, Metric] = METRICS,
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.metrics = metrics
        self.learning_rate: float | None = None  # of Lightning's LR finder, in place of the optimizer's own

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from y [B, 1, V, D]."""
        return self.network(y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch: its mean over the images.

        The weights make this right for every number of devices, also in the last, smaller batch (`EpochSampler`). In a
        pipeline the batch is a micro-batch, and the losses of micro-batches are averaged. So add terms that are means
        over images, too. What you add is trained with every strategy, and counts in the memory that `plan` predicts.
        """
        y = self.measure(batch, "train")
        image = self.network(y)
        return (batch["weight"] * self.loss(image, batch["image"])).mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and metrics of each image, whose means are logged as val/NAME."""
        self._score(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation_step, for `Trainer.test` of a script. A run evaluates its best checkpoint by itself."""
        self._score(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """x_T [B, 1, H, W] of a batch, from its sinograms, or from those that are simulated from its images."""
        return self.network(self.measure(batch, "test"))

    def _score(self, batch: Batch, stream: str) -> None:
        y = self.measure(batch, stream)
        image = self.network(y)
        values = {"loss": self.loss(image, batch["image"])}
        values |= {name: metric(image, batch) for name, metric in self.metrics.items()}
        self.log_means(stream, values, counted=batch["weight"] > 0)

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, which changes at every optimizer step."""
        optimizer = self.optimizer(self.network)
        for group in optimizer.param_groups if self.learning_rate is not None else []:
            group["lr"] *= self.learning_rate / optimizer.defaults["lr"]
        schedule = LambdaLR(optimizer, self.schedule(self.n_steps()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AllIterates(ReconstructionModule):
    """Trains on x_1 … x_T, all with the same weight, in place of x_T alone. Validation is of x_T."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean of the losses of x_1 … x_T, over the iterations and the images."""
        _, *iterates = self.network.iterates(self.measure(batch, "train"))
        losses = torch.stack([self.loss(image, batch["image"]) for image in iterates])
        return (batch["weight"] * losses).mean()


class Passes(ReconstructionModule):
    """Trains on x_T and on that of further passes, each of which starts at the image of the one before.

    So a reconstruction with passes=, as on other scans, meets what the network has learned. Validation is of one pass.

    Args:
        network: with a start, whose image can be another.
        n_passes: in each step. Memory and time are those of so many networks.
        step_penalty: times the sum of max(0, λ_t ρ − 2)² over the step sizes, with ρ the largest eigenvalue of A†A. Its
            eigenvector grows in a step with λ_t ρ above 2, and on another scan nothing may damp it.
        parts: as of `ReconstructionModule`.
    """

    def __init__(
        self, network: UnrolledNetwork[Any], n_passes: int = 2, step_penalty: float = 0.0, **parts: Any
    ) -> None:
        super().__init__(network, **parts)
        self.n_passes, self.step_penalty = n_passes, step_penalty

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean of the losses of all passes, over the passes and the images, with the penalty."""
        y, network = self.measure(batch, "train"), self.network
        image = network(y)
        losses = [self.loss(image, batch["image"])]
        for _ in range(self.n_passes - 1):
            state = at_image(network.start(y), image)
            image = network.image(network.loop(network, range(network.n_iterations), y, state))
            losses.append(self.loss(image, batch["image"]))
        safe = safe_step_size(network.projector, network.data_term)
        beyond = [(step / safe - 2).relu().square().sum() for step in network.step_sizes]
        return (batch["weight"] * torch.stack(losses)).mean() + self.step_penalty * sum(beyond)
