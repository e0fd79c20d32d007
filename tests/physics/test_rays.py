"""Exact intersections: the three beams against analytic integrals, ASTRA, chords of a square, and each other."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.projector import system_matrix

from .ellipses import ellipse_image, ellipse_integrals, random_pair, rays, relative_error

PAPER = FanBeamGeometry.paper(32)
BEAMS = {
    "fan_flat, no symmetry": FanBeamGeometry.paper(10),
    "fan_flat": replace(PAPER, detector_offset=0.25),
    "fan_flat far to one side": replace(PAPER, detector_offset=-100.0),
    "fan_curved": replace(PAPER, beam="fan_curved"),
    "fan_curved, short, clockwise": replace(PAPER, beam="fan_curved", detector_offset=1.25, angle_span=-4.0),
    "parallel": replace(PAPER, beam="parallel", detector_pitch=1.25, detector_offset=0.25),
    "parallel over π": replace(PAPER, beam="parallel", detector_pitch=1.25, angle_span=math.pi),
    "parallel over −π": replace(
        PAPER, beam="parallel", detector_pitch=1.25, angle_span=-math.pi, detector_offset=30.5, n_detectors=401
    ),
}


@pytest.mark.parametrize("name", BEAMS)
def test_every_beam_matches_analytic_ellipses(name: str) -> None:
    found = system_matrix(BEAMS[name])(ellipse_image(BEAMS[name]))
    assert relative_error(found, ellipse_integrals(BEAMS[name])) < 4e-3


def astra_sinogram(geometry: FanBeamGeometry, image: Tensor) -> Tensor:
    """The sinogram [V, D] that ASTRA makes of an image [1, 1, H, W]."""
    astra = pytest.importorskip("astra", reason="pip install .[bench] has ASTRA")
    half = geometry.image_size * geometry.pixel_size / 2
    volume = astra.create_vol_geom(geometry.image_size, geometry.image_size, -half, half, -half, half)
    pitch, n = geometry.detector_pitch, geometry.n_detectors
    if geometry.beam == "parallel":
        scan = astra.create_proj_geom("parallel", pitch, n, geometry.angles())
    elif geometry.beam == "fan_flat":
        distances = geometry.source_to_axis, geometry.axis_to_detector
        scan = astra.create_proj_geom("fanflat", pitch, n, geometry.angles(), *distances)
    else:  # it has no curved detector: a view of one bin for each ray
        source, along = (it.reshape(2, -1) for it in rays(geometry))
        across = pitch * np.stack([along[1], -along[0]])
        vectors = np.concatenate([source, source + geometry.source_to_detector * along, across])
        scan = astra.create_proj_geom("fanflat_vec", 1, np.ascontiguousarray(vectors.T))
    if geometry.beam != "fan_curved":
        scan = astra.geom_postalignment(astra.geom_2vec(scan), geometry.detector_offset)
    projector = astra.create_projector("line" if geometry.beam == "parallel" else "line_fanflat", scan, volume)
    number, sinogram = astra.create_sino(image[0, 0].numpy(), projector)
    astra.data2d.delete(number)
    return torch.from_numpy(sinogram).view(geometry.n_views, n)


@pytest.mark.parametrize("name", [name for name in BEAMS if "short" not in name])
def test_every_beam_agrees_with_astra(name: str) -> None:
    image = ellipse_image(BEAMS[name])
    expected = astra_sinogram(BEAMS[name], image)
    assert relative_error(system_matrix(BEAMS[name])(image)[0, 0], expected) < 5e-3


def any_geometry(seed: int) -> FanBeamGeometry:
    """A small scan, of any beam, span, direction and offset, with or without symmetry."""
    rng = np.random.default_rng(seed)
    size, bins, source = int(rng.integers(2, 14)), int(rng.integers(3, 30)), float(rng.uniform(9, 30))
    span = rng.choice([2 * math.pi, math.pi, rng.uniform(0.1, 2 * math.pi)]) * rng.choice([-1, 1])
    return FanBeamGeometry(
        image_size=size,
        pixel_size=10.0 / size,
        n_views=int(rng.integers(1, 13)),
        n_detectors=bins,
        detector_pitch=float(rng.uniform(1, 1.4) * 12.0 / bins),
        source_to_axis=source,
        axis_to_detector=float(rng.uniform(0, source / 2)),
        first_angle=float(rng.choice([0.0, math.pi / 4, rng.uniform(-6, 6)])),
        angle_span=float(span),
        beam=str(rng.choice(["fan_flat", "fan_curved", "parallel"])),
        detector_offset=float(rng.choice([0, 0.25, 0.5, -1, rng.uniform(-1, 1) * bins / 4])),
    )


def chords(geometry: FanBeamGeometry) -> np.ndarray:
    """How long each ray is in the square of the image, [V, D]: between its last entry and its first exit."""
    start, along = rays(geometry)
    half = geometry.image_size * geometry.pixel_size / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        edges = np.stack([(-half - start) / along, (half - start) / along])
    # A ray that runs along a side within half a pixel has no crossing with it; which side it is on decides.
    inside = np.abs(start) <= half
    edges = np.where(np.abs(along) < 1e-12, np.array([-np.inf, np.inf])[:, None, None, None], edges)
    length = edges.max(0).min(0) - edges.min(0).max(0)
    missed = ((np.abs(along) < 1e-12) & ~inside).any(0)
    return np.where(missed, 0, length.clip(0))


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_any_scan_sees_the_square_and_is_that_of_single_views(first: int) -> None:
    """Single views have no symmetry. Aᵀ is the transpose."""
    for seed in range(first, first + 20):
        geometry = any_geometry(seed)
        matrix = system_matrix(geometry)
        square = matrix(torch.ones(1, 1, geometry.image_size, geometry.image_size))[0, 0].numpy()
        np.testing.assert_allclose(square, chords(geometry), atol=1e-5, err_msg=str(geometry))
        x, y = random_pair(geometry)
        left, right = ((a.double() * b).sum() for a, b in ((matrix(x), y), (x.double(), matrix.transpose(y))))
        assert abs(left - right) <= 1e-5 * abs(left), geometry
        for view in range(0, geometry.n_views, 3):
            angle = math.remainder(geometry.angles()[view], 2 * math.pi)
            one = replace(geometry, n_views=1, first_angle=angle, angle_span=0.5)
            torch.testing.assert_close(system_matrix(one)(x)[:, :, 0], matrix(x)[:, :, view], atol=1e-4, rtol=1e-4)
