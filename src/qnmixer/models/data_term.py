"""The data term ½‖A x − y‖² of unrolled networks: the gradient to step along, and max(0, x) at the end of a step."""

from typing import Any

import torch
from torch import Tensor

from qnmixer.models.unrolled import DataTerm, Projector, UnrolledNetwork


def data_gradient(projector: Projector, kind: DataTerm, x: Tensor, y: Tensor) -> Tensor:
    """A†(A x − y), [B, 1, H, W], in float32 also under autocast."""
    if kind == "fbp":
        return projector.filtered_residual(x, y)
    return back_projection(projector, kind, projector(x) - y)


def back_projection(projector: Projector, kind: DataTerm, y: Tensor) -> Tensor:
    """A† y, [B, 1, H, W]."""
    if kind == "fbp":
        return projector.filtered_adjoint(y)
    return projector.adjoint(y) / projector.operator_norm() ** 2


def safe_step_size(projector: Projector, kind: DataTerm) -> float:
    """1 over the spectral radius of A†A. The descent x ← x − λ A†(A x − y) converges for λ below twice this value.

    Both kinds of A†A are symmetric and positive, so this bound holds on every grid.
    """
    return projector.safe_step_size() if kind == "fbp" else 1.0


@torch.no_grad()
def follow_scan(network: UnrolledNetwork[Any], trained: Projector) -> float:
    """Fit the step sizes of a network to its scan, if it was trained with another one. Returns the factor on them.

    The largest eigenvalue of A†A follows the scan: at 256 × 256 it is 21.5, 9.2 and 5.4 with 32, 64 and 128 views. A λ
    near its bound for 64 views diverges with 48. So each λ keeps its ratio to `safe_step_size`. The factor is 1 for
    Aᵀ/‖A‖², which has its scale from the scan, and for a network without λ.
    """
    if not network.step_sizes:
        return 1.0
    factor = safe_step_size(network.projector, network.data_term) / safe_step_size(trained, network.data_term)
    for step_size in network.step_sizes:
        step_size.mul_(factor)
    return factor


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
