import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from qnmixer.models.latent_bfgs import (
    CurvaturePair,
    apply_inverse_hessian,
    curvature_pair,
    direction,
    summed_changes,
)


def dense_update(H: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """The published recursion, one sample, as drawn."""
    rho = 1 / (z @ s)
    left = torch.eye(len(s), dtype=s.dtype) - rho * torch.outer(s, z)
    return left @ H @ left.T + rho * torch.outer(s, s)


def pairs_of(steps_and_changes: Iterable[tuple[Tensor, Tensor]]) -> list[CurvaturePair]:
    pairs: list[CurvaturePair] = []
    for s, z in steps_and_changes:
        pairs.append(curvature_pair(direction(s), z, pairs))
    return pairs


def two_loops(pairs: list[CurvaturePair], r: Tensor) -> Tensor:
    """The textbook recursion (Nocedal and Wright, algorithm 7.4) over the same safe pairs, vector by vector."""
    alphas = []
    for pair in reversed(pairs):
        rho = torch.where(pair.used > 0, 1 / pair.column[:, -1:], 0.0)
        alpha = rho * (pair.s * r).sum(-1, keepdim=True)
        r = r - alpha * pair.z
        alphas.append((alpha, rho))
    for pair, (alpha, rho) in zip(pairs, reversed(alphas), strict=True):
        r = r + (pair.gamma * alpha - rho * (pair.z * r).sum(-1, keepdim=True)) * pair.s
    return r


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
    pairs: list[CurvaturePair] = []
    for k, (s, z) in enumerate(healthy_pairs(13, batch, length)):
        pairs.append(curvature_pair(direction(s), z, pairs))
        H = torch.stack([dense_update(H[b], s[b], z[b]) for b in range(batch)])
        r = torch.randn(batch, length, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        expected = torch.einsum("bij,bj->bi", H, r)
        torch.testing.assert_close(apply_inverse_hessian(pairs, r), expected, rtol=1e-12, atol=1e-13)


def test_secant_equation_holds_for_the_newest_pair() -> None:
    pairs = healthy_pairs(5, 2, 16)
    s, z = pairs[-1]
    torch.testing.assert_close(apply_inverse_hessian(pairs_of(pairs), z), s)


def test_gradient_equals_that_of_the_dense_recursion() -> None:
    pairs = healthy_pairs(4, 1, 10)
    leaves = [(s.clone().requires_grad_(), z.clone().requires_grad_()) for s, z in pairs]
    r = torch.randn(1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    H = torch.eye(10, dtype=torch.float64)
    for s, z in leaves:
        H = dense_update(H, s[0], z[0])
    flat = [v for pair in leaves for v in pair]
    expected = torch.autograd.grad((H @ r[0]).square().sum(), flat)
    actual = torch.autograd.grad(apply_inverse_hessian(pairs_of(leaves), r).square().sum(), flat)
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
        actual = apply_inverse_hessian(pairs_of([(s, z)]), r[None])[0]
        torch.testing.assert_close(actual, expected @ r)


def test_a_pair_at_a_poor_angle_is_skipped_for_that_sample_only() -> None:
    s = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    z = torch.tensor([[1.0, 100.0], [1.0, 0.1]])  # zᵀs = sᵀs, but the first is nearly orthogonal
    (pair,) = pairs_of([(s, z)])
    assert pair.used.tolist() == [[0.0], [1.0]]
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
    healthy = (torch.ones_like(s), torch.linspace(0.5, 1.0, s.shape[1])[None])
    pairs = pairs_of([(s, z), healthy, (s, z)])
    result = apply_inverse_hessian(pairs, r)
    assert torch.isfinite(result).all()
    grads = torch.autograd.grad(result.sum(), [s, z, r])
    assert all(torch.isfinite(g).all() for g in grads)


def wild_pairs(generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    scales = 10 ** torch.empty(13, 2, 4, 1).uniform_(-18, 18, generator=generator)
    vectors = torch.randn(13, 2, 4, 8, generator=generator) * scales
    return [(s, z) for s, z in vectors]


def test_equals_the_two_loop_recursion_where_pairs_are_damped_and_skipped() -> None:
    generator = torch.Generator().manual_seed(4)
    pairs = pairs_of((s.double(), z.double()) for s, z in wild_pairs(generator))
    used = torch.stack([pair.used for pair in pairs])
    assert 0 < used.sum() < used.numel()
    r = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(apply_inverse_hessian(pairs, r), two_loops(pairs, r), rtol=1e-9, atol=1e-12)


def test_float32_is_as_near_to_float64_as_the_two_loop_recursion_is() -> None:
    generator = torch.Generator().manual_seed(5)
    worst = {apply_inverse_hessian: 0.0, two_loops: 0.0}
    for _ in range(50):
        steps_and_changes, r = wild_pairs(generator), torch.randn(4, 8, generator=generator)
        exact = two_loops(pairs_of((s.double(), z.double()) for s, z in steps_and_changes), r.double())
        for apply in worst:
            error = (apply(pairs_of(steps_and_changes), r) - exact).norm(dim=1) / exact.norm(dim=1)
            worst[apply] = max(worst[apply], float(error.max()))
    assert worst[apply_inverse_hessian] < 2 * worst[two_loops] < 1e-4


def test_summed_changes_give_back_every_gradient_code() -> None:
    """r_t = r_0 + Σ z, damped and skipped pairs included."""
    generator = torch.Generator().manual_seed(6)
    codes = torch.randn(6, 3, 8, generator=generator)
    steps_and_changes = [(torch.randn(3, 8, generator=generator), z) for z in codes.diff(dim=0)]
    pairs = pairs_of(steps_and_changes)
    assert any((pair.used == 0).any() for pair in pairs)
    assert any((pair.undamped[0] != 0).any() for pair in pairs)
    for t, code in enumerate(codes):
        torch.testing.assert_close(summed_changes(pairs[:t], codes[0]), code)


def test_backward_keeps_the_pairs_and_two_vectors() -> None:
    """r and q; not two for each pair, as the two loops would."""
    leaves = [(s.requires_grad_(), z.requires_grad_()) for s, z in healthy_pairs(8, 1, 64)]
    pairs = pairs_of(leaves)
    of_pairs = {v.data_ptr() for pair in pairs for v in (pair.s, pair.z)}
    r = torch.randn(1, 64, dtype=torch.float64).requires_grad_()

    def n_kept(apply: Callable[[list[CurvaturePair], Tensor], Tensor]) -> int:
        kept: dict[int, Tensor] = {}

        def keep(v: Tensor) -> Tensor:
            if v.shape == (1, 64) and v.data_ptr() not in of_pairs:
                kept[v.data_ptr()] = v
            return v

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda v: v):
            apply(pairs, r)
        return len(kept)

    assert n_kept(apply_inverse_hessian) <= 2 < n_kept(two_loops)


def test_random_pairs_of_any_scale_keep_h_bounded_and_positive() -> None:
    """H stays positive definite: rᵀHr > 0 whatever pairs went in."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        pairs = pairs_of(wild_pairs(generator))
        r = torch.randn(4, 8, generator=generator)
        result = apply_inverse_hessian(pairs, r)
        assert torch.isfinite(result).all()
        assert ((r * result).sum(-1) > 0).all()
