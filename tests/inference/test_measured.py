import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.engine.config import parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.data.phantoms import phantom
from qnmixer.engine.inference.measured import ScanLayout, fit_scan, read_mat
from qnmixer.engine.reconstructor import build_geometry
from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.physics.rays import system_matrix

SIZE = 64


def scanner(n_views: int = 32, **options: Any) -> FanBeamGeometry:
    chosen = {"n_detectors": 192, "detector_pitch": 5.0} | options
    return replace(FanBeamGeometry.paper(n_views, SIZE), **chosen)


def layout_of(geometry: FanBeamGeometry) -> ScanLayout:
    distances = geometry.source_to_axis, geometry.source_to_detector
    centre = geometry.detector_offset * geometry.detector_pitch
    return ScanLayout(geometry.angles(), geometry.detector_pitch, *distances, geometry.beam, centre)


def truth() -> torch.Tensor:
    return torch.from_numpy((phantom(SIZE, seed=0, part="test", index=2) + 1000) / 3000)[None, None]


def scan_of(geometry: FanBeamGeometry) -> np.ndarray:
    return system_matrix(geometry)(truth())[0, 0].numpy()


def psnr_of_fbp(y: np.ndarray, geometry: FanBeamGeometry) -> float:
    x = FanBeamProjector(geometry).fbp(torch.from_numpy(y)[None, None])
    return -10 * float((x - truth()).square().mean().log10())


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"angle_span": -2 * math.pi},
        {"angle_span": 1.0, "first_angle": 0.3},
        {"beam": "fan_curved", "detector_offset": 1.25},
        {"beam": "parallel", "angle_span": math.pi},
    ],
)
def test_a_scan_of_the_same_layout_stays_as_it_is(options: dict[str, Any]) -> None:
    geometry = scanner(**options)
    y = scan_of(geometry)
    fitted, missing = fit_scan(y, layout_of(geometry), geometry, "a scan")
    assert not missing.any()
    np.testing.assert_allclose(fitted, y, atol=1e-4)


def test_a_tenth_of_the_views_missing_costs_little() -> None:
    geometry = scanner()
    y = scan_of(geometry)
    holes = y.copy()
    holes[[0, 9, 10]] = np.nan
    fitted, missing = fit_scan(holes, layout_of(geometry), geometry, "a scan")
    assert np.flatnonzero(missing).tolist() == [0, 9, 10]
    np.testing.assert_allclose(fitted[~missing], y[~missing], atol=1e-4)
    np.testing.assert_allclose(fitted[0], (y[-1] + y[1]) / 2, rtol=1e-4, atol=1e-4)
    whole, filled, dark = (psnr_of_fbp(z, geometry) for z in (y, fitted, np.nan_to_num(holes)))
    assert filled > whole - 0.5
    assert dark < filled - 0.5


@pytest.mark.parametrize(("n_detectors", "pitch"), [(480, 2.0), (200, 5.0), (150, 7.0)])
def test_another_detector(n_detectors: int, pitch: float) -> None:
    geometry = scanner()
    other = scanner(n_detectors=n_detectors, detector_pitch=pitch)
    fitted, missing = fit_scan(scan_of(other), layout_of(other), geometry, "a scan")
    assert fitted.shape == (32, 192)
    assert not missing.any()
    assert distance(fitted, scan_of(geometry)) < 0.03
    assert psnr_of_fbp(fitted, geometry) > psnr_of_fbp(scan_of(geometry), geometry) - 1.0


def test_a_detector_at_another_distance_has_its_own_magnification() -> None:
    geometry = scanner()
    other = scanner(axis_to_detector=0.0, detector_pitch=5.0 * 600 / 890)
    fitted, _ = fit_scan(scan_of(other), layout_of(other), geometry, "a scan")
    np.testing.assert_allclose(fitted, scan_of(geometry), atol=1e-3)


FLAT = {"beam": "fan_flat", "n_detectors": 200}
CURVED = {"beam": "fan_curved", "n_detectors": 200}
PARALLEL = {"beam": "parallel", "detector_pitch": 3.0, "n_detectors": 200}


@pytest.mark.parametrize(
    ("trained", "measured"),
    [
        (CURVED, FLAT),
        (FLAT, CURVED | {"detector_offset": 1.25, "axis_to_detector": 100.0, "detector_pitch": 4.0}),
        (FLAT | {"detector_offset": -0.25}, FLAT),
        (FLAT, FLAT | {"detector_offset": 3.0, "detector_pitch": 2.5, "n_detectors": 400}),
        (PARALLEL, PARALLEL | {"detector_offset": 0.5, "source_to_axis": 1.0}),
        (PARALLEL | {"detector_pitch": 4.0}, PARALLEL | {"detector_pitch": 1.5, "n_detectors": 400}),
    ],
)
def test_rays_of_another_detector_are_found(trained: dict[str, Any], measured: dict[str, Any]) -> None:
    geometry, other = scanner(**trained), scanner(**measured)
    fitted, _ = fit_scan(scan_of(other), layout_of(other), geometry, "a scan")
    assert distance(fitted, scan_of(geometry)) < 0.02


@pytest.mark.parametrize(("trained", "measured"), [(FLAT, PARALLEL), (PARALLEL, CURVED)])
def test_a_fan_is_no_parallel_beam(trained: dict[str, Any], measured: dict[str, Any]) -> None:
    geometry, other = scanner(**trained), scanner(**measured)
    with pytest.raises(DataError, match=f"with beam {other.beam}, but the run was trained for {geometry.beam}"):
        fit_scan(scan_of(other), layout_of(other), geometry, "a scan")


def test_a_detector_that_cuts_the_object_off_on_one_side_is_refused() -> None:
    geometry, other = scanner(), scanner(n_detectors=110, detector_offset=20.0)
    with pytest.raises(DataError, match="cuts the object off"):
        fit_scan(scan_of(other), layout_of(other), geometry, "a scan")


@pytest.mark.parametrize("n_views", [60, 48, 96])
def test_views_at_other_angles(n_views: int) -> None:
    geometry, other = scanner(48, first_angle=0.0), scanner(n_views, first_angle=0.0)
    fitted, missing = fit_scan(scan_of(other), layout_of(other), geometry, "a scan")
    assert not missing.any()
    assert distance(fitted, scan_of(geometry)) < (0.03 if n_views % 48 else 1e-5)


def test_a_list_of_angles_with_both_ends_of_the_turn() -> None:
    geometry = scanner(first_angle=0.0)
    y = scan_of(geometry)
    angles = np.append(geometry.angles(), 2 * math.pi)
    layout = replace(layout_of(geometry), angles=angles)
    fitted, _ = fit_scan(np.concatenate([y, y[:1]]), layout, geometry, "a scan")
    np.testing.assert_allclose(fitted, y, atol=1e-4)


@pytest.mark.parametrize("fault", ["dead bin", "infinite", "end", "gap", "few", "all", "source", "narrow", "backwards"])
def test_what_cannot_be_made_good_is_refused(fault: str) -> None:
    part = fault in ("end", "backwards")
    geometry = scanner(**({"angle_span": 2.0} if part else {}))
    y, layout = scan_of(geometry).copy(), layout_of(geometry)
    if fault == "dead bin":
        y[3, 5] = np.nan
    elif fault == "infinite":
        y[3] = np.inf
    elif fault in ("end", "gap", "few", "all"):
        y[{"end": slice(31, 32), "gap": slice(4, 9), "few": slice(0, 32, 3), "all": slice(32)}[fault]] = np.nan
    elif fault == "source":
        layout = replace(layout, source_to_axis=500.0)
    elif fault == "narrow":
        y = y[:, 70:-70]
    else:
        layout = replace(layout, angles=-layout.angles)
    words = {"dead bin": "interpolate the dead bins", "infinite": "interpolate the dead bins", "end": "number 31",
             "gap": "no views near 5 of the 32", "few": "has 21 measured views", "all": "has 0 measured views",
             "source": "500 mm from the axis", "narrow": "cuts the object", "backwards": "no views near"}  # fmt: skip
    with pytest.raises(DataError, match=words[fault]) as error:
        fit_scan(y, layout, geometry, "scan.npy")
    assert "scan.npy" in str(error.value)


# Files


def mat(path: Path, sinogram: np.ndarray, **changes: Any) -> Path:
    """A scan as the Helsinki laboratory writes them."""
    io = pytest.importorskip("scipy.io")
    parameters = {
        "angles": 30 + 0.5 * np.arange(len(sinogram)), "distanceSourceOrigin": 410.66,
        "distanceSourceDetector": 553.74, "distanceUnit": "mm", "pixelSizePost": 0.2,
    } | changes  # fmt: skip
    parameters = {key: value for key, value in parameters.items() if value is not None}
    io.savemat(path, {"CtDataLimited": {"type": "2d", "sinogram": sinogram, "parameters": parameters}})
    return path


def test_a_matlab_scan(tmp_path: Path) -> None:
    y = np.random.default_rng(0).random((4, 7))
    sinogram, layout = read_mat(mat(tmp_path / "a.mat", y))
    np.testing.assert_allclose(sinogram, y, rtol=1e-6)
    np.testing.assert_allclose(np.degrees(layout.angles), [30, 30.5, 31, 31.5])
    assert (layout.detector_pitch, layout.source_to_axis, layout.source_to_detector) == (0.2, 410.66, 553.74)


@pytest.mark.parametrize("fault", ["text", "other", "no distance", "zero", "nan", "angle", "angles", "cm", "7.3"])
def test_matlab_files_that_are_no_scan(tmp_path: Path, fault: str) -> None:
    path, y = tmp_path / "a.mat", np.ones((4, 7))
    if fault == "text":
        path.write_text("no such file " * 20)
    elif fault == "other":
        pytest.importorskip("scipy.io").savemat(path, {"x": y})
    elif fault == "7.3":
        path.write_bytes(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM" + bytes(400))
    else:
        changes = {
            "no distance": {"distanceSourceOrigin": None},
            "zero": {"distanceSourceDetector": 0},
            "nan": {"distanceSourceOrigin": math.nan},
            "angle": {"angles": [1, 2, 3, math.nan]},
            "angles": {"angles": [1, 2]},
            "cm": {"distanceUnit": "cm"},
        }
        mat(path, y, **changes[fault])
    with pytest.raises(DataError, match=r"a\.mat.*\.npy"):
        read_mat(path)


def test_without_scipy_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mat(tmp_path / "a.mat", np.ones((4, 7)))
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DataError, match="pip install scipy"):
        read_mat(path)


@pytest.mark.parametrize("name", ["ta", "tc", "td"])
def test_measured_scans_have_the_geometry_of_the_config(real_ct: Path, name: str) -> None:
    """Their object is a disc of 70 mm, which the rays of the config place at the same spot from every view."""
    pytest.importorskip("scipy.io")
    geometry = build_geometry(parse(compose("train", ["geometry=htc2022"])))
    sinogram, layout = read_mat(real_ct / "measured" / f"{name}_category7.mat")
    fitted, missing = fit_scan(sinogram, layout, geometry, name)
    assert not missing.any()
    np.testing.assert_allclose(fitted, sinogram, atol=1e-5)
    seen = fitted > 0.15
    edges = np.stack([seen.argmax(axis=1) - 0.5, 560 - seen[:, ::-1].argmax(axis=1) - 0.5], axis=1) - 279.5
    left, right = np.arctan(edges * geometry.detector_pitch / geometry.source_to_detector).T
    # From the source at β the centre (x, y) is at depth along the central ray, beside it by `aside`.
    sin, cos = np.sin(geometry.angles()), np.cos(geometry.angles())
    ratio = np.tan((left + right) / 2)
    matrix = np.stack([cos + ratio * sin, sin - ratio * cos], axis=1)
    centre, *_ = np.linalg.lstsq(matrix, ratio * geometry.source_to_axis, rcond=None)
    depth = geometry.source_to_axis - centre[0] * sin + centre[1] * cos
    aside = centre[0] * cos + centre[1] * sin
    radius = np.hypot(depth, aside) * np.sin((right - left) / 2)
    assert np.abs(radius - 35).max() < 0.4
    assert np.hypot(*centre) < 3
