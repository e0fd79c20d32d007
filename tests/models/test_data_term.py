"""The steps along the data never grow an error, and no untrained network is worse than FBP, on any grid."""

import math
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import mse_loss

from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.models.data_term import data_gradient, nonnegative, safe_step_size
from qnmixer.models.unrolled import DataTerm
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from .conftest import LEARNED, build

# Image size, views, and how many times as fine as pixels the bins are at the axis. A full turn unless a span is given.
SMALL = [(32, 16, 2.5, None), (32, 128, 0.5, None), (32, 18, 1.0, 4.0)]
LARGE = [
    (64, 16, 1.24, None), (128, 32, 3.0, None),
    *(pytest.param(grid, marks=pytest.mark.long) for grid in ((256, 64, 1.24, None), (512, 16, 0.62, None))),
]  # fmt: skip


@cache
def projector(grid: tuple[int, int, float, float | None]) -> FanBeamProjector:
    size, views, fineness, span = grid
    pixel = 400 / size
    pitch = pixel / fineness * 890 / 600
    turn = 2 * math.pi if span is None else span
    bins = math.ceil(960 / pitch)
    return FanBeamProjector(FanBeamGeometry(size, pixel, views, bins, pitch, 600.0, 290.0, turn / views / 2, turn))


@pytest.mark.parametrize("data_term", get_args(DataTerm))
@pytest.mark.parametrize("grid", [*SMALL, *LARGE], ids=str)
@torch.no_grad()
def test_no_error_grows_along_the_data(grid: Any, data_term: DataTerm) -> None:
    """I − λA†A as a power iteration sees it: it would find one eigenvalue beyond 1 in any direction."""
    operator = projector(grid)
    step = safe_step_size(operator, data_term)
    error = torch.randn(1, 1, grid[0], grid[0], generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(1, 1, operator.geometry.n_views, operator.geometry.n_detectors)
    norms = [float(error.norm())]
    for _ in range(40):
        error = error - step * data_gradient(operator, data_term, error, nothing)
        norms.append(float(error.norm()))
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(norms))
    assert norms[-1] < norms[0]


@pytest.mark.parametrize("name", ["default", "figure", "adjoint", *LEARNED])
@pytest.mark.parametrize("grid", [*SMALL, *LARGE[1:]], ids=str)
@torch.no_grad()
def test_no_untrained_network_is_worse_than_fbp(grid: Any, name: str) -> None:
    """By more than 0.1 dB."""
    operator = projector(grid)
    truth = (torch.from_numpy(phantom(grid[0], seed=3, part="test", index=0))[None, None] + 1000) / 3000
    y = operator(truth)
    network = build(name, operator, awake=False, n_iterations=14 if name == "default" else 6)
    assert mse_loss(network(y), truth) <= 10**0.01 * mse_loss(operator.fbp(y), truth)


def test_the_gradient_leaves_out_only_what_would_darken_a_black_pixel() -> None:
    x = torch.tensor([-1.0, -1.0, 0.0, 0.0, 2.0, 2.0], requires_grad=True)
    image = nonnegative(x)
    assert torch.equal(image, x.clamp_min(0))
    (gradient,) = torch.autograd.grad(image, x, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]))
    assert gradient.tolist() == [0, -1, 0, -1, 1, -1]
