import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qnmixer.models import bfgs
from qnmixer.models.bfgs import DAMPING, MIN_COSINE, make_pair, split_scale

Pairs = list[tuple[Tensor, Tensor]]


def dense_update(H: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """The formula of the paper, for one sample."""
    rho = 1 / (z @ s)
    left = torch.eye(len(s), dtype=s.dtype) - rho * torch.outer(s, z)
    return left @ H @ left.T + rho * torch.outer(s, s)


def safe_pairs(pairs: Pairs) -> tuple[bfgs.Pair, ...]:
    """As an iteration makes them."""
    scaled = [(*split_scale(s), z) for s, z in pairs]
    return tuple(make_pair(s, z / scale) for s, scale, z in scaled)


def apply_inverse_hessian(pairs: Pairs, r: Tensor) -> Tensor:
    """H r of pairs (s, z)."""
    return bfgs.apply_inverse_hessian(r, safe_pairs(pairs))


def used(pairs: Pairs) -> Tensor:
    """Whether a pair is good enough for H, bool [B, t]."""
    return torch.cat([pair.rho > 0 for pair in safe_pairs(pairs)], 1)


def safe(s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ŝ, a multiple of the damped z, what D is multiplied by for it, and whether the pair is used [B, 1]."""
    ratio = (s.norm(dim=-1, keepdim=True) / z.norm(dim=-1, keepdim=True)).clamp_max(1e12)
    s, z = (v / v.norm(dim=-1, keepdim=True) for v in (s, z))
    mu = ((DAMPING * ratio - (s * z).sum(-1, keepdim=True)) / (1 - DAMPING)).clamp_min(0)
    z = z + mu * s
    good = (s * z).sum(-1, keepdim=True) > MIN_COSINE * z.norm(dim=-1, keepdim=True)
    return s, z, ratio + mu, good


def two_loops(pairs: Pairs, r: Tensor) -> Tensor:
    """The textbook recursion (Nocedal and Wright, algorithm 7.4) over the safe pairs, vector by vector."""
    alphas = []
    found = [safe(s, z) for s, z in pairs]
    for s, z, _, good in reversed(found):
        rho = torch.where(good, 1 / (s * z).sum(-1, keepdim=True), 0.0)
        alpha = rho * (s * r).sum(-1, keepdim=True)
        r = r - alpha * z
        alphas.append((alpha, rho))
    for (s, z, gamma, _), (alpha, rho) in zip(found, reversed(alphas), strict=True):
        r = r + (gamma * alpha - rho * (z * r).sum(-1, keepdim=True)) * s
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
    pairs = healthy_pairs(13, batch, length)
    for k, (s, z) in enumerate(pairs):
        H = torch.stack([dense_update(H[b], s[b], z[b]) for b in range(batch)])
        r = torch.randn(batch, length, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        expected = torch.einsum("bij,bj->bi", H, r)
        torch.testing.assert_close(apply_inverse_hessian(pairs[: k + 1], r), expected, rtol=1e-12, atol=1e-12)


def test_secant_equation_holds_for_the_newest_pair() -> None:
    pairs = healthy_pairs(5, 2, 16)
    s, z = pairs[-1]
    torch.testing.assert_close(apply_inverse_hessian(pairs, z), s)


def test_gradient_equals_that_of_the_dense_recursion() -> None:
    pairs = healthy_pairs(4, 1, 10)
    leaves = [(s.clone().requires_grad_(), z.clone().requires_grad_()) for s, z in pairs]
    r = torch.randn(1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    H = torch.eye(10, dtype=torch.float64)
    for s, z in leaves:
        H = dense_update(H, s[0], z[0])
    flat = [v for pair in leaves for v in pair]
    expected = torch.autograd.grad((H @ r[0]).square().sum(), flat)
    actual = torch.autograd.grad(apply_inverse_hessian(leaves, r).square().sum(), flat)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_weak_curvature_is_damped_to_the_bound() -> None:
    """zᵀs < 0.5 sᵀs: the pair used has zᵀs = 0.5 sᵀs, by z ← θz + (1 − θ)s."""
    s = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    z = torch.tensor([[-0.5, 0.4]], dtype=torch.float64)
    theta = 0.5 / (1 - (-0.5))
    expected_z = theta * z + (1 - theta) * s
    assert math.isclose(float((expected_z * s).sum()), 0.5)
    expected = dense_update(torch.eye(2, dtype=torch.float64), s[0], expected_z[0])
    for r in torch.eye(2, dtype=torch.float64):
        torch.testing.assert_close(apply_inverse_hessian([(s, z)], r[None])[0], expected @ r)


def test_a_pair_at_a_poor_angle_is_skipped_for_that_sample_only() -> None:
    s = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    z = torch.tensor([[1.0, 100.0], [1.0, 0.1]])  # zᵀs = sᵀs, but the first is nearly orthogonal
    assert used([(s, z)]).tolist() == [[False], [True]]
    r = torch.randn(2, 2)
    result = apply_inverse_hessian([(s, z)], r)
    assert torch.equal(result[0], r[0])
    assert not torch.equal(result[1], r[1])


def test_the_bound_on_the_angle_is_that_of_the_damped_pair() -> None:
    """Pairs of all angles and lengths, against the plain words."""
    generator = torch.Generator().manual_seed(2)
    s, z = torch.randn(2, 1000, 4, generator=generator, dtype=torch.float64)
    z = z * 10 ** torch.empty(1000, 1).uniform_(-2, 2, generator=generator)
    expected = safe(s, z)[-1]
    assert 100 < expected.sum() < 900
    assert torch.equal(used([(s, z)]), expected)
    (pair,) = safe_pairs([(s, z)])
    torch.testing.assert_close(pair.cosine[:, 0], torch.cosine_similarity(s, z))


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
    "at the bounds": (vector(1.1e-9, 0, 0), vector(-0.9e9, 1e8, 0)),
    "long step, short change": (vector(0.9e9, 0, 0), vector(-1e-12, 1e-12, 0)),
    "huge and long": (torch.full((1, 4096), 1e37), torch.full((1, 4096), 1e37)),
    "huge step, ordinary change": (torch.full((1, 4096), 3e38), torch.ones(1, 4096)),
    "long zero change": (torch.ones(1, 4096), torch.zeros(1, 4096)),
    "infinite": (vector(math.inf, 0, 0), vector(1, 1, 1)),
    "infinite change": (vector(1, 0, 0), vector(1, -math.inf, 1)),
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


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_that_is_not_finite_is_skipped_for_its_sample_only(value: float) -> None:
    (s, z), (s2, z2) = healthy_pairs(2, 3, 8)
    bad = s.clone()
    bad[1, 0] = value
    result, good = apply_inverse_hessian([(bad, z), (s2, z2)], s2), apply_inverse_hessian([(s, z), (s2, z2)], s2)
    torch.testing.assert_close(result[[0, 2]], good[[0, 2]])
    torch.testing.assert_close(result[1], apply_inverse_hessian([(s2, z2)], s2)[1])


def wild_pairs(generator: torch.Generator) -> Pairs:
    scales = 10 ** torch.empty(13, 2, 4, 1).uniform_(-18, 18, generator=generator)
    vectors = torch.randn(13, 2, 4, 8, generator=generator) * scales
    return [(s, z) for s, z in vectors]


def uneven_pairs(generator: torch.Generator) -> Pairs:
    """Of many scales, but no z is cut off, and the reference stays in the range of float32."""
    lengths = 10 ** torch.empty(13, 2, 4, 1).uniform_(-12, 12, generator=generator)
    lengths[:, 1] = lengths[:, 0] * 10 ** torch.empty(13, 4, 1).uniform_(-6, 6, generator=generator)
    return [(s, z) for s, z in torch.randn(13, 2, 4, 8, generator=generator) * lengths]


def doubled(pairs: Pairs) -> Pairs:
    return [(s.double(), z.double()) for s, z in pairs]


def test_equals_the_two_loop_recursion_where_pairs_are_damped_and_skipped() -> None:
    generator = torch.Generator().manual_seed(4)
    pairs = doubled(uneven_pairs(generator))
    assert 0 < used(pairs).sum() < used(pairs).numel()
    r = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(apply_inverse_hessian(pairs, r), two_loops(pairs, r), rtol=1e-9, atol=1e-12)


def test_float32_is_as_near_to_float64_as_the_two_loop_recursion_is() -> None:
    generator = torch.Generator().manual_seed(5)
    worst = {apply_inverse_hessian: 0.0, two_loops: 0.0}
    for _ in range(50):
        pairs, r = uneven_pairs(generator), torch.randn(4, 8, generator=generator)
        exact = two_loops(doubled(pairs), r.double())
        for apply in worst:
            error = (apply(pairs, r) - exact).norm(dim=1) / exact.norm(dim=1)
            worst[apply] = max(worst[apply], float(error.max()))
    assert worst[apply_inverse_hessian] < 3 * worst[two_loops] < 1e-4


def test_random_pairs_of_any_scale_keep_h_bounded_and_positive() -> None:
    """H stays positive definite: rᵀHr > 0 whatever pairs went in."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        pairs = wild_pairs(generator)
        r = torch.randn(4, 8, generator=generator)
        result = apply_inverse_hessian(pairs, r)
        assert torch.isfinite(result).all()
        assert ((r * result).sum(-1) > 0).all()


def descend(codes: list[Tensor], trust: Tensor, constant: bool = False) -> Tensor:
    """The way that iterations with these gradient codes go, as in `QNMixer.step`."""
    pairs: tuple[bfgs.Pair, ...] = ()
    step = -codes[0]
    way = step
    for before, r in pairwise(codes):
        s, scale = split_scale(step)
        z = (r - before) / scale
        pairs = *pairs, make_pair(*((s.detach(), z.detach()) if constant else (s, z)))
        step = -torch.lerp(r, bfgs.apply_inverse_hessian(r, pairs), trust)
        way = way + step
    return way


def descend_plainly(codes: list[Tensor], trust: Tensor, constant: bool = False) -> Tensor:
    """The same, by autograd alone through the textbook recursion."""
    pairs: Pairs = []
    steps = [-codes[0]]
    for before, r in pairwise(codes):
        pair = (steps[-1], r - before)
        pairs.append(tuple(v.detach() for v in pair) if constant else pair)  # type: ignore[arg-type]  # two
        steps.append(-torch.lerp(r, two_loops(pairs, r), trust))
    return torch.stack(steps).sum(0)


def codes_of(n: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Gradient codes of which some pairs are damped and some skipped, and the trust in H."""
    generator = torch.Generator().manual_seed(6)
    first = torch.randn(3, length, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 3, length, generator=generator, dtype=torch.float64)
    noise[3::4, 0] *= 30  # so far beside the step that the pair is skipped
    codes = [(first * 0.7**k + 0.3 * noise[k]).to(dtype).requires_grad_() for k in range(n)]
    return codes, torch.tensor([0.4], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("constant", [False, True], ids=["full", "detach"])
def test_a_descent_has_the_values_and_gradients_of_the_textbook(constant: bool) -> None:
    codes, trust = codes_of(6, 20)
    way, expected = descend(codes, trust, constant), descend_plainly(codes, trust, constant)
    torch.testing.assert_close(way, expected)
    weights = torch.linspace(-1, 1, 20, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((it * weights).sum(), [*codes, trust]) for it in (way, expected))
    torch.testing.assert_close(found, wanted)


def test_first_and_second_derivative() -> None:
    codes, trust = codes_of(4, 6)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda trust, *codes: descend(list(codes), trust), (trust, *codes))


@pytest.mark.parametrize("spread", [1.3, 3.0])
def test_float32_holds_where_the_iterations_converge(spread: float) -> None:
    """Late gradient codes are a millionth of the first: their change must not drown in what was."""
    values = torch.linspace(1 / spread, 1, 1024, dtype=torch.float64)
    x = start = torch.randn(2, 1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    codes: list[Tensor] = []
    while not codes or (len(codes) < 14 and codes[-1].norm() > 1e-6 * codes[0].norm()):
        codes.append((x * values).requires_grad_())
        x = start + descend_plainly(codes, torch.ones(1, dtype=torch.float64)).detach()
    assert codes[-1].norm() < 1e-3 * codes[0].norm()
    weights = torch.linspace(-1, 1, 1024, dtype=torch.float64)
    way = descend_plainly(codes, torch.ones(1, dtype=torch.float64))
    wanted = torch.autograd.grad((way * weights).sum(), codes)
    single = [code.detach().float().requires_grad_() for code in codes]
    found = torch.autograd.grad((descend(single, torch.ones(1)) * weights.float()).sum(), single)
    for gradient, want in zip(found, wanted, strict=True):
        assert (gradient - want).norm() < 2e-6 * want.norm()
