"""Training losses by name: of each image by itself, so that a batch can weigh them."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from qnmixer.config import LossConfig, SSIMMixConfig
from qnmixer.optimization.metrics import ssim

Loss = Callable[[Tensor, Tensor], Tensor]
"""[B] from two [B, 1, H, W], image and truth."""


def build_loss(config: LossConfig) -> Loss:
    """The training loss that `loss` names."""
    if isinstance(config, SSIMMixConfig):
        weight = config.ssim_weight
        return lambda image, truth: (1 - weight) * l1(image, truth) + weight * (1 - ssim(image, truth))
    return {"mse": mse, "l1": l1}[config.name]


def weighted(loss: Loss, image: Tensor, truth: Tensor, weight: Tensor, batch: int) -> Tensor:
    """Σ weight · loss / batch: see `EpochSampler` for what it is the mean of."""
    return (weight * loss(image, truth)).sum() / batch


def mse(image: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(image, truth, reduction="none").mean((1, 2, 3))


def l1(image: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(image, truth, reduction="none").mean((1, 2, 3))
