"""Noise power spectrum, task transfer function and detectability, from regions of reconstructed images.

Definitions: ICRU Report 87, Radiation Dose and Image-Quality Assessment in Computed Tomography (2012), for noise and
resolution; Barrett and Myers, Foundations of Image Science (2004), for observers. All in float64.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_BINS_PER_PIXEL = 4
"""Of an edge profile. Edges at many angles to the grid sample finer than pixels."""
_RESAMPLES = 200


def noise_power(regions: Tensor, pixel_size: float) -> Tensor:
    """The noise power spectrum of uniform regions, in HU² mm² where they are in HU; its integral is their variance.

    Args:
        regions: [..., N, N]. From each its mean is subtracted.
        pixel_size: in mm.

    Returns [N, N], the mean over the regions, in the order of `torch.fft.fftfreq`.
    """
    deviations = regions - regions.mean((-2, -1), keepdim=True)
    power = torch.fft.fft2(deviations).abs().square().flatten(0, -3).mean(0)
    return power * pixel_size**2 / power.numel()


def noise_of(power: Tensor, pixel_size: float) -> Tensor:
    """Standard deviation, and mean frequency in 1/mm, of a noise power spectrum [N, N]: float64 [2]."""
    area = (len(power) * pixel_size) ** -2  # of a cell of the spectrum
    mean_frequency = (power * _radii(len(power), pixel_size)).sum() / power.sum()
    return torch.stack([(power.sum() * area).sqrt(), mean_frequency])


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
    """Sums of pixels and their numbers, by distance to the edge of a disc: float64 [2, bins].

    Bins are a quarter of a pixel wide, from half a radius inside the edge to half a radius outside.

    Args:
        image: [H, W] in any unit.
        x, y: centre of the disc in mm from that of the image, to the right and down.
        radius: of the disc in mm.
        pixel_size: in mm.
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
    """The task transfer function of an edge: frequencies up to 1/pixel in 1/mm [F], and the modulation there [F].

    By the circular edge (Richard et al., Medical Physics 39, 2012): it is the modulus of the Fourier transform of the
    profile's derivative, divided by its value at frequency 0. Against noise far from the edge, the outer halves of the
    derivative fade to zero as a cosine squared.

    Args:
        profiles: sums and numbers of `edge_profile`, [n, 2, bins]; their quotient is the profile.
        pixel_size: in mm.
    """
    sums, numbers = profiles.sum(0)
    filled = numbers > 0  # a bin without a pixel gives no difference
    width = pixel_size / _BINS_PER_PIXEL
    places = ((torch.arange(len(sums), dtype=torch.float64) + 0.5 - len(sums) / 2) * width)[filled]
    spread = (sums / numbers)[filled].diff()
    middles = (places[1:] + places[:-1]) / 2
    faded = (4 * middles.abs() / (len(sums) * width) - 1).clamp(0, 1)  # 0 in the inner half, 1 at the ends
    spread = spread * (math.pi / 2 * faded).cos().square()
    frequencies = torch.linspace(0, 1 / pixel_size, 201, dtype=torch.float64)
    waves = torch.exp(-2j * math.pi * frequencies[:, None] * middles)
    modulation = (waves @ spread.to(waves)).abs()
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
    """Three channels, differences of Gaussians, as images around the middle of a region: float64 [3, size, size].

    The sparse set (S-DOG) of Abbey and Barrett, JOSA A 18 (2001): the channel j = 1 … 3 passes
    exp(−(f/2σ)²/2) − exp(−(f/σ)²/2), with σ = 0.015 · 2ʲ⁻¹ cycles per pixel.
    """
    axis = torch.fft.fftfreq(size, dtype=torch.float64)
    radius = _radii(size, 1.0)
    shift = torch.exp(-1j * math.pi * (size - 1) * (axis[:, None] + axis))  # to between the middle pixels
    channels = []
    for deviation in (0.015, 0.03, 0.06):
        wide, narrow = (torch.exp(-((radius / s) ** 2) / 2) for s in (2 * deviation, deviation))
        channels.append(torch.fft.ifft2((wide - narrow) * shift).real)
    return torch.stack(channels)


def channel_outputs(regions: Tensor, channels: Tensor) -> Tensor:
    """What each channel [C, N, N] makes of regions [..., N, N]: float64 [..., C]."""
    return torch.einsum("...hw,chw->...c", regions.double(), channels)


def detectability(absent: Tensor, present: Tensor) -> Tensor:
    """d' of the channelised Hotelling observer, which knows the insert, its places, and the statistics of the channels.

    d'² = Δᵀ K⁻¹ Δ, with Δ the difference of mean outputs and K their covariance at a place, pooled over places and both
    classes. From few images the square is too large; its bias for normal, independent outputs is subtracted. A square
    below zero counts as 0.

    Args:
        absent, present: channel outputs without and with the insert, [n, places, C] and [m, places, C].
    """
    n, m, (places, n_channels) = len(absent), len(present), absent.shape[1:]
    difference = present.mean((0, 1)) - absent.mean((0, 1))
    deviations = torch.cat([absent - absent.mean(0), present - present.mean(0)]).flatten(0, 1)
    freedom = places * (n + m - 2)
    covariance = deviations.T @ deviations / freedom
    square = difference @ torch.linalg.pinv(covariance, hermitian=True) @ difference  # flat images have no inverse
    bias = n_channels * (1 / n + 1 / m) / places
    return (square * (freedom - n_channels - 1) / freedom - bias).clamp_min(0).sqrt()


def with_interval(score: Callable[..., Tensor], *samples: Tensor) -> tuple[Tensor, Tensor]:
    """A score of images, and half of its 95 % interval, by the bootstrap: images of each sample are drawn again.

    It is 1.96 standard errors. They are scaled by √(n/(n − 1)), because a sample of n resembles itself too much.

    Args:
        score: a function of the samples.
        samples: [n, ...], one entry an image.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(_RESAMPLES):
        numbers = (torch.randint(len(sample), (len(sample),), generator=generator) for sample in samples)
        drawn.append(score(*(sample[n] for sample, n in zip(samples, numbers, strict=True))))
    fewest = min(len(sample) for sample in samples)
    return score(*samples), 1.96 * math.sqrt(fewest / (fewest - 1)) * torch.stack(drawn).std(0)
