"""Noise power spectrum, task transfer function and detectability, from regions of images, in float64.

Definitions: ICRU Report 87 (2012) for noise and resolution; Barrett and Myers, Foundations of Image Science (2004), for
observers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_BINS_PER_PIXEL = 4  # edges at many angles to the grid sample finer than pixels
_RESAMPLES = 200


def noise_power(regions: Tensor, pixel_size: float) -> Tensor:
    """The mean noise power spectrum [N, N], in HU² mm², of uniform regions [..., N, N] in HU; pixel_size in mm.

    Each region loses its mean. The order is that of `torch.fft.fftfreq`, the integral is the variance.
    """
    deviations = regions - regions.mean((-2, -1), keepdim=True)
    power = torch.fft.fft2(deviations).abs().square().flatten(0, -3).mean(0)
    return power * pixel_size**2 / power.numel()


def noise_of(power: Tensor, pixel_size: float) -> Tensor:
    """Standard deviation in HU, and mean frequency in 1/mm, of a noise power spectrum [N, N]: [2]."""
    deviation = power.sum().sqrt() / (len(power) * pixel_size)
    return torch.stack([deviation, (power * _radii(len(power), pixel_size)).sum() / power.sum()])


def radial_mean(power: Tensor, pixel_size: float) -> tuple[Tensor, Tensor]:
    """Frequencies in 1/mm, and the means of a spectrum [N, N] over rings of these; both [N/2 − 1], without zero."""
    step = 1 / (len(power) * pixel_size)
    rings = (_radii(len(power), pixel_size) / step).round().long().flatten()
    means = torch.bincount(rings, power.flatten()) / torch.bincount(rings)
    kept = slice(1, len(power) // 2)
    return torch.arange(len(means))[kept] * step, means[kept]


def _radii(size: int, pixel_size: float) -> Tensor:
    axis = torch.fft.fftfreq(size, pixel_size, dtype=torch.float64)
    return torch.hypot(axis[:, None], axis)


def edge_profile(image: Tensor, x: float, y: float, radius: float, pixel_size: float) -> Tensor:
    """Sums of pixels and their numbers, by distance to the edge of a disc: [2, bins].

    The disc of an image [H, W] is at (x, y), to the right and down from the middle; all in mm. Bins are a quarter of a
    pixel, from half a radius inside the edge to half a radius outside.
    """
    rows, columns = ((torch.arange(n, dtype=torch.float64) - (n - 1) / 2) * pixel_size for n in image.shape)
    distance = torch.hypot(columns - x, rows[:, None] - y) - radius
    n_bins = 2 * math.ceil(radius / 2 / pixel_size * _BINS_PER_PIXEL)
    bins = (distance / pixel_size * _BINS_PER_PIXEL + n_bins / 2).floor().long()
    near = (bins >= 0) & (bins < n_bins)
    values = image[near].double()
    counted = torch.stack([values, torch.ones_like(values)])
    return torch.zeros(2, n_bins, dtype=torch.float64).index_add(1, bins[near], counted)


def task_transfer(profiles: Tensor, pixel_size: float) -> tuple[Tensor, Tensor]:
    """Frequencies up to 1/pixel in 1/mm, and the task transfer function there, of profiles [n, 2, bins]; both [201].

    By the circular edge (Richard et al., Medical Physics 39, 2012): the modulus of the Fourier transform of the
    profile's derivative, 1 at frequency 0. Against noise, the outer halves of the derivative fade to zero.
    """
    sums, numbers = profiles.sum(0)
    filled = numbers > 0
    width = pixel_size / _BINS_PER_PIXEL
    places = ((torch.arange(len(sums), dtype=torch.float64) + 0.5 - len(sums) / 2) * width)[filled]
    middles = (places[1:] + places[:-1]) / 2
    faded = (4 * middles.abs() / (len(sums) * width) - 1).clamp(0, 1)  # 0 in the inner half, 1 at the ends
    spread = (sums / numbers)[filled].diff() * (math.pi / 2 * faded).cos().square()
    frequencies = torch.linspace(0, 1 / pixel_size, 201, dtype=torch.float64)
    modulation = (torch.exp(-2j * math.pi * frequencies[:, None] * middles) @ spread.cdouble()).abs()
    return frequencies, modulation / modulation[0]


def half_modulation(profiles: Tensor, pixel_size: float) -> Tensor:
    """The frequency in 1/mm at which the task transfer function falls to one half; the last one if it does not."""
    frequencies, modulation = task_transfer(profiles, pixel_size)
    below = (modulation < 0.5).nonzero()
    if not len(below):
        return frequencies[-1]
    k = int(below[0])
    share = (modulation[k - 1] - 0.5) / (modulation[k - 1] - modulation[k])
    return frequencies[k - 1] + share * (frequencies[k] - frequencies[k - 1])


def dog_channels(size: int) -> Tensor:
    """Three difference-of-Gaussians channels, as images around the middle of a region: [3, size, size].

    The sparse set of Abbey and Barrett, JOSA A 18 (2001): exp(−(f/2σ)²/2) − exp(−(f/σ)²/2), with σ of 0.015, 0.03 and
    0.06 cycles per pixel.
    """
    axis, radius = torch.fft.fftfreq(size, dtype=torch.float64), _radii(size, 1.0)
    shift = torch.exp(-1j * math.pi * (size - 1) * (axis[:, None] + axis))  # to between the middle pixels
    bands = (torch.exp(-((radius / 2 / s) ** 2) / 2) - torch.exp(-((radius / s) ** 2) / 2) for s in (0.015, 0.03, 0.06))
    return torch.stack([torch.fft.ifft2(band * shift).real for band in bands])


def channel_outputs(regions: Tensor) -> Tensor:
    """What each channel makes of regions [..., N, N]: [..., 3]."""
    return torch.einsum("...hw,chw->...c", regions.double(), dog_channels(regions.shape[-1]))


def detectability(absent: Tensor, present: Tensor) -> Tensor:
    """d' of the channelised Hotelling observer, by channel outputs [n, places, C] without the insert and with it.

    d'² = Δᵀ K⁻¹ Δ, with Δ the difference of mean outputs and K their covariance at a place, pooled over places and both
    classes. From few images the square is too large: its bias for independent normal outputs is subtracted. A square
    below zero counts as 0.
    """
    n, m, (places, n_channels) = len(absent), len(present), absent.shape[1:]
    difference = present.mean((0, 1)) - absent.mean((0, 1))
    deviations = torch.cat([absent - absent.mean(0), present - present.mean(0)]).flatten(0, 1)
    freedom = places * (n + m - 2)
    covariance = deviations.T @ deviations / freedom
    square = difference @ torch.linalg.pinv(covariance, hermitian=True) @ difference  # flat images have no inverse
    bias = n_channels * (1 / n + 1 / m) / places
    return (square * (freedom - n_channels - 1) / freedom - bias).clamp_min(0).sqrt()


def detected(absent: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """d', and half of its 95 % interval for normal outputs: few images leave a bootstrap no covariance.

    The variance of d' is about (1/n + 1/m)/places + d'²/(2 · degrees of freedom).
    """
    n, m, places = len(absent), len(present), absent.shape[1]
    score = detectability(absent, present)
    variance = (1 / n + 1 / m) / places + score.square() / (2 * places * (n + m - 2))
    return score, 1.96 * variance.sqrt()


def with_interval(score: Callable[..., Tensor], *samples: Tensor) -> tuple[Tensor, Tensor]:
    """A score of samples [n, …] of images, and half of its 95 % interval, by the bootstrap over images.

    It is 1.96 standard errors, times √(n/(n − 1)), because n images resemble themselves too much.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(_RESAMPLES):
        numbers = (torch.randint(len(sample), (len(sample),), generator=generator) for sample in samples)
        drawn.append(score(*(sample[n] for sample, n in zip(samples, numbers, strict=True))))
    fewest = min(len(sample) for sample in samples)
    return score(*samples), 1.96 * math.sqrt(fewest / (fewest - 1)) * torch.stack(drawn).std(0)
