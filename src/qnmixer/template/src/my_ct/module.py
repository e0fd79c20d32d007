"""The LightningModule: what a step of training and of validation does, and what optimizes."""

from collections.abc import Callable, Mapping
from typing import Any

from qnmixer.lightning import Batch, RunModule
from qnmixer.models import UnrolledNetwork
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

OfEach = Callable[[Tensor, Tensor], Tensor]
"""A loss: [B], a number for each image, from images and truths [B, 1, H, W]."""

Metric = Callable[[Tensor, Batch], Tensor]
"""A metric: [B], a number for each image, from images [B, 1, H, W] and their batch."""


class MyModule(RunModule):
    """Learns x_T ≈ x from sinograms y. A run builds its parts from conf/, and hands them over.

    Args:
        network: y [B, 1, V, D] → x_T [B, 1, H, W].
        loss: of each image.
        optimizer: builds the optimizer for a network.
        schedule: from the number of steps of a run, the factor on the learning rate at each step.
        metrics: of each image, by name, for validation.

    An argument of your own is a key: `def __init__(self, weight: float, **parts)` and module.weight=0.1.
    """

    def __init__(
        self,
        network: UnrolledNetwork[Any],
        loss: OfEach,
        optimizer: Callable[[UnrolledNetwork[Any]], Optimizer],
        schedule: Callable[[int], Callable[[int], float]],
        metrics: Mapping[str, Metric],
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.metrics = metrics

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from y [B, 1, V, D]."""
        return self.network(y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch: a mean over its images.

        The weights make it right for every number of devices, also in the last, smaller batch. Terms that you add
        should be means over images too. For a loss on all iterates, use self.network.iterates(y).
        """
        y = self.measure(batch, "train")  # the sinograms [B, 1, V, D], with noise
        image = self.network(y)
        return (batch["weight"] * self.loss(image, batch["image"])).mean()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Loss and metrics of each image. Their means over all devices are logged as val/NAME."""
        y = self.measure(batch, "val")
        image = self.network(y)
        values = {"loss": self.loss(image, batch["image"])}
        values |= {name: metric(image, batch) for name, metric in self.metrics.items()}
        self.log_means("val", values, counted=batch["weight"] > 0)

    def configure_optimizers(self) -> Any:
        """The optimizer, and its schedule, which changes at every step."""
        optimizer = self.optimizer(self.network)
        schedule = LambdaLR(optimizer, self.schedule(self.n_steps()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
