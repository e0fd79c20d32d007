"""The inverse Hessian H of QN-Mixer, held as the pairs that made it, never as an L × L matrix.

With H₀ = I, running the two-loop recursion over *all* pairs gives exactly the dense recursion of the paper,
H_{t+1} = (I − ρ s zᵀ) H_t (I − ρ z sᵀ) + ρ s sᵀ with ρ = 1/(zᵀs), in O(T·L) memory and time.

H depends on a pair only through the directions ŝ, ẑ, ρ̂ = 1/(ẑᵀŝ) and γ = ‖s‖/‖z‖. Keeping those instead of
s, z and ρ is what makes the arithmetic safe: no square of a norm can overflow or vanish.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Found by experiment to hold where a bare skip, or Powell's usual 0.2, let training blow up.
DAMPING = 0.5
MIN_COSINE = 0.3

# Bounds on ‖s‖/‖z‖: beyond them damping or float32 rounding decides the result anyway.
_RATIO_MIN, _RATIO_MAX = 1e-12, 1e12


class CurvaturePair(NamedTuple):
    """One step s and the gradient change z it caused, one row a sample; `rho` = 0 marks a skipped pair."""

    s: Tensor  # [B, L], unit length
    z: Tensor  # [B, L], unit length, after damping
    rho: Tensor  # [B, 1], 1/(zᵀs) of the unit vectors
    gamma: Tensor  # [B, 1], ‖s‖/‖z‖
    cosine: Tensor  # [B, 1], cos(z, s) before damping, for the log


def curvature_pair(s: Tensor, z: Tensor, damping: float = DAMPING, min_cosine: float = MIN_COSINE) -> CurvaturePair:
    """Make the pair (s, z) safe to build H from; both [B, L].

    Damping: z ← θz + (1 − θ)s with the largest θ ≤ 1 for which zᵀs ≥ damping · sᵀs. Then the pair of a sample is
    skipped where zᵀs ≤ min_cosine · ‖z‖‖s‖, where s is zero, and where s or z is not finite. No finite or
    non-finite input makes NaN of H or of its gradient. Source: ours, after Powell 1978 (the paper draws no
    safeguard); idle, it changes nothing.
    """
    usable = torch.isfinite(s).all(-1, keepdim=True) & torch.isfinite(z).all(-1, keepdim=True)
    s_unit, s_norm, s_scale = _normalise(torch.where(usable, s, 0.0))
    z_unit, z_norm, z_scale = _normalise(torch.where(usable, z, 0.0))
    usable = usable & (s_scale > 0)

    cosine = _dot(z_unit, s_unit)
    # The scales are constants, so an overflow of theirs is bounded before it meets a gradient.
    ratio = (s_scale / z_scale).nan_to_num(_RATIO_MAX, _RATIO_MAX).clamp(_RATIO_MIN, _RATIO_MAX) * (s_norm / z_norm)
    # θz + (1 − θ)s is, up to a factor, ẑ + μŝ; μ = 0 where zᵀs is large enough already.
    mu = torch.relu((damping * ratio - cosine) / (1 - damping))
    z_damped = z_unit + mu * s_unit
    length = torch.linalg.vector_norm(z_damped, dim=-1, keepdim=True).clamp_min(_RATIO_MIN)
    z_damped = z_damped / length

    damped_cosine = _dot(z_damped, s_unit)
    keep = usable & (damped_cosine > min_cosine)
    rho = torch.where(keep, 1 / damped_cosine.clamp_min(min_cosine), 0.0)
    return CurvaturePair(s_unit, z_damped, rho, (ratio + mu) / length, cosine)


def apply_inverse_hessian(pairs: Sequence[CurvaturePair], r: Tensor) -> Tensor:
    """H r by the two-loop recursion over all pairs, oldest first; r is [B, L], and with no pair H = I."""
    alphas = []
    for pair in reversed(pairs):
        alpha = pair.rho * _dot(pair.s, r)
        r = r - alpha * pair.z
        alphas.append(alpha)
    for pair, alpha in zip(pairs, reversed(alphas), strict=True):
        beta = pair.rho * _dot(pair.z, r)
        r = r + (pair.gamma * alpha - beta) * pair.s
    return r


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _normalise(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """v as unit · norm · scale, where norm is 1 to √L and scale, a constant, may be anything; of zero it is 0."""
    largest = v.detach().abs().amax(-1, keepdim=True)
    in_range = largest > torch.finfo(v.dtype).tiny
    scaled = v / torch.where(in_range, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp_min(0.5)
    return scaled / norm, norm, torch.where(in_range, largest, 0.0)
