"""Filtered back-projection for fan and parallel beams: weights, ramp filters, back-projection matrix.

After Kak & Slaney 1988 (§ 3.3 parallel, § 3.4.1 equiangular fan, § 3.4.2 flat detector) with the redundancy weights of
Noo, Defrise, Clackdoyle & Kudo 2002 ("Image reconstruction from fan-beam projections on less than a short scan", eq. 35
ff.) for any range of angles, and of Wang 2002 ("X-ray micro-CT with a displaced detector array") for a detector that
reaches farther on one side. All detector lengths are scaled to the axis.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from qnmixer.physics.geometry import FULL_TURN, FanBeamGeometry
from qnmixer.physics.scan import Numbering, ScanMatrix
from qnmixer.physics.sparse import Arrays, Csr, Triples, cached, in_threads, to_csr, transpose_csr

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
_SIDE_TAPER = 8
"""Width of the smooth end of a detector with an offset, in offsets; at most the bins that are seen from both sides."""
_CHUNK = 2**17
"""Values computed at a time: few enough for the CPU's cache, and for little memory."""
_SLICES = 64
"""Slices reconstructed together without a matrix."""


def ray_weights(geometry: FanBeamGeometry) -> np.ndarray:
    """Cosine times redundancy weight of each ray, float64 [V, D], or [1, D] for a full turn.

    The redundancy weights of all rays along the same line sum to 1. The ray (β + π − 2γ, −γ) sees the line of ray
    (β, γ) from the other side.
    """
    fan = geometry.fan_angles()[None, :]
    bins = geometry.bin_positions()[None, :] / geometry.detector_pitch
    side, mirrored = (_smooth_side(k, geometry) for k in (bins, -bins))
    if geometry.is_full_turn:  # every view has its opposite, so the weights do not depend on the view
        weight, opposite = side, mirrored
    else:
        beta = geometry.angles()[:, None]
        weight, opposite = (
            side * _smooth_ends(beta, geometry),
            mirrored * _smooth_ends(beta + math.pi - 2 * fan, geometry),
        )
    return np.cos(fan) * weight / (weight + opposite)


def matched_gain(geometry: FanBeamGeometry) -> float:
    """The factor on Aᵀ after the ramp that gives it the gain of FBP.

    Aᵀ sums intersection lengths: each view adds its row to a pixel, times pixel²/pitch. Back-projection adds the row
    times the angle between views. A line that is seen from both sides counts half.
    """
    redundancy = min(1.0, math.pi / abs(geometry.angle_span))
    return redundancy * abs(geometry.angle_step) * geometry.pitch_at_axis / geometry.pixel_size**2


def with_even_sides(geometry: FanBeamGeometry) -> FanBeamGeometry:
    """The scan with whole bins added on the shorter side of a detector with an offset, until the sides are even.

    A row that ends within the object must be filtered and back-projected as far as the detector reaches on the other
    side. Without this the image is 7 % too bright.
    """
    lacking = int(2 * abs(geometry.detector_offset))
    offset = geometry.detector_offset - math.copysign(lacking / 2, geometry.detector_offset)
    return replace(geometry, n_detectors=geometry.n_detectors + lacking, detector_offset=offset)


def ramp_response(geometry: FanBeamGeometry, filter_name: str, on_arc: bool = False) -> np.ndarray:
    """Frequency response of the ramp at the axis in mm⁻¹, real float64 [n/2 + 1] for padded rows of n samples.

    It is the Fourier transform of the samples of the band-limited ramp. This is right at frequency zero, where a
    sampled |f| is not. n is a power of two, large enough that the convolution does not wrap around.

    Args:
        geometry: the scan.
        filter_name: a key of `FBP_WINDOWS`.
        on_arc: take the ramp for equal steps of the fan angle, as FBP of a curved detector needs.
    """
    n = 2 ** math.ceil(math.log2(max(2 * geometry.n_detectors, 2)))
    lag = np.fft.fftfreq(n, 1 / n)
    kernel = np.zeros(n)
    kernel[0] = 1 / 4
    odd_lags = lag % 2 == 1  # samples at even lags are 0
    if on_arc:
        odd_lags &= np.abs(lag) < geometry.n_detectors  # farther bins do not exist, and the sine would come back to 0
        step = geometry.detector_pitch / geometry.source_to_detector
        kernel[odd_lags] = -((step / (np.pi * np.sin(step * lag[odd_lags]))) ** 2)
    else:
        kernel[odd_lags] = -1 / (np.pi * lag[odd_lags]) ** 2
    response = np.fft.rfft(kernel).real / geometry.pitch_at_axis
    return response * FBP_WINDOWS[filter_name](np.linspace(0, 1, len(response)))


def backprojection_matrix(geometry: FanBeamGeometry) -> ScanMatrix:
    """Weighted back-projection, as the transpose of the returned matrix. Large ones are cached on disk."""

    def build() -> Arrays:
        layout = Numbering(geometry)
        backward = _by_pixels(geometry)
        return *transpose_csr(backward, layout.n_rays, layout.quarters), *backward

    return ScanMatrix(geometry, cached("back-projection matrix", geometry, build))


def fbp_of_slices(sinograms: np.ndarray, geometry: FanBeamGeometry, filter_name: str) -> np.ndarray:
    """FBP of many slices without a matrix, for all views of a dense scan: float32 [Z, S, S].

    It equals that of `FanBeamProjector`, but for a detector with an offset of half a bin or more.

    Args:
        sinograms: line integrals [V, D, Z].
        geometry: the scan.
        filter_name: a key of `FBP_WINDOWS`.
    """
    n_bins, size = geometry.n_detectors, geometry.image_size
    response = torch.from_numpy(ramp_response(geometry, filter_name, on_arc=geometry.beam == "fan_curved"))
    n = 2 * (len(response) - 1)
    weights = np.broadcast_to(ray_weights(geometry), (geometry.n_views, n_bins))[..., None]
    axis = (np.arange(size) - (size - 1) / 2) * geometry.pixel_size
    x, y = np.tile(axis, size), -np.repeat(axis, size)
    images = np.empty((sinograms.shape[2], size**2), np.float32)
    for block in (slice(start, start + _SLICES) for start in range(0, len(images), _SLICES)):
        total = torch.zeros(size**2, len(images[block]))
        for view in range(geometry.n_views):
            row = torch.from_numpy(sinograms[view, :, block] * weights[view])
            row = torch.fft.irfft(torch.fft.rfft(row, n, dim=0) * response[:, None], n, dim=0)[:n_bins].float()
            bins, share = _bins_of(x[:, None], y[:, None], slice(view, view + 1), geometry)
            share[(bins < 0) | (bins >= n_bins)] = 0
            places, weight = torch.from_numpy(bins[:, 0].clip(0, n_bins - 1)), torch.from_numpy(share[:, 0]).float()
            total += embedding_bag(places, row, mode="sum", per_sample_weights=weight)
        images[block] = total.T.numpy()
    return images.reshape(-1, size, size)


def _by_pixels(geometry: FanBeamGeometry) -> Csr:
    """Weighted pixel-driven back-projection of the distinct views: rows are pixels, columns rays, as in `Numbering`.

    From each view a pixel gets the value of the filtered row at the point where the ray through its centre meets the
    detector, linearly interpolated, times the angle that the view stands for. A fan beam also has the factor
    (source_to_axis / distance)². This is the distance from the source: along the central ray for a flat detector, to
    the pixel itself for a curved one.
    """
    layout = Numbering(geometry)
    n_views, n_detectors, size = geometry.n_distinct_views, geometry.n_detectors, geometry.image_size
    numbers = layout.ray_numbers() + layout.n_rays * np.arange(layout.quarters)[:, None, None]
    distinct = layout.ray_numbers()[0] >= 0
    pixels = layout.corner_pixels()  # −1 is padding

    def part(start: int, stop: int) -> Triples:
        row, column = np.divmod(pixels[start:stop, :, None], size)
        x, y = ((z - (size - 1) / 2) * geometry.pixel_size for z in (column, size - 1 - row))
        bins, weights = _bins_of(x, y, slice(n_views), geometry)
        mask = (bins >= 0) & (bins < n_detectors) & (weights > 0) & (pixels >= 0)[start:stop, :, None, None]
        mask &= distinct[bins.clip(0, n_detectors - 1)]  # a mirrored bin gets its share by a turn of the other
        pixel, corner, view, _ = np.nonzero(mask)
        return start + pixel, numbers[corner, view, bins[mask]], weights[mask].astype(np.float32)

    triples = in_threads(part, layout.n_pixels, max(1, _CHUNK // geometry.n_views))
    return to_csr(triples, layout.n_pixels, layout.quarters * layout.n_rays)


def _bins_of(x: np.ndarray, y: np.ndarray, views: slice, geometry: FanBeamGeometry) -> tuple[np.ndarray, np.ndarray]:
    """The two bins beside the ray of each view through points (x, y) in mm, and their weights: [..., views, 2] each."""
    cos, sin = np.cos(angles := geometry.angles()[views]), np.sin(angles)
    u, gain = _seen(x * cos + y * sin, y * cos - x * sin, geometry)
    position = u / geometry.detector_pitch + (geometry.n_detectors - 1) / 2 - geometry.detector_offset
    lower_bin = np.floor(position)
    bins = np.stack([lower_bin, lower_bin + 1], axis=-1).astype(np.intp)
    return bins, (1 - np.abs(position[..., None] - bins)) * (abs(geometry.angle_step) * gain)[..., None]


def _seen(t: np.ndarray, v: np.ndarray, geometry: FanBeamGeometry) -> tuple[np.ndarray, np.ndarray]:
    """Detector coordinate u in mm of the rays through points, and the weight of these rays in FBP.

    Args:
        t: coordinate of the points along the detector in mm, 0 on the central ray.
        v: their coordinate along the central ray in mm, 0 at the axis.
        geometry: the scan.
    """
    if not geometry.is_fan:
        return t, np.ones_like(t)
    depth = geometry.source_to_axis + v
    if geometry.beam == "fan_flat":
        return t * geometry.source_to_detector / depth, (geometry.source_to_axis / depth) ** 2
    return np.arctan2(t, depth) * geometry.source_to_detector, geometry.source_to_axis**2 / (depth**2 + t**2)


def _smooth_side(bins: np.ndarray, geometry: FanBeamGeometry) -> np.ndarray:
    """Smooth weight of bins on a detector with an offset: 0 beyond its shorter side, and up to 1 from there.

    With a large offset, a full turn has Wang's weights. With an offset of a quarter bin, only the last bins of a full
    turn differ from 1/2, because all others are seen from both sides.

    Args:
        bins: coordinate along the detector in bins, 0 on the central ray.
        geometry: the scan.
    """
    offset = geometry.detector_offset
    shorter = geometry.n_detectors / 2 - abs(offset)
    to_end = bins * math.copysign(1, offset) + shorter
    if abs(offset) < 1e-9:  # bins; the quotient below would overflow
        return (to_end > 0).astype(np.float64)
    taper = min(2 * shorter, _SIDE_TAPER * abs(offset))
    return np.sin(np.pi / 2 * np.clip(to_end / taper, 0, 1)) ** 2


def _smooth_ends(beta: np.ndarray, geometry: FanBeamGeometry) -> np.ndarray:
    """Noo's c(β): 1 within the scanned range, cos² down to 0 at its ends, 0 outside. A view covers its step.

    β may be any number: it counts modulo a turn.
    """
    span = abs(geometry.angle_span)
    middle = geometry.first_angle + (geometry.angle_span - geometry.angle_step) / 2
    taper = min(_TAPER, span / 4)
    from_middle = np.abs((beta - middle + math.pi) % FULL_TURN - math.pi)
    to_end = np.clip((span / 2 - from_middle) / taper, 0, 1)
    return np.sin(np.pi / 2 * to_end) ** 2
