"""Total variation by the primal-dual method of Chambolle and Pock (2011), as Sidky, Jørgensen and Pan (2012) use it."""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor
from torch.nn.functional import pad

from qnmixer.models.unrolled import Projector, UnrolledNetwork

# Of 1, 3, 10, 30, 100 and 300 this τ came nearest to the minimum in 200 iterations, for weights from 1e-5 to 1e-2.
_TAU = 10.0
# On a short arc and with few views 200 iterations with this one come nearer than 800 with 10.
_TAU_OF_FEW_DATA = 50.0

_GRADIENT_NORM = math.sqrt(8)  # ‖∇‖ of forward differences in two dimensions is at most this

_LARGEST = 1.5
"""M, above every value of the minimiser: images are in [0, 1]."""

_GAP_EVERY = 25
"""Iterations between two computations of the gap. Each costs a projection."""


class TVState(NamedTuple):
    """Primal and dual variables."""

    x: Tensor  # [B, 1, H, W]
    extrapolated: Tensor  # [B, 1, H, W], x̄
    p: Tensor  # [B, 1, V, D], dual to the data
    q: Tensor  # [B, 2, H, W], dual to the gradient
    weight: Tensor  # [B, 1, 1, 1], α
    gap: Tensor  # [B], the last computed duality gap divided by the objective


class TotalVariation(UnrolledNetwork[TVState]):
    """min over x ≥ 0 of ½‖K x − f‖² + α·TV(x), with K = A/‖A‖ and f = y/‖A‖; from FBP(y). No weights.

    TV(x) = Σ |∇x| is isotropic, with forward differences that are 0 across the border. As ‖K‖ = 1, the effect of α does
    not depend on the scale of the scan. With ∇' = ∇/√8, ‖∇'‖ ≤ 1 too, so 2στ = 1 is safe. An iteration is:
    p ← (p + σ(K x̄ − f))/(1 + σ); q ← q + σ∇'x̄, cut to length √8·α at each pixel; x⁺ = max(0, x − τ(Kᵀp + ∇'ᵀq));
    x̄ ← 2x⁺ − x.

    The duality gap ends the iterations. For 0 ≤ x ≤ M the dual value −½‖p‖² − ⟨p, f⟩ − M Σ max(0, −(Kᵀp + ∇'ᵀq)) is at
    most the minimum. So the objective is above the minimum by the gap at most; in practice by much less.

    Args:
        projector: A, Aᵀ and FBP of the scan.
        n_iterations: T, at most; 300 to 700 are enough with noise, and without noise all are taken.
        weight: α against ½‖(A x − y)/‖A‖‖², in units of the image's values; higher is smoother.
        noise_weight: c in mm⁻¹, for α = √(weight² + (c·σ)²), with σ the root mean square noise of a slice's rays,
            estimated from y; 0: one α for all.
        variance: function from y to the expected noise variance of each ray, as `KeyedNoise.variance`.
        gap: an image is done at objective − dual value ≤ gap × objective; smaller is slower, 0 takes all iterations.
    """

    title = "TV"
    has_weights = False

    def __init__(
        self,
        projector: Projector,
        n_iterations: Annotated[int, Ge(1), Le(100_000)] = 5000,
        weight: Annotated[float, Ge(1e-9), Le(1e9)] = 9e-5,
        gap: Annotated[float, Ge(0), Lt(1)] = 0.01,
        noise_weight: Annotated[float, Ge(0), Le(1e9)] = 3.5e-4,
        variance: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        super().__init__(n_iterations)
        self.projector = projector
        self.weight = weight
        self.gap = gap
        self.noise_weight = noise_weight
        scan = projector.geometry
        lacks_data = abs(scan.angle_span) < scan.short_scan or scan.n_views < scan.image_size / 8
        self.tau = _TAU_OF_FEW_DATA if lacks_data else _TAU
        self.variance = variance

    def start(self, y: Tensor) -> TVState:
        """x₀ = max(0, FBP(y)), and dual variables of zero."""
        x = self.projector.fbp(y).clamp_min(0)
        q = torch.cat([torch.zeros_like(x)] * 2, dim=1)
        noise = self.variance(y).mean((1, 2, 3), keepdim=True)
        weight = (self.weight**2 + self.noise_weight**2 * noise).sqrt()
        return TVState(x, x, torch.zeros_like(y), q, weight, y.new_ones(len(y)))

    def step(self, t: int, y: Tensor, state: TVState) -> TVState:
        """One iteration. An image that is done does not change while other images of the batch continue."""
        converged = state.gap <= self.gap  # [B]
        if bool(converged.all()):
            return state
        norm, sigma = self.projector.operator_norm(), 0.5 / self.tau
        residual = (self.projector(state.extrapolated) - y) / norm
        p = (state.p + sigma * residual) / (1 + sigma)
        q = state.q + sigma / _GRADIENT_NORM * gradient(state.extrapolated)
        limit = state.weight * _GRADIENT_NORM
        q = q * (limit / torch.maximum(q.norm(dim=1, keepdim=True), limit))
        descent = self.projector.adjoint(p) / norm - divergence(q) / _GRADIENT_NORM
        x = torch.where(converged[:, None, None, None], state.x, (state.x - self.tau * descent).clamp_min(0))
        gap = state.gap
        if t % _GAP_EVERY == _GAP_EVERY - 1:
            value = self.objective(x, y, state.weight)
            dual = (
                -p.square().sum((1, 2, 3)) / 2
                - (p * y).sum((1, 2, 3)) / norm
                + _LARGEST * (descent.clamp_max(0).sum((1, 2, 3)))
            )
            gap = torch.where(converged, gap, (value - dual) / value)  # relative: α and the slice set the scale
        return TVState(x, 2 * x - state.x, p, q, state.weight, gap)

    def objective(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The objective ½‖K x − f‖² + α·TV(x), [B]; weight: α [B, 1, 1, 1]."""
        misfit = (self.projector(x) - y) / self.projector.operator_norm()
        return misfit.square().sum((1, 2, 3)) / 2 + (weight * gradient(x).norm(dim=1, keepdim=True)).sum((1, 2, 3))


def gradient(x: Tensor) -> Tensor:
    """∇x: differences to the pixel below and to the right, zero across the border; [B, 1, H, W] → [B, 2, H, W]."""
    return torch.cat([pad(x.diff(dim=2), (0, 0, 0, 1)), pad(x.diff(dim=3), (0, 1))], dim=1)


def divergence(q: Tensor) -> Tensor:
    """−∇ᵀq, [B, 2, H, W] → [B, 1, H, W]."""
    down, right = q[:, :1, :-1], q[:, 1:, :, :-1]
    along_columns = pad(down, (0, 0, 0, 1)) - pad(down, (0, 0, 1, 0))
    return along_columns + pad(right, (0, 1)) - pad(right, (1, 0))
