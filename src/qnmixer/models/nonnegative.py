"""max(0, x), because attenuation is not negative, with a gradient for images that became black."""

from typing import Any

import torch
from torch import Tensor


class _Nonnegative(torch.autograd.Function):
    """max(0, x). Its backward drops only the gradient that would lower a pixel that is 0 already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        image = x.clamp_min(0)
        ctx.save_for_backward(image)
        return image

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (image,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient.masked_fill((image == 0) & (gradient > 0), 0)


def nonnegative(x: Tensor) -> Tensor:
    """max(0, x), with a gradient also at pixels below 0 that should rise.

    The derivative of max(0, x) is 0 below 0. So an image that one bad step has pushed below 0 everywhere gets no
    gradient and stays black. Here the gradient of a black pixel passes if descent would raise the pixel. It is 0 if
    descent would lower the pixel. Above 0 it is the true gradient (ours; a one-sided form of the straight-through
    estimator of Bengio, Léonard and Courville 2013).
    """
    return _Nonnegative.apply(x)


def rectified(x: Tensor, last: bool) -> Tensor:
    """max(0, x) at the end of an iteration; in the last one `nonnegative`, because its image is that of the loss."""
    return nonnegative(x) if last else torch.relu(x)
