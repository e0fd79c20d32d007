import math
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from qnmixer.models.latent_bfgs import DAMPING, MIN_COSINE, History, coefficients, curvature

from ..operators import Operators

Pairs = Iterable[tuple[Tensor, Tensor]]


def dense_update(H: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """The published recursion, one sample, as drawn."""
    rho = 1 / (z @ s)
    left = torch.eye(len(s), dtype=s.dtype) - rho * torch.outer(s, z)
    return left @ H @ left.T + rho * torch.outer(s, s)


def apply_inverse_hessian(pairs: Pairs, r: Tensor) -> Tensor:
    """H r of pairs (s, z), by the coefficients."""
    rows = torch.stack([v for pair in pairs for v in pair], 1)
    f = coefficients(rows @ rows.mT, (rows @ r[..., None])[..., 0])
    return r + (f[:, None] @ rows)[:, 0]


def used(pairs: Pairs) -> Tensor:
    """Whether each pair is, [B, t]."""
    rows = torch.stack([v for pair in pairs for v in pair], 1)
    return curvature(rows @ rows.mT).used


def safe(s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The damped z, and whether the pair is used [B, 1], as the paper on damping would write it."""
    ss, zs = (s * s).sum(-1, keepdim=True), (z * s).sum(-1, keepdim=True)
    theta = torch.where(zs < DAMPING * ss, (1 - DAMPING) * ss / (ss - zs), 1.0)
    z = theta * z + (1 - theta) * s
    return z, (z * s).sum(-1, keepdim=True) > MIN_COSINE * z.norm(dim=-1, keepdim=True) * s.norm(dim=-1, keepdim=True)


def two_loops(pairs: Pairs, r: Tensor) -> Tensor:
    """The textbook recursion (Nocedal and Wright, algorithm 7.4) over the safe pairs, vector by vector."""
    alphas = []
    found = [(s, *safe(s, z)) for s, z in pairs]
    for s, z, good in reversed(found):
        rho = torch.where(good, 1 / (s * z).sum(-1, keepdim=True), 0.0)
        alpha = rho * (s * r).sum(-1, keepdim=True)
        r = r - alpha * z
        alphas.append((alpha, rho))
    for (s, z, _), (alpha, rho) in zip(found, reversed(alphas), strict=True):
        r = r + (alpha - rho * (z * r).sum(-1, keepdim=True)) * s
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
    expected = safe(s, z)[1]
    assert 100 < expected.sum() < 900
    assert torch.equal(used([(s, z)]), expected)
    gram = torch.stack([s, z], 1) @ torch.stack([s, z], 1).mT
    torch.testing.assert_close(curvature(gram).cosine[:, 0], torch.cosine_similarity(s, z))


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
def test_a_pair_that_is_not_finite_is_skipped_for_that_sample_only(value: float) -> None:
    """Its vectors are in the image, which shows it; the coefficients and other samples know nothing of it."""
    (s, z), (s2, z2) = healthy_pairs(2, 3, 8)
    good = apply_inverse_hessian([(s, z), (s2, z2)], s)
    z = z.clone()
    z[1, 0] = value
    rows = torch.stack([s, z, s2, z2], 1)
    f = coefficients(rows @ rows.mT, (rows @ s[..., None])[..., 0])
    assert torch.isfinite(f).all()
    assert f[1, :2].tolist() == [0, 0]
    found = apply_inverse_hessian([(s, z), (s2, z2)], s)
    torch.testing.assert_close(found[[0, 2]], good[[0, 2]])


def wild_pairs(generator: torch.Generator, magnitude: float = 8) -> list[tuple[Tensor, Tensor]]:
    scales = 10 ** torch.empty(13, 2, 4, 1).uniform_(-magnitude, magnitude, generator=generator)
    vectors = torch.randn(13, 2, 4, 8, generator=generator) * scales
    return [(s, z) for s, z in vectors]


def doubled(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    return [(s.double(), z.double()) for s, z in pairs]


def test_equals_the_two_loop_recursion_where_pairs_are_damped_and_skipped() -> None:
    generator = torch.Generator().manual_seed(4)
    pairs = doubled(wild_pairs(generator))
    assert 0 < used(pairs).sum() < used(pairs).numel()
    r = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(apply_inverse_hessian(pairs, r), two_loops(pairs, r), rtol=1e-9, atol=1e-12)


def test_float32_is_as_near_to_float64_as_the_two_loop_recursion_is() -> None:
    generator = torch.Generator().manual_seed(5)
    worst = {apply_inverse_hessian: 0.0, two_loops: 0.0}
    for _ in range(50):
        pairs, r = wild_pairs(generator), torch.randn(4, 8, generator=generator)
        exact = two_loops(doubled(pairs), r.double())
        for apply in worst:
            error = (apply(pairs, r) - exact).norm(dim=1) / exact.norm(dim=1)
            worst[apply] = max(worst[apply], float(error.max()))
    assert worst[apply_inverse_hessian] < 2 * worst[two_loops] < 1e-4


def test_random_pairs_of_any_scale_keep_h_bounded_and_positive() -> None:
    """H stays positive definite: rᵀHr > 0 whatever pairs went in."""
    generator = torch.Generator().manual_seed(3)
    for magnitude in [8.0] * 25 + [18.0] * 25:
        pairs = wild_pairs(generator, magnitude)
        r = torch.randn(4, 8, generator=generator)
        result = apply_inverse_hessian(pairs, r)
        assert torch.isfinite(result).all()
        assert ((r * result).sum(-1) > 0).all()


def descend(codes: list[Tensor], trust: Tensor, constant: bool = False, copied: bool = False) -> Tensor:
    """The way that iterations with these gradient codes go, by a history; copied: from its rows alone each time."""
    history = History.begin(codes[0], len(codes)).stepped(codes[0])
    for r in codes[1:]:
        if copied:
            history = tree_map(lambda rows: rows * 1.0, history).in_buffer(len(codes))
        history, gram, products = history.changed(r, history.sums()[0], constant)
        history = history.stepped(r, trust * coefficients(gram, products), constant)
    return history.sums()[1]


def descend_plainly(codes: list[Tensor], trust: Tensor, constant: bool = False) -> Tensor:
    """The same, by autograd alone."""
    pairs: list[tuple[Tensor, Tensor]] = []
    steps = [-codes[0]]
    for before, r in pairwise(codes):
        pair = (steps[-1], r - before)
        pairs.append(tuple(v.detach() for v in pair) if constant else pair)  # type: ignore[arg-type]  # two
        steps.append(-torch.lerp(r, apply_inverse_hessian(pairs, r), trust))
    return torch.stack(steps).sum(0)


def codes_of(n: int, length: int) -> tuple[list[Tensor], Tensor]:
    """Gradient codes of which some pairs are damped and some skipped, and the trust in H."""
    generator = torch.Generator().manual_seed(6)
    first = torch.randn(3, length, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 3, length, generator=generator, dtype=torch.float64)
    noise[3::4, 0] *= 30  # so far beside the step that the pair is skipped
    codes = [(first * 0.7**k + 0.3 * noise[k]).requires_grad_() for k in range(n)]
    return codes, torch.tensor([0.4], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("copied", [False, True], ids=["in one buffer", "copied"])
@pytest.mark.parametrize("constant", [False, True], ids=["full", "detach"])
def test_a_history_gives_the_values_and_gradients_of_autograd(constant: bool, copied: bool) -> None:
    """A second backward through the graph too."""
    codes, trust = codes_of(6, 20)
    way, expected = descend(codes, trust, constant, copied), descend_plainly(codes, trust, constant)
    torch.testing.assert_close(way, expected)
    weights = torch.linspace(-1, 1, 20, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), [*codes, trust])
    for _ in range(2):
        found = torch.autograd.grad((way * weights).sum(), [*codes, trust], retain_graph=True)
        for gradient, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient, want)


def test_gradcheck() -> None:
    codes, trust = codes_of(4, 6)
    assert torch.autograd.gradcheck(lambda trust, *codes: descend(list(codes), trust), (trust, *codes))


def test_a_history_gives_back_every_gradient_code() -> None:
    """r_t = r_0 + Σ z, of damped and skipped pairs too."""
    codes, _ = codes_of(6, 8)
    history = History.begin(codes[0], 6).stepped(codes[0])
    for before, r in pairwise(codes):
        torch.testing.assert_close(history.sums()[0], before)
        history, gram, products = history.changed(r, history.sums()[0])
        history = history.stepped(r, coefficients(gram, products))
    used, cosine = history.curvature()
    assert used.shape == (3, 5)
    assert 0 < used.sum() < used.numel()
    torch.testing.assert_close(cosine[:, 0], torch.cosine_similarity(codes[1] - codes[0], -codes[0]))


def test_backward_keeps_the_history_and_one_vector_an_iteration() -> None:
    codes, trust = codes_of(8, 64)
    kept: dict[int, Tensor] = {}

    def keep(v: Tensor) -> Tensor:
        if v.shape[-1] == 64:
            kept[v.data_ptr()] = v
        return v

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda v: v):
        descend(codes, trust)
    assert {v.data_ptr() for v in codes} >= kept.keys()


def test_an_iteration_takes_the_same_operators_whatever_came_before() -> None:
    def n_operators(n_codes: int) -> int:
        codes, trust = codes_of(n_codes, 8)
        with Operators() as operators:
            descend(codes, trust).sum().backward()
        return operators.total

    three, four, thirteen, fourteen = map(n_operators, (3, 4, 13, 14))
    assert fourteen - thirteen == four - three < 110
