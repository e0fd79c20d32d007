"""The LightningModule: what one step of training does. Change it here, or name your own: module._target_=my_file.Mine.

The run around it adds the rest, and needs no change: memory modes, several devices, checks of losses and gradients,
checkpoints, and the metrics in tables.
"""

import copy
import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import qnmixer.needs_train  # noqa: F401

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn.functional import grid_sample
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from qnmixer.data.batch import Batch
from qnmixer.evaluation.metrics import psnr, ssim_percent
from qnmixer.losses import mse
from qnmixer.measurement.measurement import part_of
from qnmixer.models.data_term import safe_step_size
from qnmixer.models.unrolled import UnrolledNetwork, at_image
from qnmixer.module.base import RunModule
from qnmixer.parallel.torch_private import no_dispatch
from qnmixer.physics import FanBeamProjector
from qnmixer.schedules import constant
from qnmixer.settings.logged_names import RESIDUAL

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

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Loss and metrics of each image, whose means are logged as val/NAME, of several loaders as val/NAME/LOADER.

        With monitor=val/residual, and where there is no truth, also `Measurement.residual`.
        """
        self._score(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation_step, for `Trainer.test` of a script. A run evaluates its best checkpoint by itself."""
        self._score(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """x_T [B, 1, H, W] of a batch, from its sinograms, or from those that are simulated from its images."""
        return self.network(self.measure(batch, "test"))

    def _score(self, batch: Batch, stream: str) -> None:
        y, values = self.measure(batch, stream), dict[str, Tensor]()
        if "image" in batch:
            image = self.network(y)
            values["loss"] = self.loss(image, batch["image"])
            values |= {name: metric(image, batch) for name, metric in self.metrics.items()}
        if "image" not in batch or (self.settings and self.config.monitor == f"val/{RESIDUAL}"):
            values[RESIDUAL] = self.measurement.residual(self.network, y)
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

    takes_stages = False

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

    takes_stages = False

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


class Split(ReconstructionModule):
    """Trains without truth: the network sees a part of the views, and the loss is on the rays of the others.

    As Yaman et al., Magn. Reson. Med. 84 (2020) 3172–3191, do with k-space. The noise of these rays is independent of
    what the network sees. So the expected gradient is that of the loss with their noiseless values, for a network
    whose derivative does not depend on the loss. (At black pixels that of `nonnegative` does.) The squared error of
    each ray is divided by its variance, by `noise` and y: 1 is then what the best image would have. Where this variance
    follows the noise of y itself, as with photon counts, the above holds to first order. Without a known noise all
    rays count alike. No step reads `batch["image"]`. Validation is with all views.

    Part k of n has the views k, k + n, k + 2n, … All have as many: what n does not divide is left out of training, at
    the end of the scan. In a step k is drawn by seed and optimizer step alone. So it is the same on all devices, in
    each batch of an accumulated step, and after a resume. A† of a part is scaled so that λ_t stays as near to its bound
    as with all views.

    Args:
        network: its projector is that of a part from the forward pass to the end of the backward pass.
        parts: n. The network sees one part, all others are the target.
        others: as of `ReconstructionModule`; `loss` is of validation alone.

    Raises GeometryError for fewer than n views.
    """

    takes_scans = takes_stages = False

    def __init__(self, network: UnrolledNetwork[Any], parts: Annotated[int, Ge(2)] = 2, **others: Any) -> None:
        super().__init__(network, **others)
        self.whole = copy.copy(network.projector)
        self.parts = nn.ModuleList(projectors_of_parts(self.whole, parts) if parts > 1 else [self.whole])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the images of the loss on the rays that the network did not see."""
        _, losses = self.prediction(self.measure(batch, "train"))
        return (batch["weight"] * losses).mean()

    def prediction(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The images [B, 1, H, W] from a part of y [B, 1, V, D], and their loss [B] on the rays of the other parts."""
        n, measurement = len(self.parts), getattr(self, "measurement", None)  # a script may call this before `measure`
        k = random.Random(f"part {self.network.step_key}").randrange(n)
        self.network.projector.become(self.parts[k])  # type: ignore[arg-type]  # a ModuleList has no type of its own
        n_views = n * self.network.projector.geometry.n_views
        image, y = self.network(y[:, :, k:n_views:n]), y[:, :, :n_views]
        variance = measurement.noise.variance(y) if measurement else torch.zeros_like(y)
        squares = (self.whole(image)[:, :, :n_views] - y).square() / torch.where(variance > 0, variance, 1)
        of_parts = squares.unflatten(2, (-1, n)).mean((1, 2, 4))  # [B, n]
        return image, torch.stack([of_parts[:, j] for j in range(n) if j != k or n == 1]).mean(0)

    def measure(self, batch: Batch, stream: str) -> Tensor:
        """As of a `RunModule`. The network has all views again."""
        self.network.projector.become(self.whole)
        return super().measure(batch, stream)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Give the network all views again. Up to here the backward pass may have needed those of the part."""
        self.network.projector.become(self.whole)
        super().on_train_batch_end(outputs, batch, batch_idx)


def projectors_of_parts(projector: FanBeamProjector, n: int) -> list[FanBeamProjector]:
    """The projectors of each n-th view of a scan, from view 0, 1, … n − 1 on; see `Split`."""
    with no_dispatch():  # a plan has tensors without data, but needs real matrices
        parts = [part_of(projector, n, k) for k in range(n)]
        for part in parts:
            part.operator_norm()  # computed here, because a plan could not
    return parts


class Equivariant(Split):
    """Trains without truth: A x̂ fits y, and the network finds a moved image again: ‖T x̂ − f(A T x̂)‖² is small.

    T turns x̂ by any angle and shifts it, by Chen, Tachella and Davies, "Equivariant Imaging: Learning Beyond the Range
    Space", ICCV 2021. So the scan at A T sees what A does not, if T is no symmetry of the scan: for the quarter turns
    and flips that map the rays onto each other, A T is A with its rays in another order. Then A T and A have the same
    null space, and nothing is learned there.

    With noise, ‖A x̂ − y‖² on rays that the network sees fits their noise too (the same authors, "Robust Equivariant
    Imaging", CVPR 2022, who take SURE). The variance weights the rays, and does not cure this. `parts` above 1 does:
    then the fit is on rays that the network does not see, as in `Split`, and A T x̂ has the views of the part. No noise
    is added to it.

    T is drawn by seed and optimizer step, for all images of a batch. A step takes memory and time of two networks.
    `trainer.deterministic=true` is refused by torch on a GPU: the derivative of its interpolation adds in any order.

    Args:
        network: it is called twice in a step.
        parts: as of `Split`; 1: the network sees all views, and the fit is on all.
        alpha: times ‖T x̂ − f(A T x̂)‖², a mean over pixels, beside the mean over rays in units of the noise.
        shift: the largest shift of T along each axis, as a share of the width of the image.
        others: as of `ReconstructionModule`; `loss` is of validation alone.
    """

    def __init__(
        self,
        network: UnrolledNetwork[Any],
        parts: Annotated[int, Ge(1)] = 1,
        alpha: Annotated[float, Gt(0)] = 100000.0,
        shift: Annotated[float, Ge(0), Le(0.5)] = 0.05,
        **others: Any,
    ) -> None:
        super().__init__(network, parts, **others)
        self.alpha, self.shift = alpha, shift

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the images of both losses."""
        image, losses = self.prediction(self.measure(batch, "train"))
        moved = self.moved(image)
        again = self.network(self.network.projector(moved))
        losses = losses + self.alpha * (again - moved).square().mean((1, 2, 3))
        return (batch["weight"] * losses).mean()

    def moved(self, image: Tensor) -> Tensor:
        """T x̂ of images [B, 1, S, S], with 0 outside of them; in float32 at least, also under autocast."""
        rng = random.Random(f"motion {self.network.step_key}")
        angle = rng.uniform(0, 2 * math.pi)
        right, down = (2 * self.shift * rng.uniform(-1, 1) for _ in range(2))  # the image is from −1 to 1
        image = image.to(torch.promote_types(image.dtype, torch.float32))
        axis = (torch.arange(image.shape[-1]).to(image) + 0.5) * (2 / image.shape[-1]) - 1
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        cos, sin = math.cos(angle), math.sin(angle)
        grid = torch.stack([cos * x - sin * y + right, sin * x + cos * y + down], dim=-1)
        return grid_sample(image, grid.expand(len(image), -1, -1, -1), align_corners=False)
