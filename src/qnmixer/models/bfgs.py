"""The inverse Hessian of QN-Mixer: BFGS over all pairs (s, z), never as an L × L matrix."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import relu

from qnmixer.models.unrolled import recomputed

# Found by experiment. Training diverged with Powell's usual 0.2, and with skipping alone. The network is not convex, so
# zᵀs may be near 0 or negative, and ρ = 1/(zᵀs) would make a step of any size.
DAMPING, MIN_COSINE = 0.5, 0.3

# The largest entry of a step that counts as 0, and of z as a multiple of that of s. Squares stay finite in float32.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**40


class Pair(NamedTuple):
    """A step and the change of the gradient code along it, damped; ρ = 1/(zᵀs), or 0 for a pair that H skips."""

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
    usable = (scale > _SMALLEST) & scale.isfinite()
    scale = torch.where(usable, scale, 1.0)  # before the division: its gradient must be finite where it is not used
    return torch.where(usable, s / scale, 0.0), scale


def make_pair(s: Tensor, z: Tensor) -> Pair:
    """Damp and check a pair, sample by sample, of an s from `split_scale`.

    Damping: z ← θz + (1 − θ)s with the largest θ ≤ 1 for which zᵀs ≥ DAMPING · sᵀs. Then a pair is skipped where
    zᵀs ≤ MIN_COSINE · ‖z‖‖s‖ (ours, after Powell 1978: the paper draws no safeguard). Good pairs are not changed. No
    input, finite or not, makes H or its gradient NaN.
    """
    z = z.nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)
    ss, sz = _inner(s, s).clamp_min(0.5), _inner(s, z)  # sᵀs is at least 1, or 0
    cosine = sz.detach() / (ss * _inner(z, z)).detach().sqrt().clamp_min(1e-30)
    theta = 1 / (1 + relu((DAMPING - sz / ss) / (1 - DAMPING)))  # 1 where zᵀs is large enough already
    z = theta * z + (1 - theta) * s
    sz = _inner(s, z)
    good = sz > MIN_COSINE * (ss * _inner(z, z)).sqrt()  # damping bounds zᵀs, but z may still be long and oblique
    return Pair(s, z, torch.where(good, 1 / torch.where(good, sz, 1.0), 0.0), cosine)


def apply_inverse_hessian(r: Tensor, pairs: tuple[Pair, ...]) -> Tensor:
    """H r [B, L], for the H of all pairs, from the oldest to the newest.

    With H₀ = I, the dense recursion of the paper, H_{t+1} = (I − ρ s zᵀ) H_t (I − ρ z sᵀ) + ρ s sᵀ, is exactly these
    two loops over the pairs (Nocedal and Wright, algorithm 7.4). The compact form with matrices [t, L] has a third
    fewer operators. It takes as long on a CPU, and twice the memory for each iteration: so it is not used here.
    """
    return recomputed(_two_loops, r, *(vector for pair in pairs for vector in (pair.s, pair.z, pair.rho)))


def _two_loops(r: Tensor, *vectors: Tensor) -> Tensor:
    pairs = [vectors[k : k + 3] for k in range(0, len(vectors), 3)]
    alphas = []
    for s, z, rho in reversed(pairs):  # (I − ρ z sᵀ) of each; ρ = 0 leaves r as it is
        alphas.append(rho * _inner(s, r))
        r = r - alphas[-1] * z
    for (s, z, rho), alpha in zip(pairs, reversed(alphas), strict=True):  # (I − ρ s zᵀ), and + ρ s sᵀ
        r = r + (alpha - rho * _inner(z, r)) * s
    return r


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each sample, [B, 1]."""
    return (a * b).sum(1, keepdim=True)
