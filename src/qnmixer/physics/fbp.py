"""Filtered back-projection for a flat fan-beam detector: weights, ramp filters, back-projection matrix.

After Kak & Slaney 1988 (§ 3.4.2, flat detector) with the redundancy weights of Noo, Defrise, Clackdoyle & Kudo 2002
("Image reconstruction from fan-beam projections on less than a short scan", eq. 35 ff.) for any range of angles. All
detector lengths are scaled to a virtual detector through the axis.
"""

import math
from collections.abc import Callable

import numpy as np

from qnmixer.errors import GeometryError
from qnmixer.physics.geometry import FULL_TURN, FanBeamGeometry
from qnmixer.physics.scan import ScanMatrix
from qnmixer.physics.sparse import transpose_csr

FBP_WINDOWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ramp": np.ones_like,
    "shepp-logan": lambda f: np.sinc(f / 2),
    "cosine": lambda f: np.cos(np.pi * f / 2),
    "hamming": lambda f: 0.54 + 0.46 * np.cos(np.pi * f),
    "hann": lambda f: 0.5 + 0.5 * np.cos(np.pi * f),
}
"""Windows on the ramp by name, as functions of the frequency in units of Nyquist; each is 1 at zero."""

_TAPER = math.radians(10)
"""Width of the smooth ends of a partial turn (the value that Noo et al. use)."""
_CHUNK = 2**20


def virtual_positions(geometry: FanBeamGeometry) -> np.ndarray:
    """Bin centres scaled to the axis in mm, float64 [D]."""
    return geometry.bin_positions() * geometry.source_to_axis / geometry.source_to_detector


def ray_weights(geometry: FanBeamGeometry) -> np.ndarray:
    """Cosine times redundancy weight of each ray, float64 [V or 1, D]; 1/2 is the redundancy of a full turn."""
    fan = np.arctan2(virtual_positions(geometry), geometry.source_to_axis)[None, :]
    if geometry.is_full_turn:
        return 0.5 * np.cos(fan)
    beta = geometry.angles()[:, None]
    own = _smooth_ends(beta, geometry)
    # The line of ray (β, γ) is seen from the other side by the ray (β + π − 2γ, −γ).
    opposite = beta + math.pi - 2 * fan
    total = own + sum(_smooth_ends(opposite + turn * FULL_TURN, geometry) for turn in (-2, -1, 0, 1))
    return np.cos(fan) * own / total


def ramp_response(geometry: FanBeamGeometry, filter_name: str) -> np.ndarray:
    """Frequency response of the ramp at the virtual detector, real float64 [n/2 + 1] for padded rows of n samples.

    It is the transform of the band-limited ramp's samples, whose zero frequency is right, unlike that of a sampled |f|.
    n is the power of two that keeps the convolution free of wrap-around.

    Raises:
        GeometryError: if there is no filter of that name.
    """
    if filter_name not in FBP_WINDOWS:
        raise GeometryError(f"geometry.fbp_filter={filter_name!r} is unknown: choose one of {', '.join(FBP_WINDOWS)}")
    pitch = geometry.detector_pitch * geometry.source_to_axis / geometry.source_to_detector
    n = 2 ** math.ceil(math.log2(max(2 * geometry.n_detectors, 2)))
    lag = np.fft.fftfreq(n, 1 / n)
    kernel = np.zeros(n)
    kernel[0] = 1 / 4
    odd = lag % 2 == 1
    kernel[odd] = -1 / (np.pi * lag[odd]) ** 2
    response = np.fft.rfft(kernel).real / pitch
    return response * FBP_WINDOWS[filter_name](np.linspace(0, 1, len(response)))


def backprojection_matrix(geometry: FanBeamGeometry) -> ScanMatrix:
    """Weighted pixel-driven back-projection, held as its distinct views, as the transpose of the matrix returned.

    Each pixel takes from each view the filtered row where the ray through its centre meets the detector, linearly
    interpolated, times (source_to_axis / distance along the central ray)² and the angle between views.
    """
    n_views = geometry.n_distinct_views
    angles = geometry.angles()[:n_views]
    size, n_detectors = geometry.image_size, geometry.n_detectors
    centres = (np.arange(size) - (size - 1) / 2) * geometry.pixel_size
    x, y = np.tile(centres, size)[:, None], np.repeat(-centres, size)[:, None]
    columns: list[np.ndarray] = []
    values: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    step = max(1, _CHUNK // n_views)
    for start in range(0, size**2, step):
        some = slice(start, start + step)
        depth = geometry.source_to_axis - x[some] * np.sin(angles) + y[some] * np.cos(angles)
        u = (x[some] * np.cos(angles) + y[some] * np.sin(angles)) * geometry.source_to_detector / depth
        position = u / geometry.detector_pitch + (n_detectors - 1) / 2
        below = np.floor(position)
        bins = np.stack([below, below + 1], axis=-1)
        gain = abs(geometry.angle_step) * (geometry.source_to_axis / depth) ** 2
        weights = (1 - np.abs(position[..., None] - bins)) * gain[..., None]
        kept = (bins >= 0) & (bins < n_detectors) & (weights > 0)
        columns.append((bins + n_detectors * np.arange(n_views)[:, None])[kept].astype(np.int32))
        values.append(weights[kept].astype(np.float32))
        counts.append(kept.sum(axis=(1, 2)))
    row_starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    by_ray = transpose_csr(row_starts, np.concatenate(columns), np.concatenate(values), n_views * n_detectors)
    return ScanMatrix(geometry, *by_ray)


def _smooth_ends(beta: np.ndarray, geometry: FanBeamGeometry) -> np.ndarray:
    """Noo's c(β): 1 within the scanned range, cos² down to 0 at its ends, 0 outside. Each view stands for its step."""
    span = abs(geometry.angle_span)
    middle = geometry.first_angle + (geometry.angle_span - geometry.angle_step) / 2
    taper = min(_TAPER, span / 4)
    to_end = np.clip((span / 2 - np.abs(beta - middle)) / taper, 0, 1)
    return np.sin(np.pi / 2 * to_end) ** 2
