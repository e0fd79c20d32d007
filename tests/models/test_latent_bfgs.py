import math

import pytest
import torch
from torch import Tensor

from qnmixer.models.latent_bfgs import apply_inverse_hessian, curvature_pair


def dense_update(H: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """The published recursion, one sample, as drawn."""
    rho = 1 / (z @ s)
    left = torch.eye(len(s), dtype=s.dtype) - rho * torch.outer(s, z)
    return left @ H @ left.T + rho * torch.outer(s, s)


def healthy_pairs(n_pairs: int, batch: int, length: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(s, z) of a strongly convex quadratic, so that no safeguard has cause to act."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(length, length, generator=generator, dtype=torch.float64)).Q
    hessian = basis @ torch.diag(torch.linspace(0.8, 1.6, length, dtype=torch.float64)) @ basis.T
    steps = torch.randn(n_pairs, batch, length, generator=generator, dtype=torch.float64)
    return [(s, s @ hessian) for s in steps]


def test_equals_the_dense_recursion_step_for_step() -> None:
    batch, length = 3, 24
    H = torch.eye(length, dtype=torch.float64).expand(batch, -1, -1).clone()
    pairs = []
    for k, (s, z) in enumerate(healthy_pairs(13, batch, length)):
        pairs.append(curvature_pair(s, z))
        H = torch.stack([dense_update(H[b], s[b], z[b]) for b in range(batch)])
        r = torch.randn(batch, length, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        expected = torch.einsum("bij,bj->bi", H, r)
        torch.testing.assert_close(apply_inverse_hessian(pairs, r), expected, rtol=1e-12, atol=1e-13)


def test_secant_equation_holds_for_the_newest_pair() -> None:
    pairs = healthy_pairs(5, 2, 16)
    built = [curvature_pair(s, z) for s, z in pairs]
    s, z = pairs[-1]
    torch.testing.assert_close(apply_inverse_hessian(built, z), s)


def test_gradient_equals_that_of_the_dense_recursion() -> None:
    pairs = healthy_pairs(4, 1, 10)
    leaves = [(s.clone().requires_grad_(), z.clone().requires_grad_()) for s, z in pairs]
    r = torch.randn(1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    H = torch.eye(10, dtype=torch.float64)
    for s, z in leaves:
        H = dense_update(H, s[0], z[0])
    flat = [v for pair in leaves for v in pair]
    expected = torch.autograd.grad((H @ r[0]).square().sum(), flat)
    built = [curvature_pair(s, z) for s, z in leaves]
    actual = torch.autograd.grad(apply_inverse_hessian(built, r).square().sum(), flat)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_no_pair_means_identity() -> None:
    r = torch.randn(2, 5)
    assert torch.equal(apply_inverse_hessian([], r), r)


def test_weak_curvature_is_damped_to_the_bound() -> None:
    """zᵀs < 0.5 sᵀs: the pair used has zᵀs = 0.5 sᵀs, by z ← θz + (1 − θ)s."""
    s = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    z = torch.tensor([[-0.5, 0.4]], dtype=torch.float64)
    theta = 0.5 / (1 - (-0.5))
    expected_z = theta * z + (1 - theta) * s
    assert math.isclose(float((expected_z * s).sum()), 0.5)
    expected = dense_update(torch.eye(2, dtype=torch.float64), s[0], expected_z[0])
    for r in torch.eye(2, dtype=torch.float64):
        actual = apply_inverse_hessian([curvature_pair(s, z)], r[None])[0]
        torch.testing.assert_close(actual, expected @ r)


def test_a_pair_at_a_poor_angle_is_skipped_for_that_sample_only() -> None:
    s = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    z = torch.tensor([[1.0, 100.0], [1.0, 0.1]])  # zᵀs = sᵀs, but the first is nearly orthogonal
    pair = curvature_pair(s, z)
    assert pair.rho[0] == 0
    assert pair.rho[1] > 0
    r = torch.randn(2, 2)
    result = apply_inverse_hessian([pair], r)
    assert torch.equal(result[0], r[0])
    assert not torch.equal(result[1], r[1])


def vector(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


ADVERSARIAL = {
    "zero step": (vector(0, 0, 0), vector(1, 2, 3)),
    "zero change": (vector(1, 2, 3), vector(0, 0, 0)),
    "both zero": (vector(0, 0, 0), vector(0, 0, 0)),
    "opposite": (vector(1, 2, 3), vector(-1, -2, -3)),
    "orthogonal": (vector(1, 0, 0), vector(0, 1, 0)),
    "huge": (vector(1e37, -1e37, 1e37), vector(1e38, -2e38, 1e38)),
    "tiny": (vector(1e-38, 2e-38, 0), vector(1e-38, 1e-38, 0)),
    "denormal": (vector(1e-44, 0, 0), vector(1e-44, 0, 0)),
    "huge step, tiny change": (vector(1e38, 0, 0), vector(1e-38, 0, 0)),
    "tiny step, huge change": (vector(1e-38, 0, 0), vector(-1e38, 1e38, 0)),
    "huge and long": (torch.full((1, 4096), 1e37), torch.full((1, 4096), 1e37)),
    "huge step, ordinary change": (torch.full((1, 4096), 3e38), torch.ones(1, 4096)),
    "long zero change": (torch.ones(1, 4096), torch.zeros(1, 4096)),
    "infinite": (vector(math.inf, 0, 0), vector(1, 1, 1)),
    "not a number": (vector(1, 0, 0), vector(math.nan, 1, 1)),
}


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial_pairs_leave_everything_finite(case: str) -> None:
    s, z = (v.clone().requires_grad_() for v in ADVERSARIAL[case])
    r = torch.linspace(-0.7, 1.1, s.shape[1])[None].requires_grad_()
    healthy = curvature_pair(torch.ones_like(s), torch.linspace(0.5, 1.0, s.shape[1])[None])
    pairs = [curvature_pair(s, z), healthy, curvature_pair(s, z)]
    result = apply_inverse_hessian(pairs, r)
    assert torch.isfinite(result).all()
    grads = torch.autograd.grad(result.sum(), [s, z, r])
    assert all(torch.isfinite(g).all() for g in grads)


def test_random_pairs_of_any_scale_keep_h_bounded_and_positive() -> None:
    """H stays positive definite: rᵀHr > 0 whatever pairs went in."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        pairs = []
        for _ in range(13):
            scale = 10 ** torch.empty(4, 2).uniform_(-18, 18, generator=generator)
            s = torch.randn(4, 8, generator=generator) * scale[:, :1]
            z = torch.randn(4, 8, generator=generator) * scale[:, 1:]
            pairs.append(curvature_pair(s, z))
        r = torch.randn(4, 8, generator=generator)
        result = apply_inverse_hessian(pairs, r)
        assert torch.isfinite(result).all()
        assert ((r * result).sum(-1) > 0).all()
