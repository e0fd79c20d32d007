"""Builds the training loss of a run. `qnmixer.losses` has ours."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qnmixer.engine.config.groups import LossConfig
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
        return one_for_each(f"loss._target_={config._target_}", value, image)

    return of_each


def one_for_each(said: str, value: Any, image: Tensor) -> Tensor:
    """The value of a loss or a metric, which must be [B]. Raises PluginError, which begins by `said`, if it is not."""
    if not isinstance(value, Tensor) or value.shape != image.shape[:1]:
        its = f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
        raise PluginError(
            f"{said} gives {its} for a batch of {len(image)}: it must give [B], one number for each image"
        )
    return value
