"""Fit a measured sinogram to the views and detector bins that a network was trained for."""

import math

import numpy as np

from qnmixer.engine.data.slices import FloatArray
from qnmixer.errors import DataError
from qnmixer.physics import FanBeamGeometry

_FEWEST_VIEWS = 0.75
"""The fewest measured views, as a share of the views in training."""
_AIR = 0.05
"""Share of the largest value. If an end of the detector has more, it cuts the object off."""
_SAME = 1e-3
"""Share of the detector that counts as nothing."""


def fit_scan(sinogram: FloatArray, scanner: FanBeamGeometry, geometry: FanBeamGeometry, name: str) -> FloatArray:
    """Fit a sinogram [v, d] of another detector, or with another number of views, to the rays of a geometry: [V, D].

    Along the detector, rows are interpolated linearly, or averaged if bins become wider. Views at angles that were not
    measured are interpolated linearly between their neighbours.

    Args:
        sinogram: of any size.
        scanner: its rays. Their source and first view are those of the geometry.
        geometry: that of the network.
        name: of the file, for errors.

    Raises:
        DataError: values that are missing, an object cut off by the detector, or too few views.
    """
    if not (np.isfinite(sinogram).all() and sinogram.any()):
        raise DataError(f"{name} has NaN or infinite values, or only zeros: interpolate dead bins and views first")
    if len(sinogram) < _FEWEST_VIEWS * geometry.n_views:
        raise DataError(
            f"{name} has {len(sinogram)} views, but the run was trained for {geometry.n_views}: train with "
            "geometry.n_views as measured"
        )
    return _fit_views(_fit_bins(sinogram, scanner, geometry, name), scanner, geometry, name)


def _fit_bins(rows: FloatArray, scanner: FanBeamGeometry, geometry: FanBeamGeometry, name: str) -> FloatArray:
    """Rows [v, d] at the geometry's bins, [v, D], with air beyond the ends of the detector."""
    wanted, width = geometry.bin_positions(), geometry.detector_pitch
    centres, pitch = scanner.bin_positions(), scanner.detector_pitch
    left, right = wanted - width / 2, wanted + width / 2
    slack, air = _SAME * len(centres) * pitch / 2, _AIR * rows.max()
    cut_first = centres[0] - pitch / 2 > left[0] + slack and rows[:, 0].max() > air
    cut_last = centres[-1] + pitch / 2 < right[-1] - slack and rows[:, -1].max() > air
    if cut_first or cut_last:
        raise DataError(
            f"{name} has a narrower detector than the run, which cuts the object off: train with "
            "geometry.n_detectors and geometry.detector_pitch as measured"
        )
    if width <= pitch:
        return np.stack([np.interp(wanted, centres, row, left=0, right=0) for row in rows]).astype(np.float32)
    edges = np.append(centres, centres[-1] + pitch) - pitch / 2
    sums = np.pad(np.cumsum(rows * pitch, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    until_left, until_right = (np.stack([np.interp(at, edges, row) for row in sums]) for at in (left, right))
    return ((until_right - until_left) / width).astype(np.float32)


def _fit_views(rows: FloatArray, scanner: FanBeamGeometry, geometry: FanBeamGeometry, name: str) -> FloatArray:
    """Rows [v, D] at the views of the geometry, [V, D]."""
    if scanner.view_angles is not None:  # those of the geometry
        return rows
    step = abs(scanner.angle_step)
    measured = np.arange(len(rows)) * step
    if scanner.is_full_turn:
        rows, measured = np.append(rows, rows[:1], axis=0), np.append(measured, len(measured) * step)
    angles = math.copysign(1, geometry.angle_span) * geometry.angles()
    wanted = (angles - angles[0]) % (2 * np.pi)
    if wanted.max() > measured[-1] + step / 2:
        raise DataError(
            f"{name} ends at {measured[-1]:.4g} radians, but the run's views at {wanted.max():.4g}: train with "
            "geometry.n_views and geometry.angle_span as measured"
        )
    return np.stack([np.interp(wanted, measured, column) for column in rows.T], axis=1).astype(np.float32)
