"""The inverse Hessian of QN-Mixer: BFGS over all pairs (s, z), never as an L × L matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

# Found by experiment. Training diverged with Powell's usual 0.2, and with skipping alone. The network is not convex, so
# zᵀs may be near 0 or negative, and ρ = 1/(zᵀs) would make a step of any size.
DAMPING, MIN_COSINE = 0.5, 0.3

# The largest entry of a step that counts as 0, and of z as a multiple of that of s. Squares stay finite in float32.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**40


class Pair(NamedTuple):
    """A step and the change of the gradient code along it, damped; ρ = 1/(zᵀs).

    `z` is divided by zᵀs, so sᵀz = 1. For a pair that H skips, `z` and ρ are 0.
    """

    s: Tensor  # [B, L]
    z: Tensor  # [B, L]
    rho: Tensor  # [B, 1]
    cosine: Tensor  # of z and s before damping [B, 1], a constant


def split_scale(s: Tensor) -> tuple[Tensor, Tensor]:
    """s as a vector whose largest entry is 1 [B, L], and its scale [B, 1], a constant.

    H is the same if the s and z of a pair are divided by one number. So no product of two vectors can overflow. The
    vector is 0 where s is 0 or not finite. Then H skips the pair.
    """
    scale = s.detach().abs().amax(1, keepdim=True)
    unusable = ~((scale > _SMALLEST) & (scale < torch.inf))  # true for NaN too
    scale = scale.masked_fill(unusable, 1)  # before the division: its gradient must be finite where it is not used
    return (s / scale).masked_fill(unusable, 0), scale


def make_pair(s: Tensor, z: Tensor) -> Pair:
    """Damp and check a pair, sample by sample, of an s from `split_scale`.

    Damping: z ← θz + (1 − θ)s with the largest θ ≤ 1 for which zᵀs ≥ DAMPING · sᵀs. Then a pair is skipped where
    zᵀs ≤ MIN_COSINE · ‖z‖‖s‖ (ours, after Powell 1978: the paper draws no safeguard). Good pairs are not changed. No
    input, finite or not, makes H or its gradient NaN.
    """
    z = z.masked_fill(z.isnan(), 0).clamp(-_LARGEST, _LARGEST)
    ss, sz = _dot(s, s).clamp_min(0.5), _dot(s, z)  # sᵀs is at least 1, or 0
    cosine = sz.detach() / (ss * _dot(z, z)).detach().sqrt().clamp_min(1e-30)
    theta = (1 + torch.relu((DAMPING - sz / ss) / (1 - DAMPING))).reciprocal()  # 1 where zᵀs is large enough already
    z = torch.lerp(s, z, theta)
    sz = _dot(s, z)
    # Damping bounds zᵀs, but z may still be long and oblique.
    skipped = ~(sz > MIN_COSINE * (ss * _dot(z, z)).sqrt())
    rho = sz.masked_fill(skipped, torch.inf).reciprocal()
    return Pair(s, rho * z, rho, cosine)


def apply_inverse_hessian(r: Tensor, pairs: tuple[Pair, ...]) -> Tensor:
    """H r [B, L], for the H of all pairs, from the oldest to the newest.

    With H₀ = I, the dense recursion of the paper, H_{t+1} = (I − ρ s zᵀ) H_t (I − ρ z sᵀ) + ρ s sᵀ, is exactly its
    compact form (Byrd, Nocedal and Schnabel 1994, eq. 2.6). With the s of all pairs as rows of S, and the z, divided by
    zᵀs, as rows of Z, R is the upper triangle of S Zᵀ. Its diagonal is 1. Then H r = q + Sᵀ R⁻ᵀ (ρ w − Z q), where
    w = R⁻¹ S r and q = r − Zᵀ w. The two loops over pairs of the textbooks give the same with many more operators.
    """
    S, Z, rho = (torch.stack([pair[k] for pair in pairs], dim=1) for k in range(3))  # [B, t, L], and ρ [B, t, 1]
    r = r.unsqueeze(2)
    R = torch.bmm(S, Z.mT)  # what is below its diagonal is not read, nor the diagonal, which is 0 for a skipped pair
    w = torch.linalg.solve_triangular(R, torch.bmm(S, r), upper=True, unitriangular=True)
    q = torch.baddbmm(r, Z.mT, w, alpha=-1)
    c = torch.linalg.solve_triangular(R.mT, rho * w - torch.bmm(Z, q), upper=False, unitriangular=True)
    return torch.baddbmm(q, S.mT, c).squeeze(2)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each sample, [B, 1]."""
    return (a * b).sum(1, keepdim=True)
