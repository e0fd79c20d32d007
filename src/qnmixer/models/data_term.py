"""The data term of unrolled networks: the gradient A†(A x − y), and safe step sizes along it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qnmixer.physics import FanBeamProjector

DATA_TERMS = ("fbp", "adjoint")
"""What A† may be: filtered back-projection by the exact transpose (`filtered_adjoint`), or Aᵀ/‖A‖²."""


def data_gradient(projector: FanBeamProjector, kind: str, x: Tensor, y: Tensor | None) -> Tensor:
    """A†(A x − y), [B, 1, H, W]; in float32 whatever the autocast. y=None: 0."""
    if kind == "fbp":
        return projector.filtered_residual(x, y)
    sinogram = projector(x)
    return projector.adjoint(sinogram if y is None else sinogram - y) / projector.operator_norm() ** 2


def data_descent(projector: FanBeamProjector, kind: str, x: Tensor, y: Tensor, step_sizes: Tensor) -> Tensor:
    """x − u_K, [B, 1, H, W], where u_0 = x and u_{k+1} = u_k − λ_k A†(A u_k − y), for λ [K]; λ_0 A†(A x − y) for K = 1.

    Differentiable once. Backward keeps one image for each of the K steps.
    """
    return _Descent.apply(x, step_sizes, y, projector, kind)


class _Descent(torch.autograd.Function):
    """x − u_K and its backward, which goes down too: the derivative of u_K is Π (I − λ_k A†A), of symmetric factors.

    For a cotangent ḡ: v_{K−1} = ḡ, v_{k−1} = v_k − λ_k A†A v_k down to v_{−1};
    x̄ = ḡ − v_{−1},  λ‾_k = v_kᵀ A†(A u_k − y),  ȳ = −A†ᵀ Σ λ_k v_k.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, step_sizes: Tensor, y: Tensor, projector: FanBeamProjector, kind: str) -> Tensor:
        ctx.projector, ctx.kind = projector, kind
        first, *others = step_sizes
        gradients = [data_gradient(projector, kind, x, y)]
        descent = first * gradients[0]  # and not u, as the difference of two images would round more
        for step_size in others:
            gradients.append(data_gradient(projector, kind, x - descent, y))
            descent = torch.addcmul(descent, step_size, gradients[-1])
        ctx.save_for_backward(y, step_sizes, *gradients)
        return descent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        (v,), (y, step_sizes, *gradients) = cotangents, ctx.saved_tensors
        of_step_sizes, of_gradients = [], []
        for step_size, gradient in zip(reversed(step_sizes), reversed(gradients), strict=True):
            of_step_sizes.append(torch.dot(v.flatten(), gradient.flatten()))
            if ctx.needs_input_grad[2]:
                of_gradients.append(step_size * v)
            if len(of_step_sizes) == len(gradients) and not ctx.needs_input_grad[0]:
                break  # x₀ of FBP is a constant
            v = torch.addcmul(v, step_size, data_gradient(ctx.projector, ctx.kind, v, None), value=-1)
        of_y = None
        if of_gradients:
            with torch.enable_grad():
                measured = y.detach().requires_grad_()
                linear = data_gradient(ctx.projector, ctx.kind, torch.zeros_like(v), measured)
            (of_y,) = torch.autograd.grad(linear, measured, sum(of_gradients))
        return cotangents[0] - v, torch.stack(of_step_sizes[::-1]), of_y, None, None


def safe_step_size(projector: FanBeamProjector, kind: str) -> float:
    """1 over the spectral radius of A†A, half the largest λ at which x − λ A†(A x − y) converges.

    Both kinds of A†A are symmetric and positive, so this radius alone bounds the step: on no grid does an error grow.
    """
    return projector.safe_step_size() if kind == "fbp" else 1.0
