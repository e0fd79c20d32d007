"""Training losses. Each image of a batch has a loss of its own, so a batch can weight its images.

Your own is a function (image, truth, **arguments) → [B], from images [B, 1, H, W]: loss._target_=my_file.huber.
"""

from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F


def mse(image: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(image, truth, reduction="none").mean((1, 2, 3))


def l1(image: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(image, truth, reduction="none").mean((1, 2, 3))


def ssim_mix(image: Tensor, truth: Tensor, ssim_weight: Annotated[float, Ge(0), Le(1)]) -> Tensor:
    """(1 − weight) · L1 + weight · (1 − SSIM)."""
    # Imported here, because it takes a second and few runs need SSIM.
    from qnmixer.evaluation.metrics import ssim

    return (1 - ssim_weight) * l1(image, truth) + ssim_weight * (1 - ssim(image, truth))
