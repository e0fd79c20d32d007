"""Measured sinograms at the rays of a network."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.engine.data.phantoms import phantom
from qnmixer.engine.inference.fit import fit_scan
from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.projector import system_matrix

SIZE = 64


def scanner(n_views: int = 32, **options: Any) -> FanBeamGeometry:
    chosen = {"n_detectors": 192, "detector_pitch": 5.0} | options
    return replace(FanBeamGeometry.paper(n_views, SIZE), **chosen)


def scan_of(geometry: FanBeamGeometry) -> np.ndarray:
    x = torch.from_numpy((phantom(SIZE, seed=0, part="test", index=2) + 1000) / 3000)[None, None]
    return system_matrix(geometry)(x)[0, 0].numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def fitted(scanner: FanBeamGeometry, geometry: FanBeamGeometry) -> np.ndarray:
    """What a scan by one geometry becomes for another."""
    return fit_scan(scan_of(scanner), scanner, geometry, "a scan")


@pytest.mark.parametrize(
    "options",
    [
        {"angle_span": -2 * math.pi},
        {"angle_span": 1.0, "first_angle": 0.3, "beam": "fan_curved", "detector_offset": 1.25},
        {"beam": "parallel", "angle_span": math.pi},
        {"view_angles": tuple(np.random.default_rng(0).uniform(-6, 6, 32))},
    ],
)
def test_a_scan_of_the_same_rays_stays_as_it_is(options: dict[str, Any]) -> None:
    geometry = scanner(**options)
    np.testing.assert_allclose(fitted(geometry, geometry), scan_of(geometry), atol=1e-4)


PARALLEL = {"beam": "parallel", "detector_pitch": 3.0, "n_detectors": 200}


@pytest.mark.parametrize(
    ("trained", "measured"),
    [
        ({}, {"n_detectors": 480, "detector_pitch": 2.0}),  # narrower bins are averaged, wider ones interpolated
        ({}, {"n_detectors": 150, "detector_pitch": 7.0}),
        ({}, {"detector_offset": 3.0, "detector_pitch": 2.5, "n_detectors": 400}),
        ({"beam": "fan_curved"}, {"beam": "fan_curved", "detector_pitch": 4.0, "n_detectors": 240}),
        (PARALLEL, PARALLEL | {"detector_offset": 0.5, "detector_pitch": 1.5, "n_detectors": 400}),
    ],
)
def test_rays_of_another_detector_are_found(trained: dict[str, Any], measured: dict[str, Any]) -> None:
    geometry = scanner(**trained)
    y = fitted(scanner(**measured), geometry)
    assert y.shape == (32, geometry.n_detectors)
    assert distance(y, scan_of(geometry)) < 0.03


@pytest.mark.parametrize(
    ("trained", "measured"),
    [
        ({}, {"n_views": 60}),
        ({}, {"n_views": 96}),
        ({"angle_span": -2 * math.pi}, {"n_views": 96, "angle_span": -2 * math.pi}),
        ({"angle_span": 2.0}, {"n_views": 150}),  # of a full turn
        ({"angle_span": 1.0}, {"n_views": 96, "angle_span": 1.5}),
        ({"view_angles": (0.0, 3.0, *np.linspace(1, 2, 46))}, {"n_views": 192}),
    ],
)
def test_views_at_other_angles(trained: dict[str, Any], measured: dict[str, Any]) -> None:
    geometry = scanner(48, first_angle=0.0, **trained)
    y = fitted(scanner(first_angle=0.0, **measured), geometry)
    assert distance(y, scan_of(geometry)) < 0.03


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"n_detectors": 52}, "cuts the object off"),
        ({"n_detectors": 110, "detector_offset": 20.0}, "cuts the object off"),  # on one side
        ({"n_views": 21}, "has 21 views"),
        ({"angle_span": 3.0}, r"ends at 2\.906 radians, but the run's views at 6\.087"),
    ],
)
def test_a_scanner_whose_rays_cannot_be_made_good_is_refused(measured: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"a scan .*{words}"):
        fitted(scanner(**measured), scanner())
