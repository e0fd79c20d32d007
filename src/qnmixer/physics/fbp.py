"""Filtered back-projection for a flat fan-beam detector: weights, ramp filters, back-projection matrix.

After Kak & Slaney 1988 (§ 3.4.2, flat detector) with the redundancy weights of Noo, Defrise, Clackdoyle & Kudo 2002
("Image reconstruction from fan-beam projections on less than a short scan", eq. 35 ff.) for any range of angles. All
detector lengths are scaled to a virtual detector through the axis.
"""

import math
from collections.abc import Callable

import numpy as np

from qnmixer.physics.geometry import FULL_TURN, FanBeamGeometry
from qnmixer.physics.matrix_cache import load_or_build
from qnmixer.physics.scan import Numbering, ScanMatrix
from qnmixer.physics.sparse import Csr, stack_rows, transpose_csr

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
_CHUNK = 2**17
"""Values computed at a time: few enough for the CPU's cache, and for little memory."""


def virtual_positions(geometry: FanBeamGeometry) -> np.ndarray:
    """Bin centres scaled to the axis in mm, float64 [D]."""
    return geometry.bin_positions() * geometry.source_to_axis / geometry.source_to_detector


def virtual_pitch(geometry: FanBeamGeometry) -> float:
    """Distance of neighbouring bins scaled to the axis in mm."""
    return geometry.detector_pitch * geometry.source_to_axis / geometry.source_to_detector


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


def matched_gain(geometry: FanBeamGeometry) -> float:
    """The factor on Aᵀ after the ramp that gives it the gain of FBP.

    Aᵀ sums intersection lengths: a view adds pixel²/pitch of a row to each pixel, where back-projection adds the angle
    between views. A line that is seen from both sides counts half.
    """
    redundancy = min(1.0, math.pi / abs(geometry.angle_span))
    return redundancy * abs(geometry.angle_step) * virtual_pitch(geometry) / geometry.pixel_size**2


def ramp_response(geometry: FanBeamGeometry, filter_name: str) -> np.ndarray:
    """Frequency response of the ramp at the virtual detector, real float64 [n/2 + 1] for padded rows of n samples.

    It is the transform of the band-limited ramp's samples, whose zero frequency is right, unlike that of a sampled |f|.
    n is the power of two that keeps the convolution free of wrap-around.
    """
    n = 2 ** math.ceil(math.log2(max(2 * geometry.n_detectors, 2)))
    lag = np.fft.fftfreq(n, 1 / n)
    kernel = np.zeros(n)
    kernel[0] = 1 / 4
    odd = lag % 2 == 1
    kernel[odd] = -1 / (np.pi * lag[odd]) ** 2
    response = np.fft.rfft(kernel).real / virtual_pitch(geometry)
    return response * FBP_WINDOWS[filter_name](np.linspace(0, 1, len(response)))


def backprojection_matrix(geometry: FanBeamGeometry) -> ScanMatrix:
    """Weighted back-projection, as the transpose of the returned matrix. Large ones are cached on disk."""

    def build() -> tuple[Csr, Csr]:
        layout = Numbering(geometry)
        backward = _by_pixels(geometry)
        return transpose_csr(backward, layout.n_rays, layout.quarters), backward

    return ScanMatrix(geometry, *load_or_build("back-projection", geometry, build))


def _by_pixels(geometry: FanBeamGeometry) -> Csr:
    """Weighted pixel-driven back-projection of the distinct views: rows are pixels, columns rays, as in `Numbering`.

    Each pixel takes from each view the filtered row where the ray through its centre meets the detector, linearly
    interpolated, times (source_to_axis / distance along the central ray)² and the angle between views.
    """
    layout = Numbering(geometry)
    n_views, n_detectors, size = geometry.n_distinct_views, geometry.n_detectors, geometry.image_size
    angles = geometry.angles()[:n_views]
    numbers = layout.ray_numbers() + layout.n_rays * np.arange(layout.quarters)[:, None, None]
    pixels = layout.corner_pixels()
    own = layout.pixel_numbers()[pixels] == np.arange(pixels.size).reshape(pixels.shape[::-1]).T

    def rows(first: int, last: int) -> Csr:
        row, column = np.divmod(pixels[first:last, :, None], size)
        x, y = ((z - (size - 1) / 2) * geometry.pixel_size for z in (column, size - 1 - row))
        depth = geometry.source_to_axis - x * np.sin(angles) + y * np.cos(angles)
        u = (x * np.cos(angles) + y * np.sin(angles)) * geometry.source_to_detector / depth
        position = u / geometry.detector_pitch + (n_detectors - 1) / 2
        below = np.floor(position)
        bins = np.stack([below, below + 1], axis=-1)
        gain = abs(geometry.angle_step) * (geometry.source_to_axis / depth) ** 2
        weights = (1 - np.abs(position[..., None] - bins)) * gain[..., None]
        kept = (bins >= 0) & (bins < n_detectors) & (weights > 0) & own[first:last, :, None, None]
        corner, view = np.nonzero(kept)[1:3]
        starts = np.concatenate([[0], np.cumsum(kept.sum(axis=(1, 2, 3)))])
        return Csr(starts, numbers[corner, view, bins[kept].astype(np.intp)], weights[kept].astype(np.float32))

    step = max(1, _CHUNK // geometry.n_views)
    at_most = 2 * layout.n_pixels * geometry.n_views
    return stack_rows(rows, layout.n_pixels, step, layout.quarters * layout.n_rays, at_most)


def _smooth_ends(beta: np.ndarray, geometry: FanBeamGeometry) -> np.ndarray:
    """Noo's c(β): 1 within the scanned range, cos² down to 0 at its ends, 0 outside. Each view stands for its step."""
    span = abs(geometry.angle_span)
    middle = geometry.first_angle + (geometry.angle_span - geometry.angle_step) / 2
    taper = min(_TAPER, span / 4)
    to_end = np.clip((span / 2 - np.abs(beta - middle)) / taper, 0, 1)
    return np.sin(np.pi / 2 * to_end) ** 2
