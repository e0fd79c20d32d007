"""A, Aᵀ and FBP against analytic integrals, hand-computed positions, ASTRA's sinograms and each other."""

import math
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qnmixer.errors import GeometryError
from qnmixer.physics import FBP_WINDOWS, FanBeamGeometry, FanBeamProjector
from qnmixer.physics.sparse import _csr_product, _reproducible_product

from .ellipses import ellipse_image, ellipse_integrals, random_pair, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable

TINY = FanBeamGeometry(
    image_size=6,
    pixel_size=2.0,
    n_views=8,
    n_detectors=9,
    detector_pitch=3.0,
    source_to_axis=30.0,
    axis_to_detector=15.0,
    first_angle=0.1,
)
GEOMETRIES = {
    "paper": FanBeamGeometry.paper(32, image_size=64),
    "odd_image": FanBeamGeometry.paper(16, image_size=65),
    "odd_everything": replace(FanBeamGeometry.paper(31, image_size=65), n_detectors=101, detector_pitch=9.0),
    "half_step_off_the_quarter": FanBeamGeometry.paper(30, image_size=64),
    "clockwise": replace(FanBeamGeometry.paper(32, image_size=64), angle_span=-2 * math.pi),
    "partial_turn": replace(FanBeamGeometry.paper(24, image_size=64), first_angle=-1.0, angle_span=2.0),
    "narrow_detector": replace(FanBeamGeometry.paper(32, image_size=64), n_detectors=64),
    "offset_first_angle": replace(FanBeamGeometry.paper(32, image_size=64), first_angle=0.123),
    "virtual_detector": FanBeamGeometry(64, 1.0, 30, 96, 1.0, 128.0, 0.0),
    "curved": replace(FanBeamGeometry.paper(32, 64), beam="fan_curved", detector_offset=0.25),
    "curved_short_scan": replace(
        FanBeamGeometry.paper(25, 65), beam="fan_curved", detector_offset=-1.25, first_angle=1.0, angle_span=-4.2
    ),
    "large_offset": replace(FanBeamGeometry.paper(16, 64), n_detectors=150, detector_pitch=5.0, detector_offset=-41.3),
    "parallel": replace(FanBeamGeometry.paper(16, 65), beam="parallel", detector_offset=0.25),
    "parallel_half_turn": replace(FanBeamGeometry.paper(30, 64), beam="parallel", angle_span=math.pi),
    "parallel_bin_on_the_axis": replace(
        FanBeamGeometry.paper(16, 65), beam="parallel", angle_span=-math.pi, n_detectors=101, detector_pitch=5.0
    ),
    "parallel_longer_side": replace(
        FanBeamGeometry.paper(16, 64), beam="parallel", angle_span=math.pi, n_detectors=101, detector_offset=20.5
    ),
    "parallel_between_bins": replace(
        FanBeamGeometry.paper(14, 64), beam="parallel", angle_span=math.pi, detector_offset=0.25
    ),
    # Measured scan of the Helsinki tomography challenge 2022 (its .mat file): 61 views over 30°, both ends included.
    "measured": FanBeamGeometry(
        image_size=64,
        pixel_size=0.1483223 * 8,
        n_views=61,
        n_detectors=560,
        detector_pitch=0.2,
        source_to_axis=410.66,
        axis_to_detector=553.74 - 410.66,
        angle_span=math.radians(30.5),
    ),
    "listed": replace(FanBeamGeometry.paper(8, 64), view_angles=(3.0, -0.1, 0.4, 1.7, 5.9, 0.41, 4.4, 0.4)),
}


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


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("paper", 4), ("odd_image", 4), ("clockwise", 4), ("offset_first_angle", 4), ("curved", 4),
        ("large_offset", 4), ("parallel", 4), ("parallel_half_turn", 4), ("parallel_bin_on_the_axis", 4),
        ("parallel_longer_side", 3), ("parallel_between_bins", 2),
    ],
)  # fmt: skip
def test_quarter_turn_path_equals_full_matrices(name: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = projector(name)
    monkeypatch.setattr(FanBeamGeometry, "has_quarter_turn_symmetry", False)
    full = FanBeamProjector(operator.geometry)
    assert full._rays.values.numel() > 0.95 * times * operator._rays.values.numel()
    x, y = random_pair(operator.geometry, batch=9)  # more than one product takes of quarters
    for apply, of_all, z in ((operator, full, x), (operator.adjoint, full.adjoint, y), (operator.fbp, full.fbp, y)):
        assert relative_error(apply(z), of_all(z)) < 3e-7
        assert relative_error(apply(z[-1:]), of_all(z[-1:])) < 3e-7  # a sample alone has a path of its own
        assert relative_error(of_all(z[-1:]), of_all(z)[-1:]) < 1e-6


def test_error_against_analytic_ellipses_is_that_of_the_pixels() -> None:
    """It falls in proportion to the pixel size; a projector's own error would stay."""
    errors = []
    for size in (32, 64, 128):
        geometry = FanBeamGeometry.paper(16, image_size=size)
        errors.append(relative_error(FanBeamProjector(geometry)(ellipse_image(geometry)), ellipse_integrals(geometry)))
    assert all(finer < 0.6 * coarser for coarser, finer in pairwise(errors))


def test_ones_give_chord_lengths_of_the_image_square() -> None:
    """Also along grid lines: at β = 0 the middle ray of an even image lies between two columns."""
    geometry = FanBeamGeometry(8, 1.0, 4, 3, 1.0, 100.0, 0.0)
    sinogram = FanBeamProjector(geometry)(torch.ones(1, 1, 8, 8))
    oblique = 8 * math.hypot(1, 1 / 100)
    assert sinogram[0, 0] == pytest.approx(np.tile([oblique, 8.0, oblique], (4, 1)), rel=1e-6)
    columns = torch.zeros(1, 1, 8, 8)
    columns[..., 3] = 1
    assert FanBeamProjector(geometry)(columns)[0, 0, 0, 1] == pytest.approx(4.0)


@pytest.mark.parametrize(("view", "u"), [(0, 40.0), (1, 200 / 3)])
def test_orientation_of_a_point_at_the_upper_right(view: int, u: float) -> None:
    """Row 1, column 6 of 8 × 10 mm is (25, 25) mm. With source and detector each at 100 mm from the axis, β = 0 sees it
    at u = 25·200/125 and β = 90° at u = 25·200/75.
    """
    geometry = FanBeamGeometry(8, 10.0, 4, 201, 1.0, 100.0, 100.0)
    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 1, 6] = 1
    row = FanBeamProjector(geometry)(x)[0, 0, view]
    assert float((row * torch.from_numpy(geometry.bin_positions())).sum() / row.sum()) == pytest.approx(u, rel=0.02)


@pytest.mark.parametrize("views", [30, 60])
def test_agrees_with_astra_sinograms(real_ct: Path, views: int) -> None:
    image = torch.from_numpy(np.load(real_ct / "astra_pair" / "012_100_gt.npy")).float()
    expected = torch.from_numpy(np.load(real_ct / "astra_pair" / f"012_100_{views}_sino.npy")).float()
    geometry = FanBeamGeometry(256, 1.0, views, 384, 1.0, 512.0, 0.0)
    assert relative_error(FanBeamProjector(geometry)(image[None, None])[0, 0], expected) <= 5e-3


def test_softer_filters_give_less_noise() -> None:
    _, y = random_pair(TINY, batch=50)
    spread = [FanBeamProjector(TINY, name).fbp(y).std() for name in FBP_WINDOWS]
    assert all(softer < sharper for sharper, softer in pairwise(spread))


def test_truncated_and_limited_scans_stay_finite() -> None:
    for name in ("narrow_detector", "partial_turn", "measured"):
        operator = projector(name)
        x, _ = random_pair(operator.geometry)
        found = operator.fbp(operator(x))
        assert torch.isfinite(found).all()
        assert 0 < float(found.abs().mean()) < 2


@pytest.mark.parametrize(
    "geometry",
    [
        TINY,
        replace(TINY, n_views=5, angle_span=4.0),
        replace(TINY, beam="fan_curved", detector_offset=-2.25),
        replace(TINY, beam="parallel", angle_span=math.pi, n_views=4, detector_offset=1.0),
    ],
    ids=["quarters", "full", "curved", "parallel"],
)
@pytest.mark.parametrize("method", ["forward", "fbp", "filtered_adjoint"])
def test_gradients_to_second_order(geometry: FanBeamGeometry, method: str) -> None:
    operator = FanBeamProjector(geometry).double()
    x, y = random_pair(geometry, batch=1)
    z = (x if method == "forward" else y).double().requires_grad_()
    apply: Callable[[Tensor], Tensor] = getattr(operator, method)
    assert torch.autograd.gradcheck(apply, (z,))
    assert torch.autograd.gradgradcheck(lambda v: apply(v).square(), (z,), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    operator = projector("paper")
    x, y = random_pair(operator.geometry)
    for apply, z in ((operator, x), (operator.adjoint, y), (operator.fbp, y)):
        z = z.to(dtype)
        expected_input = z.float().requires_grad_()
        expected = apply(expected_input)
        expected.square().sum().backward()
        z.requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            found = apply(z)
            found.square().sum().backward()
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
        assert z.grad is not None
        assert expected_input.grad is not None
        assert torch.equal(z.grad, expected_input.grad.to(dtype))


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "float"])
def test_dtype_conversions_keep_the_matrices_exact(convert: str) -> None:
    operator = FanBeamProjector(TINY)
    x, y = random_pair(TINY)
    expected = operator(x), operator.adjoint(y), operator.fbp(y)
    operator = getattr(operator, convert)()
    for found, before in zip((operator(x), operator.adjoint(y), operator.fbp(y)), expected, strict=True):
        assert found.dtype == torch.float32
        assert relative_error(found, before) < 1e-6
    assert operator(x.double()).dtype == (torch.float64 if convert == "double" else torch.float32)
    returned = operator.float()
    assert torch.equal(returned(x), expected[0])


def test_matrices_are_valid_csr_with_32_bit_indices() -> None:
    for matrix in (projector("odd_image")._rays, projector("odd_everything")._backprojection):
        for starts, indices, values in (
            (matrix.starts, matrix.pixels, matrix.values),
            (matrix.starts_t, matrix.rays, matrix.values_t),
        ):
            assert starts.dtype == indices.dtype == torch.int32
            assert values.dtype == torch.float32
            torch.sparse_csr_tensor(starts, indices, values, check_invariants=True)


def test_matrices_are_the_same_whatever_the_number_of_threads() -> None:
    geometry = FanBeamGeometry.paper(32, image_size=128)  # several parts of rays and of pixels
    alone = FanBeamProjector(geometry)
    torch.set_num_threads(3)
    together = FanBeamProjector(geometry)
    assert all(map(torch.equal, together.buffers(), alone.buffers()))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_reproducible_product_is_the_product(batch: int) -> None:
    """Deterministic mode takes it on CUDA. Empty rows give zero."""
    starts, indices = torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([0, 3, 1], dtype=torch.int32)
    values, x = torch.tensor([1.0, -2.0, 0.5]), torch.rand(4, batch)
    found = _reproducible_product(starts, indices, values, x)
    torch.testing.assert_close(found, _csr_product(starts, indices, values, x))


def test_fake_tensors_pass_through() -> None:
    """Memory plans run the network on tensors without data."""
    operator = projector("paper")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 1, 64, 64, requires_grad=True)
        image = operator.fbp(operator(x))
        image.sum().backward()
    assert image.shape == x.shape
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_wrong_shapes_get_one_line() -> None:
    operator = projector("paper")
    x, y = random_pair(operator.geometry)
    for apply, z, kind, needed in (
        (operator, x[..., 1:], "image", "[batch, 1, 64, 64]"),
        (operator, y, "image", "[batch, 1, 64, 64]"),
        (operator, x[0], "image", "[batch, 1, 64, 64]"),
        (operator.adjoint, x, "sinogram", "[batch, 1, 32, 512]"),
        (operator.fbp, y.transpose(2, 3), "sinogram", "[batch, 1, 32, 512]"),
        (partial(operator.filtered_residual, x), y[:, :, :1], "sinogram", "[batch, 1, 32, 512]"),
    ):
        with pytest.raises(GeometryError) as caught:
            apply(z)
        message = str(caught.value)
        assert message.startswith(kind)
        assert needed in message
        assert str(list(z.shape)) in message
        assert "\n" not in message


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


def test_a_scan_that_no_memory_holds_is_refused_before_it_is_built() -> None:
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
