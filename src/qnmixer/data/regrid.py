"""Regrid a measured sinogram to the views and detector bins that a network was trained for."""

import math

import numpy as np
import numpy.typing as npt

from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import FloatArray

FloatList = npt.NDArray[np.float64]

_WIDEST_GAP = 4.0  # the widest gap that is interpolated, in steps between views: at most three missing in a row
_FEWEST_VIEWS = 0.75  # the fewest measured views, as a share of the views in training
_NEAR = 0.75
"""In steps between views: a view counts as missing if the nearest measured view is farther away.

With as many measured views as views in training, or more, the nearest one is within half a step."""
_AIR = 0.05  # share of the largest value: if an end of the detector has more, it cuts the object off
_TOLERANCE = 1e-3  # share of a step, or of a distance, that counts as equal


def regrid_scan(
    sinogram: FloatArray, angles: FloatList, scanner: FanBeamGeometry, geometry: FanBeamGeometry, name: str
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Regrid a sinogram [v, d] to the rays of a geometry. Returns [V, D], and which of its views are missing.

    Missing views are rows of NaN, or of zeros. Along the detector, rows are interpolated linearly, or averaged if bins
    become wider. Views at angles that were not measured are interpolated linearly between their neighbours. They count
    as missing if the nearest measured view is too far. The first view becomes that of the geometry, so the image is
    turned by the difference of the two angles.

    The angles [v] of the views are in radians. `scanner` has the other values of their rays. `name`: for errors.

    Raises:
        DataError: another beam or distance of the source, an object cut off by the detector, too few views or too wide
            a gap.
    """
    missing = np.isnan(sinogram).all(axis=1) | ~sinogram.any(axis=1)  # no object is empty from one side
    n_measured = np.count_nonzero(~missing)
    if not np.isfinite(sinogram[~missing]).all():
        raise DataError(f"{name} has NaN or infinite values in part of a view: interpolate the dead bins first")
    ratio = scanner.source_to_axis / geometry.source_to_axis
    if scanner.beam != geometry.beam or (geometry.is_fan and abs(ratio - 1) > _TOLERANCE):
        raise DataError(
            f"{name} was measured with beam {scanner.beam} and the source {scanner.source_to_axis:g} mm from the axis, "
            f"but the run was trained for {geometry.beam} and {geometry.source_to_axis:g} mm: give the "
            "scanner's geometry=, or train with it"
        )
    if n_measured < _FEWEST_VIEWS * geometry.n_views:
        raise DataError(
            f"{name} has {n_measured} measured views (others are NaN or zeros), but the run was trained for "
            f"{geometry.n_views}: give geometry.n_views as measured, or train with it"
        )
    rows = _regrid_bins(sinogram[~missing], scanner, geometry, name)
    turned = math.copysign(1, geometry.angle_span) * (angles - angles[0])
    return _regrid_views(rows, turned[~missing], geometry, name)


def _regrid_bins(rows: FloatArray, scanner: FanBeamGeometry, geometry: FanBeamGeometry, name: str) -> FloatArray:
    """Rows [v, d] at the geometry's rays, [v, D], with air beyond the ends of the detector."""
    # Rays of a fan at equal angles are the same rays. So detectors at other distances differ by their magnification.
    magnification = scanner.source_to_detector / geometry.source_to_detector if geometry.is_fan else 1.0
    positions, width = magnification * geometry.bin_positions(), magnification * geometry.detector_pitch
    centres, pitch = scanner.bin_positions(), scanner.detector_pitch
    starts, ends = positions - width / 2, positions + width / 2
    slack, air = _TOLERANCE * len(centres) * pitch / 2, _AIR * rows.max()
    cut_first = centres[0] - pitch / 2 > starts[0] + slack and rows[:, 0].max() > air
    cut_last = centres[-1] + pitch / 2 < ends[-1] - slack and rows[:, -1].max() > air
    if cut_first or cut_last:
        raise DataError(
            f"{name} has a narrower detector than the run, which cuts the object off: give "
            "geometry.n_detectors and geometry.detector_pitch as measured, or train with them"
        )
    if width <= pitch:
        return np.stack([np.interp(positions, centres, row, left=0, right=0) for row in rows]).astype(np.float32)
    # A row counts as constant within a measured bin. Then its integral is linear there, and means over wider bins are
    # exact.
    edges = np.append(centres, centres[-1] + pitch) - pitch / 2
    sums = np.pad(np.cumsum(rows * pitch, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    until_starts, until_ends = (np.stack([np.interp(points, edges, row) for row in sums]) for points in (starts, ends))
    return ((until_ends - until_starts) / width).astype(np.float32)


def _regrid_views(
    rows: FloatArray, angles: FloatList, geometry: FanBeamGeometry, name: str
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Rows [v, D] as views [V, D] of the geometry, and which views are missing. Angles start at the first view."""
    turn = 2 * np.pi
    order = np.argsort(angles % turn)
    # Three turns, so that each view of the geometry has a measured one on both sides.
    measured_angles = np.concatenate([(angles % turn)[order] + k * turn for k in (-1, 0, 1)])
    step = abs(geometry.angle_step)
    view_angles = np.arange(geometry.n_views) * step
    index = np.searchsorted(measured_angles, view_angles, side="right")
    low, high = measured_angles[index - 1], measured_angles[index]
    nearest = np.minimum(view_angles - low, high - view_angles)
    if (wide := (nearest > _TOLERANCE * step) & (high - low > (_WIDEST_GAP + _TOLERANCE) * step)).any():
        raise DataError(
            f"{name} has no views near {np.count_nonzero(wide)} of the {geometry.n_views} that the run was trained "
            f"for (the first is number {int(np.flatnonzero(wide)[0])}). Only gaps between views of up to "
            f"{_WIDEST_GAP * np.degrees(step):.3g}° can be filled: give geometry.n_views and "
            "geometry.angle_span as measured, or train with them"
        )
    weight = ((view_angles - low) / (high - low)).astype(np.float32)[:, None]
    low_rows, high_rows = (rows[order[k % len(order)]] for k in (index - 1, index))
    return (1 - weight) * low_rows + weight * high_rows, nearest > _NEAR * step
