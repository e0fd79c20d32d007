"""Training losses. Each image of a batch has a loss of its own, so a batch can weight its images."""

from collections.abc import Callable
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F

from qnmixer.config.groups import LossConfig
from qnmixer.errors import PluginError

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss: [B] from image and truth, both [B, 1, H, W]."""


def build_loss(config: LossConfig) -> Loss:
    """Build the loss that `loss` names, with a check of its output. Raises PluginError for a target that does not fit.

    A loss that is a torch module is no child of the Lightning module, so `state_dict` does not contain it. It follows
    the images to their device. It is not trained.
    """
    loss = config.build() if config.is_class else config.bound()
    if isinstance(loss, nn.Module):
        loss.requires_grad_(False).eval()

    def of_each(image: Tensor, truth: Tensor) -> Tensor:
        value = (loss.to(image.device) if isinstance(loss, nn.Module) else loss)(image, truth)
        if not isinstance(value, Tensor) or value.shape != image.shape[:1]:
            its = f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            raise PluginError(
                f"loss._target_={config._target_} gives {its} for a batch of {len(image)}: it must give [B], one "
                "number for each image"
            )
        return value

    return of_each


def mse(image: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(image, truth, reduction="none").mean((1, 2, 3))


def l1(image: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(image, truth, reduction="none").mean((1, 2, 3))


def ssim_mix(image: Tensor, truth: Tensor, ssim_weight: Annotated[float, Ge(0), Le(1)]) -> Tensor:
    """(1 − weight) · L1 + weight · (1 − SSIM)."""
    from qnmixer.optimization.metrics import ssim  # imported here, because it takes a second and few runs need SSIM

    return (1 - ssim_weight) * l1(image, truth) + ssim_weight * (1 - ssim(image, truth))
