"""The LightningModule: what one step of training does. Change it here, or name your own: module._target_=my_file.Mine.

The engine around it adds the rest, and needs no change: memory modes, several devices, checks of losses and gradients,
checkpoints, and the metrics in tables.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from qnmixer.batch import Batch
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.run_module import RunModule

OfEach = Callable[[Tensor, Tensor], Tensor]
"""A loss: [B], a number for each image, from images and truths [B, 1, H, W]."""

Metric = Callable[[Tensor, Batch], Tensor]
"""A metric: [B], a number for each image, from images [B, 1, H, W] and their batch, which has truths and HU scales."""


class ReconstructionModule(RunModule):
    """Learns x_T ≈ x from simulated or measured sinograms y.

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
        y = self.measure(batch, "val")
        image = self.network(y)
        values = {"loss": self.loss(image, batch["image"])}
        values |= {name: metric(image, batch) for name, metric in self.metrics.items()}
        self.log_means("val", values, counted=batch["weight"] > 0)

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, which changes at every optimizer step."""
        optimizer = self.optimizer(self.network)
        schedule = LambdaLR(optimizer, self.schedule(self.n_steps()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
