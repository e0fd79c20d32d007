"""Total variation by the primal-dual method of Chambolle and Pock (2011), as Sidky, Jørgensen and Pan (2012) use it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamProjector

# Of 1, 3, 10, 30, 100 and 300 the one that brings 200 iterations nearest to the minimum over weights from 1e-5 to 1e-2.
_TAU = 10.0
_SIGMA = 0.5 / _TAU

_GRADIENT_NORM = math.sqrt(8)  # ‖∇‖ of forward differences in two dimensions is at most this


class TVState(NamedTuple):
    """Primal and dual variables."""

    x: Tensor  # [B, 1, H, W]
    extrapolated: Tensor  # [B, 1, H, W], x̄
    p: Tensor  # [B, 1, V, D], dual to the data
    q: Tensor  # [B, 2, H, W], dual to the gradient


class TotalVariation(UnrolledNetwork[TVState]):
    """min over x ≥ 0 of ½‖K x − f‖² + α·TV(x), with K = A/‖A‖ and f = y/‖A‖; T iterations from FBP(y). No weights.

    TV(x) = Σ |∇x| is isotropic, with forward differences and none across the border. As ‖K‖ = 1, α weighs against the
    image itself, whatever the scan's scale. With ∇' = ∇/√8, so that ‖∇'‖ ≤ 1 too and 2στ = 1 is safe, an iteration is:
    p ← (p + σ(K x̄ − f))/(1 + σ); q ← q + σ∇'x̄, cut to length √8·α at each pixel; x⁺ = max(0, x − τ(Kᵀp + ∇'ᵀq));
    x̄ ← 2x⁺ − x.

    Args:
        projector: A, Aᵀ and FBP of the scan.
        n_iterations: T.
        weight: α, in units of the image's values.
    """

    title = "TV"

    def __init__(self, projector: FanBeamProjector, n_iterations: int = 200, weight: float = 1e-4) -> None:
        super().__init__(n_iterations)
        self.projector = projector
        self.weight = weight

    def start(self, y: Tensor) -> TVState:
        """x₀ = FBP(y) without what is negative, and dual variables of zero."""
        x = self.projector.fbp(y).clamp_min(0)
        return TVState(x, x, torch.zeros_like(y), torch.cat([torch.zeros_like(x)] * 2, dim=1))

    def step(self, t: int, y: Tensor, state: TVState) -> TVState:
        """One iteration."""
        norm = self.projector.operator_norm()
        residual = (self.projector(state.extrapolated) - y) / norm
        p = (state.p + _SIGMA * residual) / (1 + _SIGMA)
        q = state.q + _SIGMA / _GRADIENT_NORM * gradient(state.extrapolated)
        limit = self.weight * _GRADIENT_NORM
        q = q * (limit / q.norm(dim=1, keepdim=True).clamp_min(limit))
        descent = self.projector.adjoint(p) / norm - divergence(q) / _GRADIENT_NORM
        x = (state.x - _TAU * descent).clamp_min(0)
        return TVState(x, 2 * x - state.x, p, q)

    def image(self, state: TVState) -> Tensor:
        """x_t."""
        return state.x


def gradient(x: Tensor) -> Tensor:
    """∇x: differences to the pixel below and to the right, zero across the border; [B, 1, H, W] → [B, 2, H, W]."""
    return torch.cat([pad(x.diff(dim=2), (0, 0, 0, 1)), pad(x.diff(dim=3), (0, 1))], dim=1)


def divergence(q: Tensor) -> Tensor:
    """−∇ᵀq, [B, 2, H, W] → [B, 1, H, W]."""
    down, right = q[:, :1, :-1], q[:, 1:, :, :-1]
    along_columns = pad(down, (0, 0, 0, 1)) - pad(down, (0, 0, 1, 0))
    return along_columns + pad(right, (0, 1)) - pad(right, (1, 0))
