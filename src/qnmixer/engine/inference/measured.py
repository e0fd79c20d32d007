"""Measured sinograms, resampled to the views and detector bins that a network was trained for."""

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qnmixer.engine.data.slices import FloatArray
from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry

_WIDEST_GAP = 4.0
"""The widest gap that is interpolated, in steps between views: at most three missing in a row."""
_FEWEST_VIEWS = 0.75
"""The fewest measured views, as a share of the views in training."""
_NEAR = 0.75
"""In steps between views: a view counts as missing if the nearest measured view is farther away.

With as many measured views as views in training, or more, the nearest one is within half a step."""
_AIR = 0.05
"""Share of the largest value. If an end of the detector has more, it cuts the object off."""
_SAME = 1e-3
"""Share of a step, or of a distance, that counts as equal."""


@dataclass(frozen=True)
class ScanLayout:
    """The rays of a sinogram [v, d], in the convention of `FanBeamGeometry`.

    Attributes:
        angles: of each view in radians, [v].
        detector_pitch: mm.
        source_to_axis: mm; not used for a parallel beam.
        source_to_detector: mm; not used for a parallel beam.
        beam: fan_flat, fan_curved or parallel.
        detector_centre: u of the middle of the detector in mm.
    """

    angles: npt.NDArray[np.float64]
    detector_pitch: float
    source_to_axis: float
    source_to_detector: float
    beam: str = "fan_flat"
    detector_centre: float = 0.0


def read_mat(path: Path) -> tuple[FloatArray, ScanLayout]:
    """The sinogram [v, d] (−log of transmission) and the layout of a MATLAB file in the form of the Helsinki scans.

    That is a struct with `sinogram` and `parameters` (angles in degrees, distances in mm, pixelSizePost). HelTomo reads
    this form, and the Helsinki tomography challenge 2022 publishes it. The angles are those of ASTRA's `fanflat`.

    Raises:
        DataError: scipy is not installed, or the file has another form.
    """
    try:
        loadmat = importlib.import_module("scipy.io").loadmat
    except ImportError as error:
        raise DataError(
            f"{path} needs scipy, which is not installed: pip install scipy, or save the scan as .npy"
        ) from error
    try:
        content: dict[str, Any] = loadmat(path, simplify_cells=True)
    except NotImplementedError as error:
        raise DataError(f"{path} is of MATLAB 7.3: save it with -v7, or its sinogram as .npy") from error
    except Exception as error:  # bytes of another format can make scipy raise anything
        raise DataError(f"{path} cannot be read as a MATLAB file: save its sinogram as .npy") from error
    found = [v for v in content.values() if isinstance(v, dict) and {"sinogram", "parameters"} <= v.keys()]
    try:
        sinogram, parameters = np.asarray(found[0]["sinogram"], np.float32), found[0]["parameters"]
        layout = ScanLayout(
            np.radians(np.atleast_1d(np.asarray(parameters["angles"], float))),
            float(parameters["pixelSizePost"]),
            float(parameters["distanceSourceOrigin"]),
            float(parameters["distanceSourceDetector"]),
        )
    except (IndexError, KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} has no struct with sinogram and parameters (angles, pixelSizePost, distanceSourceOrigin, "
            "distanceSourceDetector): save its sinogram as .npy"
        ) from error
    distances = layout.detector_pitch, layout.source_to_axis, layout.source_to_detector
    if not (np.isfinite(layout.angles).all() and all(0 < it < math.inf for it in distances)):
        raise DataError(
            f"the angles, pixelSizePost, distanceSourceOrigin and distanceSourceDetector of {path} must be finite, and "
            "the last three above 0: correct them, or save its sinogram as .npy"
        )
    if sinogram.ndim != 2 or len(layout.angles) != len(sinogram) or parameters.get("distanceUnit", "mm") != "mm":
        raise DataError(
            f"the sinogram of {path}, {list(sinogram.shape)}, must be [views, bins] with {len(layout.angles)} angles, "
            "and its distances in mm: save it as .npy"
        )
    return sinogram, layout


def fit_scan(
    sinogram: FloatArray, layout: ScanLayout, geometry: FanBeamGeometry, name: str
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Fit a sinogram [v, d] to the rays of a geometry. Returns [V, D], and which of its views are missing.

    Missing views are rows of NaN. Along the detector, rows are interpolated linearly, or averaged if bins become wider.
    Views at angles that were not measured are interpolated linearly between their neighbours. They count as missing if
    the nearest measured view is too far. The first view becomes that of the geometry, so the image is turned by the
    difference of the two angles.

    Args:
        sinogram: of any size.
        layout: its rays.
        geometry: that of the network.
        name: of the file, for errors.

    Raises:
        DataError: another beam or distance of the source, an object cut off by the detector, too few views or too wide
            a gap.
    """
    missing = np.isnan(sinogram).all(axis=1)
    if not np.isfinite(sinogram[~missing]).all():
        raise DataError(f"{name} has NaN or infinite values in part of a view: interpolate the dead bins first")
    if (layout.beam == "parallel") == geometry.is_fan:
        raise DataError(
            f"{name} was measured with beam {layout.beam}, but the run was trained for {geometry.beam}: train with "
            "the geometry of the scanner"
        )
    if geometry.is_fan and abs(layout.source_to_axis / geometry.source_to_axis - 1) > _SAME:
        raise DataError(
            f"{name} was measured with the source {layout.source_to_axis:g} mm from the axis, but the run was trained "
            f"for {geometry.source_to_axis:g} mm: train with the geometry of the scanner"
        )
    if np.count_nonzero(~missing) < _FEWEST_VIEWS * geometry.n_views:
        raise DataError(
            f"{name} has {np.count_nonzero(~missing)} measured views, but the run was trained for {geometry.n_views}: "
            "train with geometry.n_views as measured"
        )
    rows = _fit_bins(sinogram[~missing], layout, geometry, name)
    turned = math.copysign(1, geometry.angle_span) * (layout.angles - layout.angles[0])
    return _fit_views(rows, turned[~missing], geometry, name)


def _fit_bins(rows: FloatArray, layout: ScanLayout, geometry: FanBeamGeometry, name: str) -> FloatArray:
    """Rows [v, d] at the geometry's rays, [v, D], with air beyond the ends of the detector."""
    n, pitch = rows.shape[1], layout.detector_pitch
    centres = (np.arange(n) - (n - 1) / 2) * pitch + layout.detector_centre
    u, half_bin = geometry.bin_positions(), geometry.detector_pitch / 2
    left, wanted, right = (_arrive_at(u + shift, layout, geometry) for shift in (-half_bin, 0, half_bin))
    widths = right - left
    same_places = abs((wanted - centres).mean()) < _SAME * pitch if n == geometry.n_detectors else False
    if same_places and layout.beam == geometry.beam and abs(widths.mean() / pitch - 1) < _SAME:
        return rows
    slack, air = _SAME * n * pitch / 2, _AIR * rows.max()
    cut_first = centres[0] - pitch / 2 > left[0] + slack and rows[:, 0].max() > air
    cut_last = centres[-1] + pitch / 2 < right[-1] - slack and rows[:, -1].max() > air
    if cut_first or cut_last:
        raise DataError(
            f"{name} has a narrower detector than the run, which cuts the object off: train with "
            "geometry.n_detectors and geometry.detector_pitch as measured"
        )
    if widths.mean() <= pitch:
        return np.stack([np.interp(wanted, centres, row, left=0, right=0) for row in rows]).astype(np.float32)
    edges = np.append(centres, centres[-1] + pitch) - pitch / 2
    sums = np.pad(np.cumsum(rows * pitch, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    until_left, until_right = (np.stack([np.interp(at, edges, row) for row in sums]) for at in (left, right))
    return ((until_right - until_left) / widths).astype(np.float32)


def _arrive_at(u: npt.NDArray[np.float64], layout: ScanLayout, geometry: FanBeamGeometry) -> npt.NDArray[np.float64]:
    """Detector coordinate in mm of a measured scan at which the geometry's rays of coordinate u arrive.

    Two fans have the same rays at equal angles. The distance of the detectors does not matter.
    """
    if not geometry.is_fan:
        return u
    at = u / geometry.source_to_detector
    if layout.beam != geometry.beam:
        at = np.arctan(at) if geometry.beam == "fan_flat" else np.tan(at)
    return at * layout.source_to_detector


def _fit_views(
    rows: FloatArray, angles: npt.NDArray[np.float64], geometry: FanBeamGeometry, name: str
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Rows [v, D] as views [V, D] of the geometry, and which views are missing. Angles start at the first view."""
    turn = 2 * np.pi
    order = np.argsort(angles % turn)
    at = np.concatenate([(angles % turn)[order] + k * turn for k in (-1, 0, 1)])
    step = abs(geometry.angle_step)
    wanted = np.arange(geometry.n_views) * step
    after = np.searchsorted(at, wanted, side="right")
    low, high = at[after - 1], at[after]
    nearest = np.minimum(wanted - low, high - wanted)
    if (wide := (nearest > _SAME * step) & (high - low > (_WIDEST_GAP + _SAME) * step)).any():
        raise DataError(
            f"{name} has no views near {np.count_nonzero(wide)} of the {geometry.n_views} that the run was trained "
            f"for (the first is number {int(np.flatnonzero(wide)[0])}). Only gaps between views of up to "
            f"{_WIDEST_GAP * np.degrees(step):.3g}° can be filled: train with geometry.n_views and "
            "geometry.angle_span as measured"
        )
    weight = ((wanted - low) / (high - low)).astype(np.float32)[:, None]
    before, behind = (rows[order[k % len(order)]] for k in (after - 1, after))
    return (1 - weight) * before + weight * behind, nearest > _NEAR * step
