"""Training losses. Each image of a batch has a loss of its own, so a batch can weight its images."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from qnmixer.config.loss import LossConfig
from qnmixer.errors import PluginError
from qnmixer.plugins import Kind, check_call, load

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss: [B] from image and truth, both [B, 1, H, W]."""

LOSS = Kind(
    "a function (image, truth), nor a subclass of torch.nn.Module",
    lambda it: issubclass(it, nn.Module) if isinstance(it, type) else callable(it),
)


def build_loss(config: LossConfig) -> Loss:
    """Build the loss that `loss` names, with a check of its output. Raises PluginError for a target that does not fit.

    A loss that is a torch module is no child of the Lightning module, so `state_dict` does not contain it. It follows
    the images to their device. It is not trained.
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


def mse(image: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(image, truth, reduction="none").mean((1, 2, 3))


def l1(image: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(image, truth, reduction="none").mean((1, 2, 3))


def ssim_mix(image: Tensor, truth: Tensor, ssim_weight: float) -> Tensor:
    """(1 − weight) · L1 + weight · (1 − SSIM)."""
    from qnmixer.optimization.metrics import ssim  # imported here, because it takes a second and few runs need SSIM

    return (1 - ssim_weight) * l1(image, truth) + ssim_weight * (1 - ssim(image, truth))
