import math

import pytest
import torch
from torch import Tensor

from qnmixer.models import TotalVariation
from qnmixer.models.total_variation import divergence, gradient
from qnmixer.physics import FanBeamGeometry, FanBeamProjector


@pytest.fixture(scope="module")
def scan() -> FanBeamProjector:
    """32 × 32 pixels from 12 views: too few for FBP."""
    return FanBeamProjector(FanBeamGeometry(32, 12.5, 12, 48, 20.0, 600.0, 290.0, math.pi / 12))


@pytest.fixture(scope="module")
def blocks() -> Tensor:
    x = torch.zeros(2, 1, 32, 32)
    x[0, :, 8:24, 6:20] = 0.6
    x[0, :, 12:18, 14:26] = 1.0
    x[1, :, 4:12, 4:28] = 0.4
    return x


def test_divergence_is_minus_the_transpose_of_the_gradient() -> None:
    x, q = torch.randn(2, 1, 7, 5, dtype=torch.float64), torch.randn(2, 2, 7, 5, dtype=torch.float64)
    torch.testing.assert_close((gradient(x) * q).sum(), -(x * divergence(q)).sum())


def test_the_norm_of_the_gradient_is_at_most_what_steps_reckon_with() -> None:
    x = torch.randn(1, 1, 64, 64)
    for _ in range(200):
        x = -divergence(gradient(x / x.norm()))
    assert 7.9 < float(x.norm()) <= 8


def objective(network: TotalVariation, x: Tensor, y: Tensor) -> Tensor:
    """What is minimised, for each sample [B]."""
    misfit = (network.projector(x) - y) / network.projector.operator_norm()
    variation = gradient(x).norm(dim=1).flatten(1).sum(1)
    return 0.5 * misfit.flatten(1).square().sum(1) + network.weight * variation


def test_the_objective_comes_near_its_minimum(scan: FanBeamProjector, blocks: Tensor) -> None:
    """The minimum by 8 times as many iterations, and no other point is lower."""
    y = scan(blocks)
    with torch.no_grad():
        iterates = TotalVariation(scan).iterates(y)
        network = TotalVariation(scan, n_iterations=1600)
        best = network(y)
    lowest, start, end = (objective(network, x, y) for x in (best, iterates[0], iterates[-1]))
    assert (start > 5 * lowest).all()
    assert (end < 1.02 * lowest).all()
    for _ in range(5):
        elsewhere = (best + 1e-2 * torch.randn_like(best)).clamp_min(0)
        assert (objective(network, elsewhere, y) > lowest).all()


def test_recovers_what_is_piecewise_constant(scan: FanBeamProjector, blocks: Tensor) -> None:
    """Noise-free, 15 dB above FBP at least; and nowhere negative."""
    y = scan(blocks)
    x = TotalVariation(scan)(y)
    gain = 10 * torch.log10((scan.fbp(y) - blocks).square().mean() / (x - blocks).square().mean())
    assert gain > 15
    assert x.min() >= 0


def test_the_weight_does_not_depend_on_the_scale_of_the_scan(blocks: Tensor) -> None:
    """The same scan in another unit of length: the same image."""
    found = []
    for unit in (1.0, 10.0):
        lengths = [length * unit for length in (20.0, 600.0, 290.0)]
        scan = FanBeamProjector(FanBeamGeometry(32, 12.5 * unit, 12, 48, *lengths, math.pi / 12))
        found.append(TotalVariation(scan, n_iterations=20, weight=1e-2)(scan(blocks)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_a_large_weight_makes_it_flat(scan: FanBeamProjector, blocks: Tensor) -> None:
    y = scan(blocks)
    flat, sharp = (TotalVariation(scan, weight=weight)(y) for weight in (1e-1, 1e-4))
    assert gradient(flat).norm() < 0.5 * gradient(sharp).norm()


def test_no_graph_piles_up(scan: FanBeamProjector, blocks: Tensor) -> None:
    assert not TotalVariation(scan, n_iterations=2)(scan(blocks)).requires_grad
