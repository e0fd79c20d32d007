"""H of QN-Mixer against the dense formula of the paper, with the damping and the skipping in plain words."""

import math

import pytest
import torch
from torch import Tensor

from qnmixer.models import bfgs
from qnmixer.models.bfgs import DAMPING, MIN_COSINE, make_pair, split_scale

Pairs = list[tuple[Tensor, Tensor]]


def safe_pairs(pairs: Pairs) -> tuple[bfgs.Pair, ...]:
    """As an iteration makes them."""
    scaled = [(*split_scale(s), z) for s, z in pairs]
    return tuple(make_pair(s, z / scale) for s, scale, z in scaled)


def apply_inverse_hessian(pairs: Pairs, r: Tensor) -> Tensor:
    """H r of pairs (s, z)."""
    return bfgs.apply_inverse_hessian(r, safe_pairs(pairs))


def dense(pairs: Pairs, r: Tensor) -> tuple[Tensor, list[list[str]]]:
    """H r [B, L] by the formula of the paper, sample by sample, and what was done to each pair."""
    done: list[list[str]] = []
    results = []
    for b in range(len(r)):
        identity = H = torch.eye(r.shape[1], dtype=r.dtype)
        done.append([])
        for s, z in ((s[b], z[b]) for s, z in pairs):
            word = "used"
            if z @ s < DAMPING * s @ s:  # z ← θz + (1 − θ)s with zᵀs = DAMPING · sᵀs
                theta = (1 - DAMPING) * (s @ s) / (s @ s - z @ s)
                z, word = theta * z + (1 - theta) * s, "damped"
            if z @ s <= MIN_COSINE * z.norm() * s.norm():
                word = "skipped"
            else:
                left = identity - torch.outer(s, z) / (z @ s)
                H = left @ H @ left.T + torch.outer(s, s) / (z @ s)
            done[-1].append(word)
        results.append(H @ r[b])
    return torch.stack(results), done


def pairs_of(spread: float, seed: int = 0, n: int = 9, batch: int = 3, length: int = 12) -> Pairs:
    """Random steps of lengths that differ by powers of ten up to `spread`; changes of many angles and lengths."""
    generator = torch.Generator().manual_seed(seed)
    s, noise = torch.randn(2, n, batch, length, generator=generator, dtype=torch.float64)
    lengths, curvatures, angles = torch.rand(3, n, batch, 1, generator=generator, dtype=torch.float64)
    z = (curvatures * 3 - 0.5) * s + (3 * angles).square() * noise
    return [(a, b) for a, b in zip(s * 10 ** (spread * lengths), z * 10 ** (spread * lengths), strict=True)]


@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_values_and_gradients_of_the_dense_recursion(spread: float) -> None:
    pairs = [(s.requires_grad_(), z.requires_grad_()) for s, z in pairs_of(spread)]
    r = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected, done = dense(pairs, r)
    assert {word for words in done for word in words} == {"used", "damped", "skipped"}
    torch.testing.assert_close(apply_inverse_hessian(pairs, r), expected, rtol=1e-11, atol=1e-11)
    assert [["skipped" if p.rho[b] == 0 else "" for p in safe_pairs(pairs)] for b in range(3)] == [
        [word if word == "skipped" else "" for word in words] for words in done
    ]
    for pair, (s, z) in zip(safe_pairs(pairs), pairs, strict=True):
        torch.testing.assert_close(pair.cosine[:, 0], torch.cosine_similarity(s, z).detach())
    leaves = [r, *(v for pair in pairs for v in pair)]
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((it * weights).sum(), leaves) for it in (apply_inverse_hessian(pairs, r), expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


def vector(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


ADVERSARIAL = {
    "zero step": (vector(0, 0, 0), vector(1, 2, 3)),
    "zero change": (vector(1, 2, 3), vector(0, 0, 0)),
    "opposite": (vector(1, 2, 3), vector(-1, -2, -3)),
    "orthogonal": (vector(1, 0, 0), vector(0, 1, 0)),
    "huge": (vector(1e37, -1e37, 1e37), vector(1e38, -2e38, 1e38)),
    "tiny": (vector(1e-38, 2e-38, 0), vector(1e-38, 1e-38, 0)),
    "huge step, tiny change": (vector(1e38, 0, 0), vector(1e-38, 0, 0)),
    "huge and long": (torch.full((1, 4096), 1e37), torch.full((1, 4096), 1e37)),
    "huge step, ordinary change": (torch.full((1, 4096), 3e38), torch.ones(1, 4096)),
    "infinite": (vector(math.inf, 0, 0), vector(1, 1, 1)),
    "not a number": (vector(1, 0, 0), vector(math.nan, 1, 1)),
    "step that is not a number": (vector(math.nan, 0, 0), vector(1, 1, 1)),
}


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial_pairs_leave_everything_finite(case: str) -> None:
    s, z = (v.clone().requires_grad_() for v in ADVERSARIAL[case])
    r = torch.linspace(-0.7, 1.1, s.shape[1])[None].requires_grad_()
    healthy = (torch.ones_like(s), torch.linspace(0.5, 1.0, s.shape[1])[None])
    result = apply_inverse_hessian([(s, z), healthy, (s, z)], r)
    assert torch.isfinite(result).all()
    grads = torch.autograd.grad(result.sum(), [s, z, r])
    assert all(torch.isfinite(g).all() for g in grads)
