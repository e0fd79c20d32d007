"""Training losses: of each image by itself, so that a batch can weigh them."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from qnmixer.config.loss import LossConfig
from qnmixer.errors import PluginError
from qnmixer.plugins import Kind, check_call, load

Loss = Callable[[Tensor, Tensor], Tensor]
"""[B] from two [B, 1, H, W], image and truth."""

LOSS = Kind(
    "a function (image, truth), nor a subclass of torch.nn.Module",
    lambda it: issubclass(it, nn.Module) if isinstance(it, type) else callable(it),
)


def build_loss(config: LossConfig) -> Loss:
    """The loss that `loss` names, whose output is checked. Raises PluginError for a target that does not fit.

    It may be a torch module. That module is no child of the one that trains, so `state_dict` does not have it. It
    follows the images to their device, and it does not learn.
    """
    key, target, loss, keywords = "loss._target_", config._target_, load(config, LOSS), config.keywords()
    module: nn.Module | None = None
    if isinstance(loss, type):
        check_call(key, target, loss, (), {}, keywords)
        module = loss(**keywords).requires_grad_(False).eval()
    else:
        check_call(key, target, loss, (None, None), {}, keywords)

    def of_each(image: Tensor, truth: Tensor) -> Tensor:
        value = loss(image, truth, **keywords) if module is None else module.to(image.device)(image, truth)
        if not isinstance(value, Tensor) or value.shape != image.shape[:1]:
            its = f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            raise PluginError(
                f"{key}={target} gives {its} for a batch of {len(image)}: it must give [B], one number for each image"
            )
        return value

    return of_each


def weighted(loss: Loss, image: Tensor, truth: Tensor, weight: Tensor, batch: int) -> Tensor:
    """Σ weight · loss / batch: see `EpochSampler` for what it is the mean of."""
    return (weight * loss(image, truth)).sum() / batch


def mse(image: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(image, truth, reduction="none").mean((1, 2, 3))


def l1(image: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(image, truth, reduction="none").mean((1, 2, 3))


def ssim_mix(image: Tensor, truth: Tensor, ssim_weight: float) -> Tensor:
    """(1 − weight) · L1 + weight · (1 − SSIM)."""
    from qnmixer.optimization.metrics import ssim  # takes a second to import, and most plans need no SSIM

    return (1 - ssim_weight) * l1(image, truth) + ssim_weight * (1 - ssim(image, truth))
