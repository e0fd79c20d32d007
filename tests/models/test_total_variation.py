import math

import pytest
import torch
from torch import Tensor

from qnmixer.models import TotalVariation
from qnmixer.models.total_variation import gradient
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


def objective(network: TotalVariation, x: Tensor, y: Tensor) -> Tensor:
    """What is minimised, for each sample [B], in float64."""
    x, y, projector = x.double(), y.double(), network.projector
    misfit = (projector(x.float()).double() - y) / projector.operator_norm()
    variation = gradient(x).norm(dim=1).flatten(1).sum(1)
    return 0.5 * misfit.flatten(1).square().sum(1) + network.weight * variation


@pytest.mark.parametrize("weight", [9e-5, pytest.param(1e-2, marks=pytest.mark.long)])
@torch.no_grad()
def test_the_gap_bounds_the_distance_to_the_minimum(scan: FanBeamProjector, blocks: Tensor, weight: float) -> None:
    """The minimum by many more iterations; no other point is lower."""
    y = scan(blocks) + 0.2 * torch.randn(2, 1, 12, 48, generator=torch.Generator().manual_seed(0))
    network = TotalVariation(scan, 800, weight, gap=0)
    best = network(y)
    lowest = objective(network, best, y)
    assert (objective(network, scan.fbp(y).clamp_min(0), y) > 1.2 * lowest).all()
    for gap in (0.3, 0.03):
        *_, state = TotalVariation(scan, weight=weight, gap=gap).states(y)
        assert (state.gap <= gap).all()
        value = objective(network, state.x, y)
        assert (value - lowest <= state.gap * value).all()
    assert (value < 1.01 * lowest).all()
    for _ in range(5):
        elsewhere = (best + 1e-2 * torch.randn_like(best)).clamp_min(0)
        assert (objective(network, elsewhere, y) > lowest).all()


def test_the_weight_follows_the_noise_of_each_slice(scan: FanBeamProjector, blocks: Tensor) -> None:
    """α = √(weight² + (c·σ)²): with it, each slice is as with that weight alone."""
    y = scan(blocks)
    deviations = torch.tensor([0.2, 2.0]).view(2, 1, 1, 1)

    def variance(y: Tensor) -> Tensor:
        return deviations.square().expand_as(y)

    following = TotalVariation(scan, weight=3e-4, noise_weight=2e-3, variance=variance)(y)
    for b, deviation in enumerate((0.2, 2.0)):
        alone = TotalVariation(scan, weight=math.hypot(3e-4, 2e-3 * deviation))(y[b : b + 1])
        torch.testing.assert_close(following[b : b + 1], alone, rtol=0, atol=1e-5)


def test_recovers_what_is_piecewise_constant(scan: FanBeamProjector, blocks: Tensor) -> None:
    """Noise-free, 15 dB above FBP at least; and nowhere negative."""
    y = scan(blocks)
    x = TotalVariation(scan)(y)
    gain = 10 * torch.log10((scan.fbp(y) - blocks).square().mean() / (x - blocks).square().mean())
    assert gain > 15
    assert x.min() >= 0
    assert not x.requires_grad  # no graph piles up
