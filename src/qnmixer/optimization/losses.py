"""Training losses by name: of each image by itself, so that a batch can weigh them."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from qnmixer.config import CustomLossConfig, LossConfig, SSIMMixConfig
from qnmixer.errors import PluginError
from qnmixer.plugins import Kind, check_call, load_plugin

Loss = Callable[[Tensor, Tensor], Tensor]
"""[B] from two [B, 1, H, W], image and truth."""


def build_loss(config: LossConfig) -> Loss:
    """The training loss that `loss` names. Raises PluginError for one of the user's own that does not fit."""
    if isinstance(config, CustomLossConfig):
        return CustomLoss(config)
    if isinstance(config, SSIMMixConfig):
        from qnmixer.optimization.metrics import ssim  # torchmetrics takes seconds to import, and a plan needs none

        weight = config.ssim_weight
        return lambda image, truth: (1 - weight) * l1(image, truth) + weight * (1 - ssim(image, truth))
    return {"mse": mse, "l1": l1}[config.name]


class CustomLoss:
    """A user's own loss, whose output is checked.

    It may be a torch module. That module is no child of the one that trains, so `state_dict` does not have it. It
    follows the images to their device, and it does not learn.
    """

    _KIND = Kind(
        "a function (image, truth), nor a subclass of torch.nn.Module",
        lambda it: issubclass(it, nn.Module) if isinstance(it, type) else callable(it),
    )

    def __init__(self, config: CustomLossConfig) -> None:
        key, self.target = "loss._target_", config._target_
        loss = load_plugin(key, self.target, self._KIND)
        self.module: nn.Module | None = None
        if isinstance(loss, type):
            check_call(key, self.target, loss, (), {}, config.arguments)
            self.module = loss(**config.arguments).requires_grad_(False).eval()
            self.loss, self.arguments = self.module, {}
        else:
            check_call(key, self.target, loss, (None, None), {}, config.arguments)
            self.loss, self.arguments = loss, config.arguments

    def __call__(self, image: Tensor, truth: Tensor) -> Tensor:
        """The loss of each image. Raises PluginError where it is another number of values."""
        if self.module is not None:
            self.module.to(image.device)
        value = self.loss(image, truth, **self.arguments)
        if not isinstance(value, Tensor) or value.shape != image.shape[:1]:
            its = f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
            raise PluginError(
                f"loss._target_={self.target} gives {its} for a batch of {len(image)}: it must give [B], one number "
                "for each image"
            )
        return value


def weighted(loss: Loss, image: Tensor, truth: Tensor, weight: Tensor, batch: int) -> Tensor:
    """Σ weight · loss / batch: see `EpochSampler` for what it is the mean of."""
    return (weight * loss(image, truth)).sum() / batch


def mse(image: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(image, truth, reduction="none").mean((1, 2, 3))


def l1(image: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(image, truth, reduction="none").mean((1, 2, 3))
