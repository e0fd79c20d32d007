"""The inverse Hessian H of QN-Mixer, held as the pairs that made it, never as an L × L matrix.

With H₀ = I, the dense recursion of the paper, H_{t+1} = (I − ρ s zᵀ) H_t (I − ρ z sᵀ) + ρ s sᵀ with ρ = 1/(zᵀs), is
exactly

    H r = q + S R⁻ᵀ (D w − Zᵀ q),   w = R⁻¹ Sᵀ r,   q = r − Z w,

where the columns of S and Z are all steps s and gradient changes z, R is the upper triangle of SᵀZ and D its diagonal
(Byrd, Nocedal, Schnabel 1994, eq. 2.6, arranged as the two-loop recursion). O(T·L) memory and time, and backward needs
the pairs alone: no vector of the recursion is kept.

H depends on a pair only through the directions ŝ and ẑ and through γ = ‖s‖/‖z‖, which turns D into γD. Keeping those is
what makes the arithmetic safe: no square of a norm can overflow or vanish.
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


class Direction(NamedTuple):
    """A vector as unit · norm · scale, so that no product of two can overflow.

    Of one that is not finite the unit is zero, which keeps H sound, and the length NaN, which no one overlooks.
    """

    unit: Tensor  # [B, L]
    norm: Tensor  # [B, 1], 1 to √L
    scale: Tensor  # [B, 1], a constant to differentiation, any size
    length: Tensor  # [B, 1], norm · scale
    finite: Tensor  # [B, 1], whether the vector was

    def detach(self) -> "Direction":
        """The same, as a constant."""
        return Direction(*(part.detach() for part in self))


class CurvaturePair(NamedTuple):
    """One step s and the gradient change z it caused, one row a sample."""

    s: Tensor  # [B, L], unit length
    z: Tensor  # [B, L], unit length, after damping
    undamped: tuple[Tensor, Tensor]  # [B, 1] each: z before damping is the first · s + the second · z
    column: Tensor  # [B, j + 1] for pair j: its column of R, of the unit vectors; a skipped pair has that of I
    gamma: Tensor  # [B, 1], ‖s‖/‖z‖
    used: Tensor  # [B, 1], 0 for a skipped pair, else 1
    cosine: Tensor  # [B, 1], cos(z, s) before damping, for the log


def direction(v: Tensor) -> Direction:
    """Take a vector [B, L] apart."""
    finite = torch.isfinite(v).all(-1, keepdim=True)
    v = torch.where(finite, v, 0.0)
    largest = v.detach().abs().amax(-1, keepdim=True)
    in_range = largest > torch.finfo(v.dtype).tiny
    scaled = v / torch.where(in_range, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp_min(0.5)
    scale = torch.where(in_range, largest, 0.0)
    return Direction(scaled / norm, norm, scale, torch.where(finite, norm * scale, torch.nan), finite)


def curvature_pair(
    s: Direction,
    z: Tensor,
    earlier: Sequence[CurvaturePair] = (),
    damping: float = DAMPING,
    min_cosine: float = MIN_COSINE,
) -> CurvaturePair:
    """Make the pair (s, z), z of [B, L], safe to build H from, after `earlier` pairs.

    Damping: z ← θz + (1 − θ)s with the largest θ ≤ 1 for which zᵀs ≥ damping · sᵀs. Then the pair of a sample is
    skipped where zᵀs ≤ min_cosine · ‖z‖‖s‖, where s is zero, and where s or z is not finite. No finite or
    non-finite input makes NaN of H or of its gradient. Source: ours, after Powell 1978 (the paper draws no
    safeguard); idle, it changes nothing.
    """
    change = direction(z)
    cosine = _dot(change.unit, s.unit)
    # The scales are constants, so an overflow of theirs is bounded before it meets a gradient.
    scales = (s.scale / change.scale).nan_to_num(_RATIO_MAX, _RATIO_MAX).clamp(_RATIO_MIN, _RATIO_MAX)
    ratio = scales * (s.norm / change.norm)
    # θz + (1 − θ)s is, up to a factor, ẑ + μŝ; μ = 0 where zᵀs is large enough already.
    mu = torch.relu((damping * ratio - cosine) / (1 - damping))
    damped = torch.addcmul(change.unit, mu, s.unit)
    length = torch.linalg.vector_norm(damped, dim=-1, keepdim=True).clamp_min(_RATIO_MIN)
    damped = damped / length

    damped_cosine = _dot(damped, s.unit)
    used = s.finite & change.finite & (s.scale > 0) & (damped_cosine > min_cosine)
    column = torch.where(used, damped_cosine, 1.0)
    if earlier:
        above = _dots([pair.s for pair in earlier], damped) * torch.cat([pair.used for pair in earlier], dim=-1)
        column = torch.cat([torch.where(used, above, 0.0), column], dim=-1)
    undamped = (-mu * change.length, length * change.length)
    return CurvaturePair(s.unit, damped, undamped, column, (ratio + mu) / length, used.to(z.dtype), cosine)


def apply_inverse_hessian(pairs: Sequence[CurvaturePair], r: Tensor) -> Tensor:
    """H r from all pairs, oldest first; r is [B, L], and with no pair H = I."""
    if not pairs:
        return r
    R = torch.stack([torch.nn.functional.pad(p.column, (0, len(pairs) - p.column.shape[1])) for p in pairs], dim=-1)
    gamma, used = (torch.cat(column, dim=-1) for column in zip(*((p.gamma, p.used) for p in pairs), strict=True))
    D = R.diagonal(dim1=-2, dim2=-1)

    w = _solve(R, used * _dots([p.s for p in pairs], r), upper=True)
    q = r
    for p, w_j in zip(pairs, w.split(1, dim=-1), strict=True):
        q = torch.addcmul(q, w_j, p.z, value=-1)
    c = _solve(R.mT, gamma * D * w - used * _dots([p.z for p in pairs], q), upper=False)
    for p, c_j in zip(pairs, c.split(1, dim=-1), strict=True):
        q = torch.addcmul(q, c_j, p.s)
    return q


def summed_changes(pairs: Sequence[CurvaturePair], r: Tensor) -> Tensor:
    """r + Σ z, with every z as it was before damping: the gradient code after all pairs, from the one before them."""
    for p in pairs:
        r = torch.addcmul(torch.addcmul(r, p.undamped[0], p.s), p.undamped[1], p.z)
    return r


def _solve(triangle: Tensor, b: Tensor, upper: bool) -> Tensor:
    """Solve one triangular system a sample: [B, t, t] and [B, t]."""
    return torch.linalg.solve_triangular(triangle, b[..., None], upper=upper)[..., 0]


def _dots(vectors: Sequence[Tensor], v: Tensor) -> Tensor:
    """Inner products of v [B, L] with n vectors of its shape, [B, n]."""
    return torch.cat([_dot(u, v) for u in vectors], dim=-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
