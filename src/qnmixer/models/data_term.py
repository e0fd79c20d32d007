"""The data term of unrolled networks: the gradient A†(A x − y), and safe step sizes along it."""

import torch
from torch import Tensor

from qnmixer.physics import FanBeamProjector

DATA_TERMS = ("fbp", "adjoint")
"""What A† may be: filtered back-projection by the exact transpose (`filtered_adjoint`), or Aᵀ/‖A‖²."""


def data_gradient(projector: FanBeamProjector, kind: str, x: Tensor, y: Tensor) -> Tensor:
    """A†(A x − y), [B, 1, H, W]; in float32 whatever the autocast."""
    if kind == "fbp":
        return projector.filtered_residual(x, y)
    return projector.adjoint(projector(x) - y) / projector.operator_norm() ** 2


def data_descent(projector: FanBeamProjector, kind: str, x: Tensor, y: Tensor, step_sizes: Tensor) -> Tensor:
    """x − u_K, [B, 1, H, W], where u_0 = x and u_{k+1} = u_k − λ_k A†(A u_k − y), for λ [K]; λ_0 A†(A x − y) for K = 1.

    As A is linear, backward keeps one image for each of the K steps and nothing else.
    """
    first, *others = step_sizes
    descent = first * data_gradient(projector, kind, x, y)
    for step_size in others:
        descent = torch.addcmul(descent, step_size, data_gradient(projector, kind, x - descent, y))
    return descent


def safe_step_size(projector: FanBeamProjector, kind: str) -> float:
    """1 over the spectral radius of A†A, half the largest λ at which x − λ A†(A x − y) converges.

    Both kinds of A†A are symmetric and positive, so this radius alone bounds the step: on no grid does an error grow.
    """
    return projector.safe_step_size() if kind == "fbp" else 1.0
