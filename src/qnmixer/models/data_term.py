"""The data term of unrolled networks: the gradient A†(A x − y), and safe step sizes along it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qnmixer.physics import FanBeamProjector
from qnmixer.physics.scan import from_columns, to_columns

DATA_TERMS = ("fbp", "adjoint")
"""The kinds of A†. fbp: filtered back-projection by the exact transpose (`filtered_adjoint`). adjoint: Aᵀ/‖A‖²."""


def data_gradient(projector: FanBeamProjector, kind: str, x: Tensor, y: Tensor | None) -> Tensor:
    """A†(A x − y), [B, 1, H, W], in float32 also under autocast. y=None means y = 0."""
    if kind == "fbp":
        return projector.filtered_residual(x, y)
    sinogram = projector(x)
    return projector.adjoint(sinogram if y is None else sinogram - y) / projector.operator_norm() ** 2


def data_descent(projector: FanBeamProjector, kind: str, x: Tensor, y: Tensor, step_sizes: Tensor) -> Tensor:
    """x − u_K after K data-fit steps u_{k+1} = u_k − λ_k A†(A u_k − y) from u_0 = x. For K = 1 it is λ_0 A†(A x − y).

    Shapes: x and the result [B, 1, H, W], y [B, 1, V, D], `step_sizes` λ [K]. It can be differentiated once. Backward
    stores one image for each of the K steps.
    """
    return _Descent.apply(x, step_sizes, y, projector, kind)


class _Descent(torch.autograd.Function):
    """x − u_K = Σ λ_k g_k, where g_k = A†(A u_k − y) is the gradient at u_k.

    Only g_0 needs y: as A†A is linear, g_{k+1} = g_k − λ_k A†A g_k. This also rounds less, because no image is
    subtracted from another. Backward is a descent of the same kind: the derivative of u_K is Π (I − λ_k A†A), and its
    factors are symmetric. For a cotangent ḡ: v_{K−1} = ḡ, and v_{k−1} = v_k − λ_k A†A v_k down to v_{−1}. Then

        x̄ = ḡ − v_{−1},  λ‾_k = v_kᵀ g_k,  ȳ = −A†ᵀ Σ λ_k v_k.

    All images are columns [H·W, B], the layout that sparse products need.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, step_sizes: Tensor, y: Tensor, projector: FanBeamProjector, kind: str) -> Tensor:
        ctx.projector, ctx.kind = projector, kind
        with torch.autocast(x.device.type, enabled=False):
            image = to_columns(x)
            gradients = image.new_empty(len(step_sizes), *image.shape)
            _gradient(projector, kind, image, y, gradients[0])
            for step_size, before, after in zip(step_sizes, gradients, gradients[1:], strict=False):
                curvature = _gradient(projector, kind, before, None)
                torch.addcmul(before, step_size, curvature, value=-1, out=after)
            ctx.save_for_backward(y, step_sizes, gradients)
            return _images(_weighted_sum(step_sizes, gradients), x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
        (cotangent,), (y, step_sizes, gradients) = cotangents, ctx.saved_tensors
        projector, kind, of_x, of_y = ctx.projector, ctx.kind, None, None
        with torch.autocast(y.device.type, enabled=False):
            v = torch.empty_like(gradients)
            v[-1] = cotangent.reshape(len(cotangent), -1).t()
            for k in range(len(v) - 1, 0, -1):
                torch.addcmul(v[k], step_sizes[k], _gradient(projector, kind, v[k], None), value=-1, out=v[k - 1])
            if ctx.needs_input_grad[0]:  # not in iteration 0: x₀ = FBP(y) is a constant
                last = torch.addcmul(v[0], step_sizes[0], _gradient(projector, kind, v[0], None), value=-1)
                of_x = cotangent - _images(last, cotangent.shape)
            of_step_sizes = torch.bmm(v.view(len(v), 1, -1), gradients.view(len(v), -1, 1)).view(-1)
            if ctx.needs_input_grad[2]:
                image = _images(_weighted_sum(step_sizes, v), cotangent.shape)
                with torch.enable_grad():
                    measured = y.detach().requires_grad_()
                    linear = data_gradient(projector, kind, torch.zeros_like(image), measured)
                (of_y,) = torch.autograd.grad(linear, measured, image)
        return of_x, of_step_sizes, of_y, None, None


def _gradient(
    projector: FanBeamProjector, kind: str, columns: Tensor, y: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """`data_gradient` for columns [H·W, B]; out: the tensor for the result."""
    if kind == "fbp":
        return projector.filtered_residual_columns(columns, y, out)
    size = projector.geometry.image_size
    result = to_columns(data_gradient(projector, kind, from_columns(columns, (1, size, size)), y))
    return result if out is None else out.copy_(result)


def _images(columns: Tensor, shape: torch.Size) -> Tensor:
    """[B, 1, H, W] as a view of columns, without a copy."""
    return columns.t().view(shape)


def _weighted_sum(weights: Tensor, columns: Tensor) -> Tensor:
    """Σ weights_k columns_k."""
    return torch.mv(columns.view(len(weights), -1).t(), weights).view(columns.shape[1:])


def safe_step_size(projector: FanBeamProjector, kind: str) -> float:
    """1 over the spectral radius of A†A. The descent x ← x − λ A†(A x − y) converges for λ below twice this value.

    Both kinds of A†A are symmetric and positive, so this bound holds on every grid.
    """
    return projector.safe_step_size() if kind == "fbp" else 1.0
