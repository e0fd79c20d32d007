"""A, Aᵀ and FBP against each other, full matrices and ASTRA's sinograms; `test_rays` has what each beam sees."""

import math
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from qnmixer.errors import GeometryError
from qnmixer.physics import FBP_WINDOWS, FanBeamGeometry, FanBeamProjector
from qnmixer.physics.sparse import _csr_product, _reproducible_product

from .ellipses import random_pair, relative_error

TINY = FanBeamGeometry(6, 2.0, 8, 9, 3.0, 30.0, 15.0, first_angle=0.1)


def paper(n_views: int, image_size: int, **changes: object) -> FanBeamGeometry:
    return replace(FanBeamGeometry.paper(n_views, image_size), **changes)  # type: ignore[arg-type]  # numbers and words


GEOMETRIES = {
    "paper": paper(32, 64),
    "odd_image": paper(16, 65),
    "odd_everything": paper(31, 65, n_detectors=101, detector_pitch=9.0),
    "clockwise": paper(32, 64, angle_span=-2 * math.pi),
    "partial_turn": paper(24, 64, first_angle=-1.0, angle_span=2.0),
    "narrow_detector": paper(32, 64, n_detectors=64),
    "curved": paper(32, 64, beam="fan_curved", detector_offset=0.25),
    "curved_short_scan": paper(25, 65, beam="fan_curved", detector_offset=-1.25, first_angle=1.0, angle_span=-4.2),
    "large_offset": paper(16, 64, n_detectors=150, detector_pitch=5.0, detector_offset=-41.3),
    "parallel": paper(16, 64, beam="parallel", detector_offset=0.25),
    "half_turn": paper(30, 64, beam="parallel", angle_span=math.pi),
    "bin_on_the_axis": paper(16, 64, beam="parallel", angle_span=-math.pi, n_detectors=101, detector_pitch=5.0),
    "half_turn_with_offset": paper(14, 64, beam="parallel", angle_span=math.pi, detector_offset=0.25),
    # Measured scan of the Helsinki tomography challenge 2022 (its .mat file): 61 views over 30°, both ends included.
    "measured": FanBeamGeometry(64, 1.1865784, 61, 560, 0.2, 410.66, 143.08, angle_span=math.radians(30.5)),
}
# How many times fewer values the matrices have by the symmetry of quarter turns.
TIMES = 4
SYMMETRIC = "paper", "clockwise", "curved", "large_offset", "parallel", "half_turn", "bin_on_the_axis"


@cache
def projector(name: str) -> FanBeamProjector:
    return FanBeamProjector(GEOMETRIES[name])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_adjoint_is_the_transpose_and_backward_takes_it(name: str) -> None:
    """⟨M x, y⟩ = ⟨x, Mᵀ y⟩ for A, and for the gradient of each map: that of FBP uses its other matrix."""
    operator = projector(name)
    x, y = random_pair(operator.geometry)
    assert operator(x).sum() > 0
    for apply, a, b in ((operator, x, y), (operator.fbp, y, x), (operator.filtered_adjoint, y, x)):
        image = apply(a.requires_grad_())
        (gradient,) = torch.autograd.grad(image, a, b)
        left, right = (image.double() * b.double()).sum(), (a.double() * gradient.double()).sum()
        assert abs(left - right) <= 1e-5 * image.detach().double().norm() * b.double().norm()
        if apply is operator:
            assert torch.equal(gradient, operator.adjoint(b))


@pytest.mark.parametrize("name", SYMMETRIC)
def test_quarter_turn_path_equals_full_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = projector(name)
    for symmetry in ("has_quarter_turn_symmetry", "has_half_turn_symmetry"):
        monkeypatch.setattr(FanBeamGeometry, symmetry, False)
    full = FanBeamProjector(operator.geometry)
    assert full._rays.values.numel() > 0.95 * TIMES * operator._rays.values.numel()
    x, y = random_pair(operator.geometry, batch=9)  # more than one product takes of quarters
    for apply, of_all, z in ((operator, full, x), (operator.adjoint, full.adjoint, y), (operator.fbp, full.fbp, y)):
        assert relative_error(apply(z), of_all(z)) < 3e-7
        assert relative_error(apply(z[-1:]), of_all(z[-1:])) < 3e-7  # a sample alone has a path of its own
        assert relative_error(of_all(z[-1:]), of_all(z)[-1:]) < 1e-6


@pytest.mark.parametrize("views", [30, 60])
def test_agrees_with_astra_sinograms(real_ct: Path, views: int) -> None:
    image = torch.from_numpy(np.load(real_ct / "astra_pair" / "012_100_gt.npy")).float()
    expected = torch.from_numpy(np.load(real_ct / "astra_pair" / f"012_100_{views}_sino.npy")).float()
    geometry = FanBeamGeometry(256, 1.0, views, 384, 1.0, 512.0, 0.0)
    assert relative_error(FanBeamProjector(geometry)(image[None, None])[0, 0], expected) <= 5e-3


@pytest.mark.parametrize("geometry", [
    TINY,
    replace(TINY, n_views=5, angle_span=4.0),
    replace(TINY, beam="fan_curved", detector_offset=-2.25),
    replace(TINY, beam="parallel", angle_span=math.pi, n_views=4, detector_offset=1.0),
], ids=["quarters", "full", "curved", "parallel"])  # fmt: skip
@pytest.mark.parametrize("method", ["forward", "fbp", "filtered_adjoint"])
def test_gradients_to_second_order(geometry: FanBeamGeometry, method: str) -> None:
    operator = FanBeamProjector(geometry).double()
    x, y = random_pair(geometry, batch=1)
    z = (x if method == "forward" else y).double().requires_grad_()
    apply = getattr(operator, method)
    assert torch.autograd.gradcheck(apply, (z,))
    assert torch.autograd.gradgradcheck(lambda v: apply(v).square(), (z,), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    operator = projector("paper")
    x, y = random_pair(operator.geometry)
    for apply, z in ((operator, x.to(dtype)), (operator.adjoint, y.to(dtype)), (operator.fbp, y.to(dtype))):
        found, gradients = [], []
        for enabled, leaf in ((False, z.float().requires_grad_()), (True, z.requires_grad_())):
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                found.append(apply(leaf))
                gradients += torch.autograd.grad(found[-1].square().sum(), leaf)
        assert found[1].dtype == torch.float32
        assert torch.equal(*found)
        assert torch.equal(gradients[0].to(dtype), gradients[1])


def test_the_precision_is_that_of_the_module() -> None:
    operator = FanBeamProjector(TINY)
    x, y = random_pair(TINY)
    expected = operator(x), operator.adjoint(y), operator.fbp(y)
    operator.double()
    for found, before in zip((operator(x), operator.adjoint(y), operator.fbp(y)), expected, strict=True):
        assert found.dtype == torch.float32
        assert relative_error(found, before) < 1e-6
    assert operator(x.double()).dtype == torch.float64


@pytest.mark.parametrize("batch", [1, 3])
def test_the_reproducible_product_is_the_product(batch: int) -> None:
    """Deterministic mode takes it on CUDA. Empty rows give zero."""
    starts, indices = torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([0, 3, 1], dtype=torch.int32)
    values, x = torch.tensor([1.0, -2.0, 0.5]), torch.rand(4, batch)
    found = _reproducible_product(starts, indices, values, x)
    torch.testing.assert_close(found, _csr_product(starts, indices, values, x))


def test_what_no_product_takes_gets_one_line() -> None:
    operator, half = FanBeamProjector(TINY), FanBeamProjector(TINY).half()
    x, y = random_pair(TINY)
    for apply, z, line in (
        (operator, x[..., 1:], "image of shape [2, 1, 6, 5] does not fit the geometry, which needs [batch, 1, 6, 6]"),
        (operator, x[0], "image of shape [1, 6, 6] does not fit the geometry, which needs [batch, 1, 6, 6]"),
        (operator.fbp, y.mT, "sinogram of shape [2, 1, 9, 8] does not fit the geometry, which needs [batch, 1, 8, 9]"),
        (partial(operator.filtered_residual, x), y[:, :, :1], "sinogram of shape [2, 1, 1, 9] does not fit the geom"),
        (operator, x.numpy(), "image is a ndarray: give a torch.Tensor"),
        (operator.adjoint, y.numpy(), "sinogram is a ndarray: give a torch.Tensor"),
        (operator.fbp, y.numpy(), "sinogram is a ndarray: give a torch.Tensor"),
        (half, x.half(), "there are no sparse products in float16: call .float()"),
        (half.adjoint, y.half(), "there are no sparse products in float16: call .float()"),
        (half.fbp, y.half(), "there are no sparse products in float16: call .float()"),
    ):
        with pytest.raises(GeometryError, match=rf"^{re.escape(line)}.*$"):
            apply(z)


def test_operator_norm_is_the_largest_singular_value() -> None:
    operator = FanBeamProjector(TINY)
    dense = operator(torch.eye(36).view(36, 1, 6, 6)).view(36, -1)
    assert operator.operator_norm() == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-4)
    assert operator.operator_norm() == FanBeamProjector(TINY).operator_norm()


@pytest.mark.parametrize("fbp_filter", FBP_WINDOWS)
def test_filtered_adjoint_makes_a_symmetric_positive_map(fbp_filter: str) -> None:
    """All eigenvalues of A†A, in float64, against the step that is called safe."""
    operator = FanBeamProjector(TINY, fbp_filter).double()
    basis = torch.eye(36, dtype=torch.float64).view(36, 1, 6, 6)
    dense = operator.filtered_adjoint(operator(basis)).view(36, 36)
    torch.testing.assert_close(dense, dense.T)
    eigenvalues = torch.linalg.eigvalsh(dense)
    assert eigenvalues[0] > -1e-12
    assert operator.safe_step_size() == pytest.approx(1 / float(eigenvalues[-1]), rel=1e-2)


def test_filtered_adjoint_has_the_gain_of_fbp() -> None:
    """On a smooth disc, away from its rim."""
    operator = FanBeamProjector(FanBeamGeometry.paper(32, image_size=128))
    axis = torch.linspace(-1, 1, 128)
    x = torch.sigmoid(40 * (0.6 - torch.hypot(axis[:, None], axis)))[None, None]
    inner = torch.hypot(axis[:, None], axis) < 0.4
    image = operator.filtered_adjoint(operator(x))[0, 0]
    assert float(image[inner].mean()) == pytest.approx(1, abs=0.04)


def test_an_unknown_filter_and_a_scan_that_no_memory_holds_are_refused_before_anything_is_built() -> None:
    with pytest.raises(GeometryError, match=r"fbp_filter='sharp' is not known: choose ramp"):
        FanBeamProjector(TINY, "sharp")
    geometry = replace(FanBeamGeometry.paper(8191, image_size=8192), n_detectors=8192)
    with pytest.raises(GeometryError, match=r"n_views=8191 and n_detectors=8192 need \d+ GiB"):
        FanBeamProjector(geometry)


def test_least_squares_solves_each_sample_of_a_batch() -> None:
    """Enough steps give the image that one matrix gives; a sample of nothing stays nothing."""
    projector = FanBeamProjector(TINY).double()
    y = torch.rand(2, 1, 8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y[1] = 0
    matrix = torch.stack([projector(e.view(1, 1, 6, 6)).flatten() for e in torch.eye(36, dtype=torch.float64)], 1)
    expected = torch.linalg.lstsq(matrix, y[0].flatten()[:, None]).solution.view(6, 6)
    found = projector.least_squares(y, 200)
    torch.testing.assert_close(found[0, 0], expected, atol=1e-6, rtol=1e-6)
    assert not found[1].any()
