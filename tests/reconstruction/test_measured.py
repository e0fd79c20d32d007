"""Measured sinograms at the rays of a network, and the files that they come from."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.data.regrid import regrid_scan
from qnmixer.data.sinograms import read_mat
from qnmixer.errors import DataError
from qnmixer.measurement.build import build_geometry
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.physics.projector import system_matrix
from qnmixer.reconstruction.reconstruct import reconstruct_input
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.settings.compose import compose

from ..conftest import config_of
from ..saved import TINY, save

SIZE = 64


def scanner(n_views: int = 32, **options: Any) -> FanBeamGeometry:
    chosen = {"n_detectors": 192, "detector_pitch": 5.0} | options
    return replace(FanBeamGeometry.paper(n_views, SIZE), **chosen)


def truth() -> torch.Tensor:
    return torch.from_numpy((phantom(SIZE, seed=0, part="test", index=2) + 1000) / 3000)[None, None]


def scan_of(geometry: FanBeamGeometry) -> np.ndarray:
    return system_matrix(geometry)(truth())[0, 0].numpy()


def psnr_of_fbp(y: np.ndarray, geometry: FanBeamGeometry) -> float:
    x = FanBeamProjector(geometry).fbp(torch.from_numpy(y)[None, None])
    return -10 * float((x - truth()).square().mean().log10())


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def fitted(scanner: FanBeamGeometry, geometry: FanBeamGeometry) -> tuple[np.ndarray, np.ndarray]:
    """What a scan by one geometry becomes for another."""
    return regrid_scan(scan_of(scanner), scanner.angles(), scanner, geometry, "a scan")


@pytest.mark.parametrize("options", [
    {"angle_span": -2 * math.pi},
    {"angle_span": 1.0, "first_angle": 0.3, "beam": "fan_curved", "detector_offset": 1.25},
    {"beam": "parallel", "angle_span": math.pi},
])  # fmt: skip
def test_a_scan_of_the_same_rays_stays_as_it_is(options: dict[str, Any]) -> None:
    geometry = scanner(**options)
    y, missing = fitted(geometry, geometry)
    assert not missing.any()
    np.testing.assert_allclose(y, scan_of(geometry), atol=1e-4)


def test_a_tenth_of_the_views_missing_costs_little() -> None:
    geometry = scanner()
    y = scan_of(geometry)
    holes = y.copy()
    holes[[0, 9, 10]] = np.nan
    found, missing = regrid_scan(holes, geometry.angles(), geometry, geometry, "a scan")
    assert np.flatnonzero(missing).tolist() == [0, 9, 10]
    np.testing.assert_allclose(found[~missing], y[~missing], atol=1e-4)
    np.testing.assert_allclose(found[0], (y[-1] + y[1]) / 2, rtol=1e-4, atol=1e-4)
    whole, filled, dark = (psnr_of_fbp(z, geometry) for z in (y, found, np.nan_to_num(holes)))
    assert filled > whole - 0.5
    assert dark < filled - 0.5


PARALLEL = {"beam": "parallel", "detector_pitch": 3.0, "n_detectors": 200}


@pytest.mark.parametrize(("trained", "measured"), [
    ({}, {"n_detectors": 480, "detector_pitch": 2.0}),  # narrower bins are averaged, wider ones interpolated
    ({}, {"n_detectors": 150, "detector_pitch": 7.0}),
    ({}, {"axis_to_detector": 0.0, "detector_pitch": 5.0 * 600 / 890}),  # of the same magnification
    ({"detector_offset": -0.25}, {}),
    ({}, {"detector_offset": 3.0, "detector_pitch": 2.5, "n_detectors": 400}),
    ({"beam": "fan_curved"}, {"beam": "fan_curved", "axis_to_detector": 100.0, "detector_pitch": 4.0}),
    (PARALLEL, PARALLEL | {"detector_offset": 0.5, "source_to_axis": 1.0}),
    (PARALLEL | {"detector_pitch": 4.0}, PARALLEL | {"detector_pitch": 1.5, "n_detectors": 400}),
    ({"n_views": 48, "first_angle": 0.0}, {"n_views": 60, "first_angle": 0.0}),
    ({"n_views": 48, "first_angle": 0.0}, {"n_views": 96, "first_angle": 0.0}),
])  # fmt: skip
def test_rays_of_another_scan_are_found(trained: dict[str, Any], measured: dict[str, Any]) -> None:
    geometry = scanner(**trained)
    y, missing = fitted(scanner(**measured), geometry)
    assert y.shape == (geometry.n_views, geometry.n_detectors)
    assert not missing.any()
    has_all_views = measured.get("n_views") == 96
    assert distance(y, scan_of(geometry)) < (1e-5 if has_all_views else 0.03)


@pytest.mark.parametrize(("measured", "words"), [
    ({"beam": "parallel"}, "with beam parallel .* the run was trained for fan_flat"),
    ({"source_to_axis": 500.0}, "500 mm from the axis"),
    ({"n_detectors": 52}, "cuts the object off"),
    ({"n_detectors": 110, "detector_offset": 20.0}, "cuts the object off"),  # on one side
    ({"n_views": 21}, "has 21 measured views"),
])  # fmt: skip
def test_a_scanner_whose_rays_cannot_be_made_good_is_refused(measured: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"a scan .*{words}"):
        fitted(scanner(**measured), scanner())


@pytest.mark.parametrize(("fault", "words"), [
    ("dead bin", "interpolate the dead bins"), ("infinite", "interpolate the dead bins"), ("end", "number 31"),
    ("gap", "no views near 5 of the 32"), ("few", "has 21 measured views"), ("all", "has 0 measured views"),
    ("backwards", "no views near"),
])  # fmt: skip
def test_views_that_cannot_be_made_good_are_refused(fault: str, words: str) -> None:
    geometry = scanner(**({"angle_span": 2.0} if fault in ("end", "backwards") else {}))
    y, angles = scan_of(geometry).copy(), geometry.angles()
    gaps = {"end": slice(31, 32), "gap": slice(4, 9), "few": slice(0, 32, 3), "all": slice(32)}
    if fault in gaps:
        y[gaps[fault]] = np.nan
    elif fault == "backwards":
        angles = -angles
    else:
        y[3, 5] = np.nan if fault == "dead bin" else np.inf
    with pytest.raises(DataError, match=f"scan.npy .*{words}"):
        regrid_scan(y, angles, geometry, geometry, "scan.npy")


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


@pytest.mark.parametrize("content", [
    b"no such file " * 20, b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM" + bytes(400),
    {"distanceSourceOrigin": None}, {"distanceSourceOrigin": math.nan}, {"angles": [1e300, 1, 2, 3]},
    {"angles": [1, 2]}, {"distanceUnit": "cm"},
], ids=["text", "7.3", "no distance", "nan", "far angle", "angles", "cm"])  # fmt: skip
def test_matlab_files_that_are_no_scan(tmp_path: Path, content: bytes | dict[str, Any]) -> None:
    path = tmp_path / "a.mat"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        mat(path, np.ones((4, 7)), **{"pixelSizePost": 40} | content)
    with pytest.raises(DataError, match=r"a\.mat is no scan \(.*\.npy") as error:
        read_mat(path, scanner())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["ta", "tc", "td"])
def test_measured_scans_have_the_geometry_of_the_config(real_ct: Path, name: str) -> None:
    """Their object is a disc of 70 mm, which the rays of the config place at the same spot from every view."""
    pytest.importorskip("scipy.io")
    geometry = build_geometry(config_of("geometry=htc2022"))
    sinogram, measured, angles = read_mat(real_ct / "measured" / f"{name}_category7.mat", geometry)
    found, missing = regrid_scan(sinogram, angles, measured, geometry, name)
    assert not missing.any()
    np.testing.assert_allclose(found, sinogram, atol=1e-5)
    seen = found > 0.15
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


def test_a_matlab_scan_of_another_arc_has_its_geometry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A network of a full turn gets a scan of 90°, more bins and another source: its step sizes follow."""
    run = save(tmp_path / "run", *TINY)
    keys = ["geometry.n_views=12", f"geometry.angle_span={math.pi / 2}", "geometry.source_to_axis=700"]
    geometry = build_geometry(config_of(*TINY, *keys))
    x = torch.from_numpy((phantom(geometry.image_size, seed=0, part="test", index=2) + 1000) / 1000 * 0.0192)
    y = FanBeamProjector(replace(geometry, n_detectors=60))(x[None, None])[0, 0].numpy()
    rays = {"distanceSourceOrigin": 700.0, "distanceSourceDetector": 700 + geometry.axis_to_detector}
    angles = np.degrees(geometry.angles())
    mat(tmp_path / "a.mat", y, angles=angles, pixelSizePost=geometry.detector_pitch, **rays)
    words = [f"run={run}", f"input={tmp_path}/a.mat", f"output={tmp_path}/out", "formats=[npy]", "accelerator=cpu"]
    with pytest.raises(DataError, match="give the scanner's geometry=, or train with it"):
        reconstruct_input(ReconstructConfig.parse(compose("reconstruct", words)))
    reconstruct_input(ReconstructConfig.parse(compose("reconstruct", [*words, *keys])))
    printed = capsys.readouterr().out
    assert "its step sizes follow the scan" in printed
    assert "a: A x differs from the sinogram by" in printed
