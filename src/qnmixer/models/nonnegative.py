"""max(0, x) with a gradient that training can recover by: attenuation is not negative."""

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
    """max(0, x), with a gradient where a pixel below 0 ought to rise.

    The derivative of max(0, x) is 0 below 0, so an image that one bad step has pushed below 0 everywhere gets no
    gradient and stays black for good. Here the gradient passes wherever descent along it raises the pixel. It is the
    true gradient elsewhere, and zero at a pixel that is black and ought to be (ours; a one-sided form of the
    straight-through estimator of Bengio, Léonard and Courville 2013).
    """
    return _Nonnegative.apply(x)


def rectified(x: Tensor, last: bool) -> Tensor:
    """max(0, x) that closes an iteration; of the last one `nonnegative`, as only its image gets the loss's gradient."""
    return nonnegative(x) if last else torch.relu(x)
