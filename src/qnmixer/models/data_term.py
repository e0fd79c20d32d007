"""The data term ½‖A x − y‖² of unrolled networks: the gradient to step along, and max(0, x) at the end of a step."""

from typing import Any

import torch
from torch import Tensor

from qnmixer.models.unrolled import Projector, check_choice

DATA_TERMS = ("fbp", "adjoint")
"""The kinds of A†. fbp: filtered back-projection by the exact transpose (`filtered_adjoint`). adjoint: Aᵀ/‖A‖²."""


def data_gradient(projector: Projector, kind: str, x: Tensor, y: Tensor) -> Tensor:
    """A†(A x − y), [B, 1, H, W], in float32 also under autocast."""
    if kind == "fbp":
        return projector.filtered_residual(x, y)
    return back_projection(projector, kind, projector(x) - y)


def back_projection(projector: Projector, kind: str, y: Tensor) -> Tensor:
    """A† y, [B, 1, H, W]. Raises ConfigError for a kind that is not known."""
    check_choice("data_term", kind, DATA_TERMS)
    if kind == "fbp":
        return projector.filtered_adjoint(y)
    return projector.adjoint(y) / projector.operator_norm() ** 2


def safe_step_size(projector: Projector, kind: str) -> float:
    """1 over the spectral radius of A†A. The descent x ← x − λ A†(A x − y) converges for λ below twice this value.

    Both kinds of A†A are symmetric and positive, so this bound holds on every grid.
    """
    return projector.safe_step_size() if kind == "fbp" else 1.0


class _Nonnegative(torch.autograd.Function):
    """max(0, x). Its backward drops only the gradient that would lower a pixel that is 0 already."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp_min(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (image,) = ctx.saved_tensors
        (gradient,) = gradients
        # Descent subtracts the gradient, so a positive one would push the pixel below 0.
        return gradient.masked_fill((image == 0) & (gradient > 0), 0)


def nonnegative(x: Tensor) -> Tensor:
    """max(0, x), with a gradient also at pixels below 0 that should rise.

    The derivative of max(0, x) is 0 below 0. So an image that one bad step has pushed below 0 everywhere gets no
    gradient and stays black. Here the gradient of a black pixel passes if descent would raise the pixel. It is 0 if
    descent would lower the pixel. Above 0 it is the true gradient (ours; a one-sided form of the straight-through
    estimator of Bengio, Léonard and Courville 2013). No plain form of it exists: it depends on the gradient itself.
    """
    return _Nonnegative.apply(x)


def rectified(x: Tensor, is_last: bool) -> Tensor:
    """max(0, x) at the end of an iteration; in the last one `nonnegative`, because its image is that of the loss."""
    return nonnegative(x) if is_last else torch.relu(x)
